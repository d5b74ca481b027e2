#include "fabric/hosts_fabric.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include "base/mapping.h"
#include "fabric/collective.h"
#include "fabric/environment.h"
#include "fabric/handshake.h"
#include "fabric/hash.h"
#include "fabric/place.h"
#include "fabric/process_fabric.h"
#include "network/rows.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

class HostsSegment final : public SymmetricSegment {
 public:
  HostsSegment(std::shared_ptr<SymmetricSegment> host, std::vector<Mapping> mirrors,
               std::vector<std::byte*> bases, std::shared_ptr<network::Proxy> proxy)
      : host_(std::move(host)), mirrors_(std::move(mirrors)) {
    bytes_ = host_->bytes();
    bases_ = std::move(bases);
    remote_ = std::make_unique<network::RemoteHeap>(std::move(proxy), bases_, bytes_);
  }
  network::RemoteHeap* remote() const override { return remote_.get(); }

 private:
  std::shared_ptr<SymmetricSegment> host_;
  std::vector<Mapping> mirrors_;
  std::unique_ptr<network::RemoteHeap> remote_;  // last: it uses the memory until it is gone
};

// A rank that has stopped is waited for by all in a step of the start, and once more by those that
// gather what came of the step.
std::chrono::milliseconds part_of(std::chrono::milliseconds deadline) {
  return std::max(deadline / 4, std::chrono::milliseconds(1));
}

// A world is made when its connections are. One that closes at once would otherwise leave requests
// for them behind, which libfabric 1.17 forgets with their memory and their descriptors.
void await_connections(const network::Proxy& proxy, std::chrono::milliseconds deadline) {
  const Clock::time_point until = Clock::now() + deadline;
  for (int peer = proxy.first_unconnected(); peer >= 0; peer = proxy.first_unconnected()) {
    throw_if_interrupted(proxy.rank());
    const std::string known = proxy.liveness(peer);
    if (proxy.is_lost(peer) || Clock::now() >= until) {
      throw TimeoutError(
          ErrorCode::kTimeout,
          fmt::format("rank {} could not exchange data with rank {} by {} within {} ms{}{}; does a "
                      "firewall let the provider's ports between the hosts through?",
                      proxy.rank(), peer, proxy.network_name(), deadline.count(),
                      known.empty() ? "" : ": ", known),
          bootstrap_failure(proxy.rank(), peer, 0, proxy.hosts().num_ranks(), 0,
                            std::chrono::nanoseconds(deadline)));
    }
    std::vector<pollfd> nothing;
    wait_ready(nothing, std::min(until, Clock::now() + std::chrono::milliseconds(1)));
  }
}

