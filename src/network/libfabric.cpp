// Network over libfabric: fi_writedata() between endpoints of type RDM.
//
// The library is loaded when a world over hosts asks for it, and not before: with some of its
// providers come libraries that set signal handlers of their own as they are loaded (PSM's, which
// print a backtrace), in every process that links to it.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include "base/unique_fd.h"
#include "network/network.h"
#include "switchyard/error.h"

namespace switchyard::network {
namespace {

constexpr std::uint32_t kApi = FI_VERSION(1, 11);
constexpr std::size_t kMostNameBytes = 224;
constexpr std::uint32_t kSignalBytes = 8;
// Completions that may be waiting to be read. Chunks on their way are bounded by windows.
constexpr std::size_t kQueueEntries = 4096;

// The data that others need: where the endpoint is, and how to write into the memory behind it.
struct Address {
  RegionKey windows;
  std::uint64_t name_bytes = 0;
  std::array<std::byte, kMostNameBytes> name{};
};

// The functions of libfabric.so.1 that are not inline, in the versions that the headers describe.
struct Library {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;
  std::string problem;  // why it is not there; empty if it is

  Library() {
    // A handler that the process had stays. (libinfinipath would end the process at Ctrl-C.)
    constexpr std::array kSignals = {SIGSEGV, SIGBUS,  SIGILL, SIGABRT,
                                     SIGFPE,  SIGTERM, SIGINT, SIGHUP};
    std::array<struct sigaction, kSignals.size()> handlers{};
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &handlers[i]);
    }
    // It is never unloaded: some of its providers keep threads.
    void* const handle = ::dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &handlers[i], nullptr);
    }
    if (handle == nullptr) {
      problem = ::dlerror();
      return;
    }
    const auto find = [&](auto& function, const char* name, const char* of_headers) {
      // Finds the version that the headers were written for, as a linker would, because fi_info
      // grows. With headers newer than those known here it takes the default version, that of a
      // library from the same package.
      void* const found = FI_MAJOR_VERSION == 1 && FI_MINOR_VERSION <= 17
                              ? ::dlvsym(handle, name, of_headers)
                              : ::dlsym(handle, name);
      if (found == nullptr) problem = fmt::format("it has no {} of {}", name, of_headers);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(getinfo, "fi_getinfo", "FABRIC_1.3");
    find(freeinfo, "fi_freeinfo", "FABRIC_1.3");
    find(dupinfo, "fi_dupinfo", "FABRIC_1.3");
    find(fabric, "fi_fabric", "FABRIC_1.1");
    find(strerror, "fi_strerror", "FABRIC_1.0");
    find(version, "fi_version", "FABRIC_1.0");
  }
};

const Library& library() {
  // It is never destroyed: threads may use it while the process ends.
  static const Library& loaded = *new Library();
  return loaded;
}

const Library& require_library() {
  if (library().problem.empty()) return library();
  throw Error(ErrorCode::kUnsupported,
              fmt::format("worlds over several hosts need libfabric, and "
                          "libfabric.so.1 cannot be used: {}; install libfabric1",
                          library().problem));
}

[[noreturn]] void throw_fabric(std::string_view what, std::int64_t code) {
  throw Error(
      ErrorCode::kSystem,
      fmt::format("libfabric: {}: {} ({}); `fi_info` lists what this host offers, and "
                  "FI_LOG_LEVEL=warn tells more",
                  what, library().strerror(static_cast<int>(code < 0 ? -code : code)), code));
}

void require(std::int64_t code, std::string_view what) {
  if (code != 0) throw_fabric(what, code);
}

