// A fabric gives the ranks of a world symmetric memory, start-up collectives, and hints about ranks
// that do not answer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/origin.h"
#include "base/posix.h"
#include "protocol/world_record.h"
#include "switchyard/error.h"

namespace switchyard {

namespace network {
class Proxy;
class RemoteHeap;
class RowsRegion;
}  // namespace network

// Memory with the same number of bytes on every rank. This rank can load from and store to all of
// it, except where remote() says otherwise. It is zero-filled, and committed page by page when
// touched. It is unmapped when the last owner on this rank lets go. Peers keep their own mappings,
// so letting go early harms nobody.
class SymmetricSegment {
 public:
  virtual ~SymmetricSegment() = default;
  std::byte* base(int rank) const { return bases_[static_cast<std::size_t>(rank)]; }
  std::size_t bytes() const { return bytes_; }
  // Null where all ranks' memory is mapped. Otherwise base() of a rank that it does not reach has
  // that rank's protocol::Control, and behind it addresses that only stand for offsets.
  virtual network::RemoteHeap* remote() const { return nullptr; }

 protected:
  std::vector<std::byte*> bases_;
  std::size_t bytes_ = 0;
};

// Why this rank ended its world.
enum class AbortCause : std::uint8_t {
  kNone,         // it did not
  kCalledOff,    // World::abort()
  kInterrupted,  // its caller interrupted a call that waited (base/interrupt.h)
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  const Origin origin;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;
  std::chrono::milliseconds deadline() const { return deadline_; }
  // Sets the deadline of later collectives.
  virtual void set_deadline(std::chrono::milliseconds deadline) { deadline_ = deadline; }

  // Collective, start-up only. `all` receives size() blocks of mine.size() bytes, by rank. Throws
  // TimeoutError (phase "bootstrap") naming a rank that did not call within the deadline, and
  // Error{kSpecMismatch} if the ranks passed different sizes.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  // Collective, start-up only. Throws Error{kSpecMismatch} if the ranks ask for different sizes,
  // Error{kCapacityExceeded} if memory cannot be had.
  virtual std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes) = 0;

  // The same for a heap that begins with a protocol::Control, and whose owner sends to ranks of
  // other hosts through remote().
  virtual std::shared_ptr<SymmetricSegment> allocate_heap(std::size_t bytes) {
    return allocate(bytes);
  }
  // The proxy to other hosts, and the fabric of this host's ranks, in the order of the world. Both
  // are null in a world of one host.
  virtual const network::Proxy* proxy() const { return nullptr; }
  virtual std::shared_ptr<Fabric> host() const { return nullptr; }
  // See network::RowsRegion; null in a world of one host. Not collective.
  virtual std::unique_ptr<network::RowsRegion> share_rows(std::span<std::byte> memory,
                                                          const std::shared_ptr<const void>& owner,
                                                          int dmabuf);

  // Collective, start-up only. Every rank gives one open descriptor, which stays its own, and
  // receives one of each rank, by rank, its own included.
  virtual std::vector<UniqueFd> exchange_fds(int fd) = 0;

  // The record of the world, and these ranks' numbers there.
  const protocol::WorldView& view() const { return view_; }
  // Given once, when the world has been made.
  virtual void set_view(protocol::WorldView view) { view_ = std::move(view); }

  // Returns what is known about a peer that does not answer, e.g. "process 4711 has exited"; empty
  // if nothing is. Never used to decide anything, only to explain a passed deadline.
  virtual std::string liveness(int rank) const = 0;

  // See World::abort(). The abort hooks run first, then collectives end. Only the first call
  // counts.
  void abort(AbortCause cause = AbortCause::kCalledOff) noexcept;
  AbortCause abort_cause() const noexcept { return aborted_.load(std::memory_order_acquire); }
  bool was_aborted() const noexcept { return abort_cause() != AbortCause::kNone; }
  // Returns what hooks write to abort words (protocol/control.h) once this rank aborted its world.
  std::uint64_t abort_word() const noexcept;
  // `hook` is called by abort(), from any thread and at most once, while the returned object lives.
  // It may not throw, nor wait for other ranks. Its object's destructor waits until it is not
  // running.
  class AbortHook {
   public:
    AbortHook(Fabric& fabric, std::function<void()> hook);
    ~AbortHook();
    AbortHook(const AbortHook&) = delete;
    AbortHook& operator=(const AbortHook&) = delete;

   private:
    friend class Fabric;
    Fabric& fabric_;
    std::function<void()> hook_;
  };

  // Writes into the world's record, and tells peers and the launcher of the ranks, which rank this
  // one blames for a wait that failed. `error` has this fabric's numbers.
  void report(const TimeoutError& error) const noexcept;

 protected:
  explicit Fabric(std::chrono::milliseconds deadline) : deadline_(deadline) {}
  // Ends the collective that this rank is in, and makes all later ones throw kAborted, because of
  // abort_cause(). Any thread may call it.
  virtual void abort_collectives() noexcept = 0;
  // `failure` has the world's numbers.
  virtual void tell(const std::string&, const WaitFailure&) const noexcept {}
  std::chrono::milliseconds deadline_;
  protocol::WorldView view_;

 private:
  std::atomic<AbortCause> aborted_{AbortCause::kNone};
  std::mutex hooks_mutex_;
  std::vector<AbortHook*> hooks_;
};

// Throws Error{kInvalidArgument} for a number of ranks, or a rank, that no world has.
void require_world(int rank, int size);

// Collective. Every rank's life_of_process(), by rank; `keeps` as there.
std::vector<UniqueFd> gather_lives(Fabric& fabric, UniqueFd& keeps);

// Collective. Gives a fabric of processes on one host, which is a whole world, its record.
void keep_record(Fabric& fabric);

// Throws Error{kUnsupported} if the ranks are on several hosts. `what` was asked for, and needs
// one.
void require_one_host(const Fabric& fabric, const char* what);
inline constexpr const char* kGpuRanks = "ranks on GPUs (Backend::kCuda) were asked for";

// The record and the message of a world that `rank` aborted.
inline constexpr const char* kAbortPhase = "abort";
WaitFailure abort_failure(int rank);
std::string abort_message(int rank, AbortCause cause);
// Throws them if the caller of this rank interrupted the call that this thread is in.
void throw_if_interrupted(int rank);

// Collective. Returns every rank's `mine`, by rank. All ranks must pass the same number of
// elements.
template <typename T>
std::vector<T> gather_all(Fabric& fabric, std::span<const T> mine) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(fabric.size()));
  fabric.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(all)));
  return all;
}
template <typename T>
std::vector<T> gather(Fabric& fabric, const T& mine) {
  return gather_all(fabric, std::span<const T>(&mine, 1));
}

}  // namespace switchyard