class HostsFabric final : public Fabric {
 public:
  explicit HostsFabric(HostsParts parts)
      : Fabric(parts.world->deadline()),
        world_(std::move(parts.world)),
        host_(std::move(parts.host)),
        hosts_(std::move(parts.hosts)) {
    const std::string network_name = parts.network->name();
    // Each rank's clock and its word in the world's record, on lines of their own.
    constexpr std::size_t kLine = 64;
    struct Memory {
      std::shared_ptr<SymmetricSegment> here;
      std::array<std::uint64_t, protocol::kMaxRanks> elsewhere{};  // words of other hosts' ranks
      UniqueFd life;
    };
    const auto memory = std::make_shared<Memory>();
    memory->here = host_->allocate(2 * kLine);
    std::vector<UniqueFd> lives_here = gather_lives(*host_, memory->life);
    std::vector<std::uint64_t*> alive(static_cast<std::size_t>(size())), words;
    std::vector<UniqueFd> lives(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      words.push_back(&memory->elsewhere[i]);
      if (!hosts_.same_host(r, rank())) continue;
      std::byte* const lines = memory->here->base(hosts_.local_index(r));
      alive[i] = reinterpret_cast<std::uint64_t*>(lines);
      words.back() = reinterpret_cast<std::uint64_t*>(lines + kLine);
      lives[i] = std::move(lives_here[static_cast<std::size_t>(hosts_.local_index(r))]);
    }
    const auto record =
        std::make_shared<protocol::WorldRecord>(rank(), std::move(words), memory, std::move(lives));
    attempt_together(*world_, [&] {
      proxy_ = std::make_shared<network::Proxy>(
          hosts_, rank(), parts.options, std::move(parts.network), std::move(alive), memory,
          std::move(parts.channels), std::move(parts.where), record);
    });
    // Windows that differ would be written in the wrong places.
    const std::array<std::uint32_t, 2> windows{parts.options.windows.chunk_bytes,
                                               parts.options.windows.window};
    const auto all_windows = gather(*world_, windows);
    for (std::size_t r = 1; r < all_windows.size(); ++r) {
      if (all_windows[r] == all_windows[0]) continue;
      throw Error(
          ErrorCode::kSpecMismatch,
          fmt::format("the network's windows are {} chunks of {} bytes on rank 0, and {} of "
                      "{} on rank {}; use the same on all ranks",
                      all_windows[0][1], all_windows[0][0], all_windows[r][1], all_windows[r][0],
                      r));
    }
    const network::Blob mine = proxy_->address();
    std::vector<std::byte> all = gather_all<std::byte>(*world_, mine);
    std::vector<network::Blob> addresses(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      if (hosts_.same_host(r, rank())) continue;
      const auto begin =
          all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(r) * mine.size());
      addresses[static_cast<std::size_t>(r)].assign(
          begin, begin + static_cast<std::ptrdiff_t>(mine.size()));
    }
    attempt_together(*world_, [&] { proxy_->start(addresses); });
    attempt_together(*world_, [&] { await_connections(*proxy_, part_of(deadline())); });
    view_ = {record, {}, size()};
    world_->set_view(view_);
    host_->set_deadline(deadline());
    host_->set_view({record, hosts_.ranks_of(hosts_.host_of(rank())), size()});
    name_ = fmt::format("{} hosts, {}", hosts_.num_hosts(), network_name);
  }
  // The proxy says goodbye before the connections close.
  ~HostsFabric() override {
    if (view_.record) view_.record->leave();
    proxy_.reset();
  }

  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }
  const char* name() const override { return name_.c_str(); }
  const network::Proxy* proxy() const override { return proxy_.get(); }
  std::shared_ptr<Fabric> host() const override { return host_; }
  std::unique_ptr<network::RowsRegion> share_rows(std::span<std::byte> memory,
                                                  const std::shared_ptr<const void>& owner,
                                                  int dmabuf) override {
    return std::make_unique<network::RowsRegion>(proxy_, memory, owner, dmabuf);
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    world_->all_gather(mine, all);
  }

  std::shared_ptr<SymmetricSegment> allocate(std::size_t) override {
    require_one_host(*this, "memory that every rank maps was asked for");
    return nullptr;
  }

  std::vector<UniqueFd> exchange_fds(int) override {
    require_one_host(*this, "ranks that share file descriptors were asked for");
    return {};
  }

  std::shared_ptr<SymmetricSegment> allocate_heap(std::size_t bytes) override {
    require_same_bytes(*world_, bytes);
    std::shared_ptr<SymmetricSegment> here;
    std::vector<Mapping> mirrors;
    std::vector<std::byte*> bases(static_cast<std::size_t>(size()));
    std::shared_ptr<SymmetricSegment> segment;
    attempt_together(*world_, [&] {
      here = host_->allocate(bytes);
      for (int r = 0; r < size(); ++r) {
        const auto i = static_cast<std::size_t>(r);
        if (hosts_.same_host(r, rank())) {
          bases[i] = here->base(hosts_.local_index(r));
        } else {
          // Only the other rank's Control is memory here. A store behind it, of code that forgot
          // to ask, ends the process at once.
          mirrors.push_back(Mapping::reserved(bytes, sizeof(protocol::Control)));
          bases[i] = mirrors.back().data();
        }
      }
    });
    segment = std::make_shared<HostsSegment>(std::move(here), std::move(mirrors), std::move(bases),
                                             proxy_);
    // Nobody sends before all proxies know the heap.
    attempt_together(*world_, [] {});
    return segment;
  }

  std::string liveness(int rank) const override {
    if (!hosts_.same_host(rank, this->rank())) return proxy_->liveness(rank);
    const std::string known = host_->liveness(hosts_.local_index(rank));
    return known.empty() ? view_.words_if_left(rank) : known;
  }

 private:
  void tell(const std::string& message, const WaitFailure& failure) const noexcept override {
    world_->report(TimeoutError(ErrorCode::kAborted, message, failure));
  }
  void abort_collectives() noexcept override {
    world_->abort(abort_cause());
    host_->abort(abort_cause());
  }

  std::shared_ptr<Fabric> world_, host_;
  network::Hosts hosts_;
  std::shared_ptr<network::Proxy> proxy_;
  std::string name_;
};