template <typename T>
struct Closes {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using Owned = std::unique_ptr<T, Closes<T>>;

struct FreesInfo {
  void operator()(fi_info* info) const { library().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreesInfo>;

// Device memory is registered by a dmabuf, which libfabric knows from 1.20 on.
#ifdef FI_MR_DMABUF
constexpr bool kKnowsDeviceMemory = true;
constexpr std::uint64_t kDeviceCapability = FI_HMEM;
constexpr int kDeviceMode = FI_MR_HMEM;
#else
constexpr bool kKnowsDeviceMemory = false;
constexpr std::uint64_t kDeviceCapability = 0;
constexpr int kDeviceMode = 0;
#endif
constexpr std::uint32_t kDeviceApi = FI_VERSION(1, 20);

Info wanted(bool device_memory = false) {
  Info hints(library().dupinfo(nullptr));
  if (!hints) throw_fabric("cannot describe an endpoint", FI_ENOMEM);
  hints->caps = FI_RMA | FI_MSG;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  // One thread uses the domain.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
  if (device_memory) {
    hints->caps |= kDeviceCapability;
    hints->domain_attr->mr_mode |= kDeviceMode;
  }
  return hints;
}

// Null: there is none.
Info look(const char* node, bool device_memory) {
  if (device_memory && !kKnowsDeviceMemory) return nullptr;
  const Info hints = wanted(device_memory);
  fi_info* found = nullptr;
  const int code = library().getinfo(device_memory ? kDeviceApi : kApi, node, nullptr,
                                     node == nullptr ? 0 : FI_SOURCE, hints.get(), &found);
  if (code != 0 && code != -FI_ENODATA && !device_memory) {
    throw_fabric("cannot look for providers", code);
  }
  return Info(code == 0 ? found : nullptr);
}

const fi_info* find_provider(const fi_info* among, std::string_view provider) {
  for (; among != nullptr; among = among->next) {
    if (among->fabric_attr->prov_name == provider) return among;
  }
  return nullptr;
}

// Providers that reach other hosts, the best first. Whatever is not here (shm, sockets, udp) does
// not, is out of use, or cannot write into remote memory; FI_PROVIDER can still ask for it.
constexpr std::array<std::string_view, 5> kProviders = {"efa", "verbs;ofi_rxm", "psm3",
                                                        "tcp;ofi_rxm", "tcp"};

Info choose(const std::string& local_address) {
  const bool asked = std::getenv("FI_PROVIDER") != nullptr;
  // EFA has addresses of its own, which an IP address does not find.
  const Info by_address = look(local_address.c_str(), false);
  const Info by_itself = look(nullptr, false);
  const auto copy = [](const fi_info* info) {
    Info one(library().dupinfo(info));
    if (!one) throw_fabric("cannot keep a provider", FI_ENOMEM);
    return one;
  };
  for (const std::string_view provider : kProviders) {
    const bool efa = provider == "efa";
    const fi_info* const found = find_provider((efa ? by_itself : by_address).get(), provider);
    if (found == nullptr) continue;
    // The same with device memory, if it can.
    const Info with_device = look(efa ? nullptr : local_address.c_str(), true);
    const fi_info* const better = find_provider(with_device.get(), provider);
    return copy(better != nullptr ? better : found);
  }
  if (asked && by_address) return copy(by_address.get());
  throw Error(
      ErrorCode::kSystem,
      fmt::format("libfabric has no provider that reaches other hosts from {}; see `fi_info`, and "
                  "unset FI_PROVIDER or set it to tcp, verbs or efa",
                  local_address));
}

// True for a listening TCP socket that has this address.
bool listens_at(int fd, const sockaddr_storage& address) {
  int listens = 0;
  socklen_t length = sizeof listens;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) {
    return false;
  }
  sockaddr_storage own{};
  length = sizeof own;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      own.ss_family != address.ss_family) {
    return false;
  }
  if (own.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(own);
    const auto& b = reinterpret_cast<const sockaddr_in&>(address);
    return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr;
  }
  if (own.ss_family == AF_INET6) {
    const auto& a = reinterpret_cast<const sockaddr_in6&>(own);
    const auto& b = reinterpret_cast<const sockaddr_in6&>(address);
    return a.sin6_port == b.sin6_port && std::memcmp(&a.sin6_addr, &b.sin6_addr, 16) == 0;
  }
  return false;
}

class Libfabric final : public Network {
 public:
  explicit Libfabric(const std::string& local_address) : info_(choose(local_address)) {
    immediate_apart_ = std::string_view(info_->fabric_attr->prov_name) == "tcp;ofi_rxm" &&
                       (info_->tx_attr->msg_order & FI_ORDER_WAW) != 0;
    takes_device_memory_ = kKnowsDeviceMemory && (info_->caps & kDeviceCapability) != 0;
    fid_fabric* fabric = nullptr;
    require(library().fabric(info_->fabric_attr, &fabric, nullptr), "cannot open the fabric");
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    require(fi_domain(fabric, info_.get(), &domain, nullptr), "cannot open the domain");
    domain_.reset(domain);

    fi_av_attr addresses{};
    addresses.type = FI_AV_TABLE;
    fid_av* av = nullptr;
    require(fi_av_open(domain, &addresses, &av, nullptr), "cannot open an address vector");
    av_.reset(av);

    fi_cq_attr completions{};
    completions.size = kQueueEntries;
    completions.format = FI_CQ_FORMAT_DATA;
    completions.wait_obj = FI_WAIT_FD;
    fid_cq* cq = nullptr;
    if (fi_cq_open(domain, &completions, &cq, nullptr) == 0) {
      cq_.reset(cq);
      if (fi_control(&cq->fid, FI_GETWAIT, &wait_fd_) != 0) wait_fd_ = -1;
    } else {
      // Some providers have no descriptor to wait for: the proxy then looks now and then.
      completions.wait_obj = FI_WAIT_NONE;
      require(fi_cq_open(domain, &completions, &cq, nullptr), "cannot open a completion queue");
      cq_.reset(cq);
    }

    fid_ep* endpoint = nullptr;
    require(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "cannot open an endpoint");
    endpoint_.reset(endpoint);
    require(fi_ep_bind(endpoint, &av->fid, 0), "cannot bind the address vector");
    require(fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV), "cannot bind the queue");
    require(fi_enable(endpoint), "cannot enable the endpoint");
  }

