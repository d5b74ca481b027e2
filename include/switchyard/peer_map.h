// The addresses of every rank's SymmetricHeap memory: a plain struct that kernels take by value.
// Compiles as C++20 and as CUDA, and needs no other header of Switchyard.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define SWITCHYARD_PEER_FUNCTION __host__ __device__ inline
#else
#define SWITCHYARD_PEER_FUNCTION inline
#endif

namespace switchyard {

inline constexpr int kMaxPeers = 64;

// Trivially copyable. The addresses are those of the rank that asked for the map: another rank, and
// another process, has others. Valid while that rank's SymmetricHeap lives.
struct PeerMap {
  std::int32_t rank;            // this one
  std::int32_t size;            // ranks
  std::uint64_t bytes;          // of each rank's memory
  std::uint64_t deadline_ns;    // of waits that have no other
  std::byte* bases[kMaxPeers];  // of each rank's memory; null from `size` on
};

// The place in the memory of `rank` that corresponds to `pointer` in this rank's memory. Checks
// nothing; SymmetricHeap::translate() does.
template <typename T>
SWITCHYARD_PEER_FUNCTION T* translate(const PeerMap& map, T* pointer, int rank) {
  const auto offset = reinterpret_cast<std::uintptr_t>(pointer) -
                      reinterpret_cast<std::uintptr_t>(map.bases[map.rank]);
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(map.bases[rank]) + offset);
}

// The values of a flag that end a wait.
enum class Until : std::uint8_t {
  // The value or a later one. Numbers may wrap around: up to half of their range is later.
  kAtLeast,
  kEqual,
};

// How a wait ended.
struct PeerWait {
  enum class State : std::uint32_t {
    kReady,
    kTimeout,  // the deadline passed
    kAborted,  // a rank gave up a wait, or called World::abort()
  };
  State state;
  // kReady, kTimeout: the rank that was waited for. kAborted: the rank that the first waiter to
  // give up waited for, or the rank that called World::abort().
  std::int32_t rank;
  std::uint64_t flag;       // the flag's offset in the memory of the rank that waited
  std::uint64_t expected;   // the value that was waited for
  std::uint64_t seen;       // the value that was seen last
  std::uint64_t waited_ns;  // 0 for short waits

  SWITCHYARD_PEER_FUNCTION explicit operator bool() const { return state == State::kReady; }
};

// -------------------------------------------------------------------------------------------------
// The rest is how a heap dies. Kernels do not need it: wait_until() reads it, give_up() writes it,
// and SymmetricHeap::check() reports it.

// A rank's control block, in front of its memory.
struct PeerControl {
  struct Failure {
    std::int32_t waiter;
    std::int32_t peer;
    std::uint64_t flag, expected, seen, waited_ns;  // as in PeerWait
    // 1 + the rank that was to raise the flag, where `peer` is one that it waits for; else 0.
    std::uint64_t awaited;
  };
  // 0 while the heap lives; then 1 + the rank whose `failure` says why, or, with kCalledOff, 1 +
  // the rank that called World::abort(). A reader that sees another value than 0 with acquire order
  // can read that record.
  alignas(64) std::uint64_t abort;
  std::uint64_t verdict;  // rank 0's: what every rank's `abort` will be
  std::uint64_t claim;    // 0, or 1 once a thread of this rank writes `failure`
  Failure failure;

  static constexpr std::uint64_t kCalledOff = std::uint64_t{1} << 32;
  static constexpr std::size_t kBytes = 4096;  // with what keeps the memory behind it aligned
};
static_assert(sizeof(PeerControl) <= PeerControl::kBytes);

SWITCHYARD_PEER_FUNCTION PeerControl* control_of(const PeerMap& map, int rank) {
  return reinterpret_cast<PeerControl*>(map.bases[rank] - PeerControl::kBytes);
}

}  // namespace switchyard