// The connections of this rank to all ranks of other hosts: it connects to lower ones, and accepts
// those of higher ones. By induction over ranks, no rank waits for one that waits for it.
std::vector<network::ControlChannel> connect_proxies(int rank, const network::Hosts& hosts,
                                                     const std::vector<TcpEndpoint>& endpoints,
                                                     const UniqueFd& listener,
                                                     const HandshakeTerms& terms,
                                                     std::chrono::milliseconds deadline) {
  const Clock::time_point until = Clock::now() + deadline;
  std::vector<network::ControlChannel> channels(endpoints.size());
  const auto fail = [&](int peer) {
    const WaitFailure failure =
        bootstrap_failure(rank, peer, 0, hosts.num_ranks(), 0, std::chrono::nanoseconds(deadline));
    throw TimeoutError(
        ErrorCode::kTimeout,
        fmt::format("rank {} could not connect to rank {} at {} within {} ms; does a firewall let "
                    "TCP connections between the hosts through?",
                    rank, peer, endpoints[static_cast<std::size_t>(peer)].host, deadline.count()),
        failure);
  };
  for (int peer = 0; peer < rank; ++peer) {
    if (hosts.same_host(peer, rank)) continue;
    const auto i = static_cast<std::size_t>(peer);
    while (!channels[i].is_open()) {
      throw_if_interrupted(rank);
      if (Clock::now() >= until) fail(peer);
      UniqueFd socket = connect_tcp(endpoints[i], until);
      if (socket && join_handshake(socket.get(), terms, rank, until) == JoinResult::kProved) {
        channels[i] = network::ControlChannel(std::move(socket), hosts.num_ranks());
        break;
      }
      std::vector<pollfd> nothing;
      wait_ready(nothing, std::min(until, Clock::now() + std::chrono::milliseconds(5)));
    }
  }
  struct Stranger {
    UniqueFd socket;
    ListenerHandshake handshake;
    Clock::time_point since;
  };
  std::vector<Stranger> strangers;
  constexpr std::size_t kMostStrangers = Lobby::kMaxWaiting;
  for (;;) {
    int missing = -1;
    for (int peer = hosts.num_ranks() - 1; peer > rank; --peer) {
      if (!hosts.same_host(peer, rank) && !channels[static_cast<std::size_t>(peer)].is_open()) {
        missing = peer;
      }
    }
    if (missing < 0) return channels;
    throw_if_interrupted(rank);
    if (Clock::now() >= until) fail(missing);
    while (strangers.size() < kMostStrangers) {
      UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) break;
      set_no_delay(socket.get());
      strangers.push_back({std::move(socket), ListenerHandshake(terms), Clock::now()});
    }
    std::erase_if(strangers, [&](Stranger& stranger) {
      const ListenerHandshake::State state = stranger.handshake.advance(stranger.socket.get());
      if (state == ListenerHandshake::State::kUnderWay) {
        return Clock::now() - stranger.since > Lobby::kHelloTime;
      }
      if (state == ListenerHandshake::State::kRefused) return true;
      const int peer = stranger.handshake.rank();
      network::ControlChannel& channel = channels[static_cast<std::size_t>(peer)];
      if (peer <= rank || hosts.same_host(peer, rank) || channel.is_open()) return true;
      channel = network::ControlChannel(std::move(stranger.socket), hosts.num_ranks());
      return true;
    });
    std::vector<pollfd> fds{{listener.get(), POLLIN, 0}};
    for (const Stranger& stranger : strangers) fds.push_back({stranger.socket.get(), POLLIN, 0});
    wait_ready(fds, std::min(until, Clock::now() + std::chrono::milliseconds(100)));
  }
}

// The data that ranks tell each other of themselves before they know which share a host.
struct Introduction {
  std::uint64_t host = 0;
  std::array<char, 48> ip{};  // empty: that of rank 0
  std::int32_t port = 0;      // of the listener for proxies
  std::int32_t reserved = 0;
};

}  // namespace