  std::uint32_t add(std::span<std::byte> memory, int dmabuf) override {
    const std::uint64_t access = FI_WRITE | FI_REMOTE_WRITE;
    const std::uint64_t key = 1 + regions_.size();  // where the provider does not choose
    fid_mr* region = nullptr;
    if (dmabuf < 0) {
      require(fi_mr_reg(domain_.get(), memory.data(), memory.size(), access, 0, key, 0, &region,
                        nullptr),
              fmt::format("cannot register {} bytes of {} (is `ulimit -l` too small?)",
                          memory.size(), regions_.empty() ? "windows" : "rows"));
    } else {
      region = register_device_memory(memory, dmabuf, access, key);
    }
    Owned<fid_mr> owned(region);
    enable(region);
    regions_.push_back({memory, std::move(owned)});
    return static_cast<std::uint32_t>(regions_.size() - 1);
  }
  void remove(std::uint32_t region) override { regions_[region] = {}; }
  RegionKey key(std::uint32_t region) override {
    const Region& one = regions_[region];
    return {fi_mr_key(one.handle.get()), (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0
                                             ? reinterpret_cast<std::uint64_t>(one.memory.data())
                                             : 0};
  }
  bool takes_device_memory() const override { return takes_device_memory_; }
  Blob address() override {
    Address mine;
    std::size_t bytes = mine.name.size();
    require(fi_getname(&endpoint_->fid, mine.name.data(), &bytes), "cannot read the address");
    mine.name_bytes = bytes;
    mine.windows = key(0);
    Blob blob(sizeof mine);
    std::memcpy(blob.data(), &mine, sizeof mine);
    return blob;
  }

  void connect(std::span<const Blob> by_rank) override {
    peers_.resize(by_rank.size());
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
      if (by_rank[r].empty()) continue;
      Address theirs;
      if (by_rank[r].size() != sizeof theirs) {
        throw Error(ErrorCode::kSpecMismatch,
                    fmt::format("the network address of rank {} has {} bytes; use one build of "
                                "Switchyard for all ranks",
                                r, by_rank[r].size()));
      }
      std::memcpy(&theirs, by_rank[r].data(), sizeof theirs);
      Peer& peer = peers_[r];
      peer.windows = theirs.windows;
      if (fi_av_insert(av_.get(), theirs.name.data(), 1, &peer.address, 0, nullptr) != 1) {
        throw_fabric(fmt::format("cannot use the address of rank {}", r), FI_EADDRNOTAVAIL);
      }
    }
  }

  // libfabric 1.17 accepts whatever comes to the port of its tcp provider, and keeps the
  // descriptors of strangers until the endpoint is closed, also after they have left. It offers no
  // way to close the port alone. So a filter of the kernel's (SO_ATTACH_FILTER of socket(7)) drops
  // every packet for the listening socket. Connections that were accepted are sockets of their own,
  // which had no filter to inherit.
  void refuse_connections() override {
    sockaddr_storage name{};
    std::size_t bytes = sizeof name;
    if (fi_getname(&endpoint_->fid, &name, &bytes) != 0) return;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
      // A descriptor of its own, because other threads may close and open what the entry names.
      const UniqueFd fd(::fcntl(std::atoi(entry.path().filename().c_str()), F_DUPFD_CLOEXEC, 0));
      if (!fd || !listens_at(fd.get(), name)) continue;
      sock_filter drop_all = BPF_STMT(BPF_RET | BPF_K, 0);
      const sock_fprog program{1, &drop_all};
      // If the kernel refuses, strangers cost descriptors, as they do while the world forms.
      ::setsockopt(fd.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
    }
  }

