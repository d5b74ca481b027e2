// Ranks as processes of one host: they meet through a Bootstrap and map each other's memory.
#include "fabric/process_fabric.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/mapping.h"
#include "base/posix.h"
#include "fabric/bootstrap.h"
#include "fabric/collective.h"
#include "fabric/environment.h"
#include "fabric/fabric.h"
#include "fabric/hosts_fabric.h"
#include "fabric/launch_report.h"
#include "switchyard/error.h"
#include "switchyard/world.h"

namespace switchyard {
namespace {

// Makes a nameless file in memory. It disappears with its last mapping, however its users end. A
// shm_open() name would stay in /dev/shm.
UniqueFd make_memory_file(std::size_t bytes) {
  const auto refuse = [&](const std::string& reason) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("cannot make {} bytes of shared memory: {}; declare a smaller maximum "
                            "number of tokens, or raise `ulimit -f` or the memory limit",
                            bytes, reason));
  };
  // Checked here because ftruncate beyond the limit raises SIGXFSZ, which ends the process.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      bytes > limit.rlim_cur) {
    refuse(fmt::format("files are limited to {} bytes", limit.rlim_cur));
  }
  if (bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max())) {
    refuse(errno_text(EFBIG));
  }
  UniqueFd file(::memfd_create("switchyard", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_errno("cannot create a shared memory file");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) refuse(errno_text(errno));
  // The seals make the size final. A process that touches a mapping beyond the end of its file is
  // killed by SIGBUS.
  if (::fcntl(file.get(), F_ADD_SEALS, Mapping::kSeals | F_SEAL_SEAL) != 0) {
    throw_errno("cannot seal the size of a shared memory file");
  }
  return file;
}

class ProcessSegment final : public SymmetricSegment {
 public:
  ProcessSegment(std::vector<Mapping> mappings, std::size_t bytes)
      : mappings_(std::move(mappings)) {
    bytes_ = bytes;
    for (const Mapping& mapping : mappings_) bases_.push_back(mapping.data());
  }

 private:
  std::vector<Mapping> mappings_;
};

class Processes final : public ProcessFabric {
 public:
  Processes(int rank, int size, const std::string& rendezvous, std::chrono::milliseconds deadline,
            const network::Secret& secret, protocol::WorldView view)
      : ProcessFabric(deadline),
        bootstrap_(rank, size, rendezvous, deadline, launched_job(std::getenv), secret, view) {
    view_ = std::move(view);
    tell_launcher_deadline(view_.name(rank), deadline);
  }
  ~Processes() override {
    if (view_.record) view_.record->leave();
  }

  const Bootstrap& bootstrap() const override { return bootstrap_; }
  int rank() const override { return bootstrap_.rank(); }
  int size() const override { return bootstrap_.size(); }
  const char* name() const override { return "shared memory"; }
  std::string liveness(int rank) const override {
    const std::string known = bootstrap_.liveness(rank);
    return known.empty() ? view_.words_if_left(rank) : known;
  }
  void set_deadline(std::chrono::milliseconds deadline) override {
    bootstrap_.set_deadline(deadline);
    Fabric::set_deadline(deadline);
  }
  void set_view(protocol::WorldView view) override {
    bootstrap_.set_view(view);
    Fabric::set_view(std::move(view));
  }

  void abort_collectives() noexcept override { bootstrap_.abort(abort_cause()); }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    reporting([&] { bootstrap_.all_gather(mine, all); });
  }

  std::vector<UniqueFd> exchange_fds(int fd) override {
    std::vector<UniqueFd> fds;
    reporting([&] { fds = bootstrap_.exchange_fds(fd); });
    return fds;
  }

  std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes) override {
    require_same_bytes(*this, bytes);
    UniqueFd file;
    attempt_together(*this, [&] { file = make_memory_file(bytes); });

    std::vector<UniqueFd> files = exchange_fds(file.get());
    std::vector<Mapping> mappings;
    attempt_together(*this, [&] {
      for (std::size_t r = 0; r < files.size(); ++r) {
        try {
          mappings.push_back(Mapping::of_file(files[r].get(), bytes));
        } catch (const Error& error) {
          throw Error(error.code(), fmt::format("the memory of rank {}: {}", r, error.what()));
        }
      }
    });
    return std::make_shared<ProcessSegment>(std::move(mappings), bytes);
  }

 private:
  void tell(const std::string& message, const WaitFailure& failure) const noexcept override {
    bootstrap_.part(message, failure);
    tell_launcher_failure(view_.name(rank()), failure);
  }
  // Failures of collectives have the world's numbers already.
  template <typename Collective>
  void reporting(const Collective& collective) {
    try {
      collective();
    } catch (const TimeoutError& error) {
      if (view_.record) view_.record->give_up(error.failure().peer_rank);
      tell_launcher_failure(view_.name(rank()), error.failure());
      throw;
    }
  }

  mutable Bootstrap bootstrap_;
};

}  // namespace

std::shared_ptr<ProcessFabric> make_process_fabric(int rank, int size,
                                                   const std::string& rendezvous,
                                                   std::chrono::milliseconds deadline,
                                                   const network::Secret& secret,
                                                   const protocol::WorldView& view) {
  try {
    return make_shared_here<Processes>(rank, size, rendezvous, deadline, secret, view);
  } catch (const TimeoutError& error) {
    tell_launcher_failure(view.name(rank), error.failure());
    throw;
  }
}

World World::processes(int rank, int size, WorldOptions options) {
  require_world(rank, size);
  const std::chrono::milliseconds deadline = checked_deadline(options.deadline);
  const std::string rendezvous =
      options.rendezvous.empty() ? next_rendezvous() : std::move(options.rendezvous);
  const network::WindowOptions windows{options.network.chunk_bytes, options.network.window};
  network::check(windows);
  if (rendezvous.starts_with(kTcpScheme)) {
    return World(join_hosts(rank, size, rendezvous, deadline, windows, options.secret));
  }
  const std::shared_ptr<Fabric> fabric = make_process_fabric(rank, size, rendezvous, deadline);
  keep_record(*fabric);
  return World(fabric);
}

}  // namespace switchyard