std::shared_ptr<Fabric> make_hosts_fabric(HostsParts parts) {
  return make_shared_here<HostsFabric>(std::move(parts));
}

std::uint64_t host_number() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(boot, id);
  struct stat status {};
  if (id.empty() || ::stat("/proc/self/ns/net", &status) != 0) {
    throw_errno("cannot tell this host from others by /proc (boot_id and ns/net)");
  }
  return fnv1a(kFnvBasis, fmt::format("{}/{}", id, status.st_ino));
}

std::shared_ptr<Fabric> join_hosts(int rank, int size, const std::string& rendezvous,
                                   std::chrono::milliseconds deadline,
                                   const network::WindowOptions& windows,
                                   const std::string& secret) {
  network::require_built_in();
  network::check(windows);
  parse_tcp(rendezvous);  // a string that makes no sense is told before a missing secret
  const network::Secret proven = network::secret_of(secret, std::getenv);
  const std::shared_ptr<ProcessFabric> world =
      make_process_fabric(rank, size, rendezvous, deadline, proven);
  const Bootstrap& meeting = world->bootstrap();

  const std::vector<std::uint64_t> numbers = gather(*world, host_number());
  std::map<std::uint64_t, int> dense;
  std::vector<int> host_by_rank;
  for (const std::uint64_t number : numbers) {
    host_by_rank.push_back(dense.try_emplace(number, static_cast<int>(dense.size())).first->second);
  }
  const network::Hosts hosts(host_by_rank);
  // With one host after all, its ranks meet as they would have without a port.
  const std::string local_name = fmt::format(
      "host-{:016x}-{}", gather(*world, meeting.world_number())[0], hosts.host_of(rank));
  const std::vector<int>& neighbours = hosts.ranks_of(hosts.host_of(rank));
  std::shared_ptr<Fabric> host;
  attempt_together(*world, [&] {
    // The ranks of other hosts wait, too. With a shorter deadline here they learn whose part is
    // missing before theirs has passed.
    const std::chrono::milliseconds shorter = std::max(deadline / 2, std::chrono::milliseconds(1));
    host = make_process_fabric(hosts.local_index(rank), static_cast<int>(neighbours.size()),
                               local_name, hosts.num_hosts() == 1 ? deadline : shorter, {},
                               {nullptr, neighbours, size});
  });
  if (hosts.num_hosts() == 1) {
    keep_record(*host);
    return host;
  }

  // The address by which others reach this host is that of its connection to another host.
  Introduction mine;
  UniqueFd listener;
  attempt_together(*world, [&] {
    std::string ip;
    if (rank == 0) {
      ip = local_ip(meeting.connection(hosts.ranks_of(1).front()));
    } else if (!hosts.same_host(rank, 0)) {
      ip = local_ip(meeting.connection(0));
    }
    if (ip.size() >= mine.ip.size()) {
      throw Error(ErrorCode::kSystem, fmt::format("the address '{}' is too long", ip));
    }
    std::copy(ip.begin(), ip.end(), mine.ip.begin());
    listener = listen_tcp(ip.empty() ? local_ip(meeting.connection(0)) : ip, 0);
    if (!listener) throw Error(ErrorCode::kSystem, "this host has no free TCP port");
    mine.port = port_of(listener.get());
  });
  const std::vector<Introduction> all = gather(*world, mine);
  std::vector<TcpEndpoint> endpoints;
  HostsParts parts;
  for (const Introduction& one : all) {
    const auto ip_of = [](const Introduction& of) {
      return std::string(of.ip.data(), ::strnlen(of.ip.data(), of.ip.size()));
    };
    const std::string ip = ip_of(one).empty() ? ip_of(all[0]) : ip_of(one);
    endpoints.push_back({ip, std::to_string(one.port)});
    parts.where.push_back(ip);
  }
  attempt_together(*world, [&] {
    const HandshakeTerms terms{proven, Purpose::kControl, size};
    parts.channels = connect_proxies(rank, hosts, endpoints, listener, terms, part_of(deadline));
    parts.network = network::make_libfabric(endpoints[static_cast<std::size_t>(rank)].host);
  });
  parts.world = world;
  parts.host = host;
  parts.hosts = hosts;
  parts.options.windows = windows;
  parts.options.deadline = deadline;
  return make_hosts_fabric(std::move(parts));
}

}  // namespace switchyard