  // A write, and the immediate with it or behind it.
  bool put(const Put& put) override {
    const RegionKey& to = put.key ? *put.key : peer(put.rank).windows;
    if (!immediate_apart_) return write(put, to, put.immediate, put.context);
    if (!write(put, to, std::nullopt, put.context)) return false;
    owed_.push_back({put.rank, put.immediate});
    pay_owed();
    return true;
  }

  // Not every provider can write 0 bytes, so some from the front of this memory go to the front of
  // the other's, which nobody reads. It does not use fi_inject_writedata(): in libfabric 1.17 an
  // injected write that fails has no context, and ofi_rxm then follows a null pointer as it handles
  // the error.
  bool signal(int rank, std::uint32_t immediate) override {
    Put front;
    front.rank = rank;
    front.bytes = kSignalBytes;
    return write(front, peer(rank).windows, immediate, std::nullopt);
  }

  std::size_t poll(std::span<Event> events) override {
    pay_owed();
    std::size_t count = 0;
    while (count < events.size() && !unreported_.empty()) {
      events[count++] = std::move(unreported_.front());
      unreported_.pop_front();
    }
    std::array<fi_cq_data_entry, 16> entries;
    while (count < events.size()) {
      const std::size_t most = std::min(entries.size(), events.size() - count);
      const ssize_t got = fi_cq_read(cq_.get(), entries.data(), most);
      if (got == -FI_EAVAIL) {
        if (!read_error(events[count])) break;
        ++count;
        continue;
      }
      if (got <= 0) break;
      for (ssize_t i = 0; i < got; ++i) {
        Event& event = events[count];
        event = {};
        const fi_cq_data_entry& entry = entries[static_cast<std::size_t>(i)];
        if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
          event.kind = Event::Kind::kArrived;
          event.immediate = static_cast<std::uint32_t>(entry.data);
        } else if (entry.op_context != nullptr) {
          auto* const operation = static_cast<Operation*>(entry.op_context);
          give_back(operation);
          if (!operation->context) continue;  // a signal
          event.kind = Event::Kind::kSent;
          event.context = *operation->context;
        } else {
          continue;
        }
        ++count;
      }
    }
    return count;
  }

  int wait_fd() const override { return wait_fd_; }
  bool may_sleep() override {
    if (!unreported_.empty() || !owed_.empty()) return false;
    if (wait_fd_ < 0) return true;
    fid* waits_for = &cq_->fid;
    return fi_trywait(fabric_.get(), &waits_for, 1) == FI_SUCCESS;
  }
  std::string name() const override {
    return fmt::format("libfabric {}", info_->fabric_attr->prov_name);
  }

 private:
  // libfabric may use the first words of what an operation's context points to.
  struct Operation {
    fi_context2 for_the_provider{};
    int rank = -1;
    std::optional<std::uint64_t> context;  // the caller's; none of a signal
  };
  struct Peer {
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    RegionKey windows;
  };

  struct Region {
    std::span<std::byte> memory;
    Owned<fid_mr> handle;
  };

  void enable(fid_mr* region) {
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) == 0) return;
    require(fi_mr_bind(region, &endpoint_->fid, 0), "cannot bind the memory to the endpoint");
    require(fi_mr_enable(region), "cannot enable the memory");
  }

  fid_mr* register_device_memory(std::span<std::byte> memory, int dmabuf, std::uint64_t access,
                                 std::uint64_t key) {
#ifdef FI_MR_DMABUF
    fi_mr_dmabuf place{};
    place.fd = dmabuf;
    place.len = memory.size();
    place.base_addr = memory.data();
    fi_mr_attr how{};
    how.dmabuf = &place;
    how.iov_count = 1;
    how.access = access;
    how.requested_key = key;
    how.iface = FI_HMEM_CUDA;
    fid_mr* region = nullptr;
    require(fi_mr_regattr(domain_.get(), &how, FI_MR_DMABUF, &region),
            fmt::format("cannot register {} bytes of a device's memory", memory.size()));
    return region;
#else
    (void)dmabuf, (void)access, (void)key;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} bytes of a device's memory cannot be registered: this build knows "
                            "libfabric {}.{}, and dmabuf comes with 1.20",
                            memory.size(), FI_MAJOR_VERSION, FI_MINOR_VERSION));
#endif
  }

  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  bool write(const Put& put, const RegionKey& to, std::optional<std::uint32_t> immediate,
             std::optional<std::uint64_t> context) {
    Operation* const operation = take_operation();
    operation->rank = put.rank;
    operation->context = context;
    const fi_addr_t address = peer(put.rank).address;
    const std::byte* const from = regions_[put.region].memory.data() + put.from;
    void* const region = fi_mr_desc(regions_[put.region].handle.get());
    const std::uint64_t target = to.base + put.to;
    const ssize_t code = immediate ? fi_writedata(endpoint_.get(), from, put.bytes, region,
                                                  *immediate, address, target, to.key, operation)
                                   : fi_write(endpoint_.get(), from, put.bytes, region, address,
                                              target, to.key, operation);
    if (code == 0) return true;
    give_back(operation);
    if (code != -FI_EAGAIN) report_lost(put.rank, library().strerror(static_cast<int>(-code)));
    return code != -FI_EAGAIN;
  }

  void pay_owed() {
    while (!owed_.empty() && signal(owed_.front().rank, owed_.front().immediate)) {
      owed_.pop_front();
    }
  }

  Operation* take_operation() {
    if (free_.empty()) {
      operations_.emplace_back();
      free_.push_back(&operations_.back());
    }
    Operation* const operation = free_.back();
    free_.pop_back();
    return operation;
  }
  void give_back(Operation* operation) { free_.push_back(operation); }

  void report_lost(int rank, const std::string& why) {
    Event event;
    event.kind = Event::Kind::kLost;
    event.rank = rank;
    event.why = why;
    unreported_.push_back(std::move(event));
  }

  bool read_error(Event& event) {
    fi_cq_err_entry error{};
    if (fi_cq_readerr(cq_.get(), &error, 0) <= 0) return false;
    event = {};
    event.kind = Event::Kind::kLost;
    event.why = library().strerror(error.err);
    if (error.op_context != nullptr) {
      auto* const operation = static_cast<Operation*>(error.op_context);
      event.rank = operation->rank;
      give_back(operation);
    }
    return true;
  }

  Info info_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> av_;
  Owned<fid_cq> cq_;
  std::vector<Region> regions_;
  Owned<fid_ep> endpoint_;  // closed first
  int wait_fd_ = -1;
  std::vector<Peer> peers_;
  std::deque<Operation> operations_;
  std::vector<Operation*> free_;
  std::deque<Event> unreported_;
  // Over TCP an immediate follows its bytes in a write of its own, on the same connection, which
  // keeps the order. A connection that ends in the middle of a write with an immediate crashes the
  // receiver: the error has no context, and ofi_rxm of libfabric 1.17 follows the null pointer. A
  // chunk is long on its way, a few bytes are not.
  struct Owed {
    int rank;
    std::uint32_t immediate;
  };
  bool immediate_apart_ = false;
  bool takes_device_memory_ = false;
  std::deque<Owed> owed_;
};

}  // namespace

bool is_built_in() { return true; }

void require_built_in() {}

std::string describe() {
  if (!library().problem.empty()) return "none: " + library().problem;
  const std::uint32_t version = library().version();
  std::string text = fmt::format("libfabric {}.{}", FI_MAJOR(version), FI_MINOR(version));
  const Info all = look(nullptr, false), with_device = look(nullptr, true);
  bool any = false;
  for (const std::string_view provider : kProviders) {
    if (find_provider(all.get(), provider) == nullptr) continue;
    const bool device = find_provider(with_device.get(), provider) != nullptr;
    text += fmt::format("{} {}{}", any ? "," : ":", provider, device ? " (device memory)" : "");
    any = true;
  }
  return any ? text : text + ", without a provider that reaches other hosts";
}

std::unique_ptr<Network> make_libfabric(const std::string& local_address) {
  require_library();
  return std::make_unique<Libfabric>(local_address);
}

}  // namespace switchyard::network
