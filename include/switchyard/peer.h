// Putting data into other ranks' memory, and raising and awaiting flags, on the host: for heaps of
// CPU memory. device/peer.cuh has the same functions for kernels.
//
// Order. put() and put_value() are plain stores: nobody may read what they store before a flag says
// so. signal() and signal_add() have release order at system scope: whatever this thread put, wrote
// or read before comes before the flag. wait_until() has acquire order: a thread that sees the flag
// sees all of that. Threads that put something for one flag meet (join, barrier) before one of them
// raises it.
//
//   host::put(translate(map, inbox, peer), data, bytes);
//   host::signal(translate(map, flag, peer), round);
//   const PeerWait wait = host::wait_until(map, flag, round, source);
//   if (!wait) host::give_up(map, wait);
//
// A flag has one writer, or is only added to, and counts on: it is never reset, so none is lost.
// A second round may overwrite what the first one brought only when its reader has said so, with a
// flag of its own or with the data that it sends back.
#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstring>
#include <thread>
#include <type_traits>

#include "switchyard/peer_map.h"

namespace switchyard::host {

// Flags are 32 or 64 bits, at a multiple of their size. Memory of a heap is 0 at first.
template <typename W>
concept Flag = std::same_as<W, std::uint32_t> || std::same_as<W, std::uint64_t>;

inline constexpr std::uint64_t kDeadlineOfMap = ~std::uint64_t{0};

// Copies bytes. `to` and `from` may not overlap, and may be at any address.
inline void put(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}
template <typename T>
void put_value(T* to, const std::type_identity_t<T>& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  *to = value;
}

template <Flag W>
void signal(W* flag, std::type_identity_t<W> value) {
  std::atomic_ref<W>(*flag).store(value, std::memory_order_release);
}
// Adds to a flag that several ranks or threads raise.
template <Flag W>
void signal_add(W* flag, std::type_identity_t<W> value) {
  std::atomic_ref<W>(*flag).fetch_add(value, std::memory_order_release);
}
template <Flag W>
W load(const W* flag) {
  return std::atomic_ref<W>(*const_cast<W*>(flag)).load(std::memory_order_acquire);
}

// True if the heap is dead. `*rank`, if given, is then the rank at fault.
inline bool aborted(const PeerMap& map, std::int32_t* rank = nullptr) {
  const std::uint64_t word = load(&control_of(map, map.rank)->abort);
  if (word == 0) return false;
  if (rank != nullptr) {
    const auto by = static_cast<std::int32_t>(word & (PeerControl::kCalledOff - 1)) - 1;
    *rank = (word & PeerControl::kCalledOff) != 0 ? by : control_of(map, by)->failure.peer;
  }
  return true;
}

// Waits until the flag, which is in this rank's memory and which `peer` raises, has the value.
// Returns the outcome, which is false if the deadline passed or the heap is dead. Other ranks are
// not told: see give_up(). `deadline_ns` counts from the call; 0 looks once.
template <Flag W>
[[nodiscard]] PeerWait wait_until(const PeerMap& map, const W* flag, std::type_identity_t<W> value,
                                  int peer, Until until = Until::kAtLeast,
                                  std::uint64_t deadline_ns = kDeadlineOfMap) {
  using Clock = std::chrono::steady_clock;
  PeerWait wait{PeerWait::State::kReady, peer, 0, value, 0, 0};
  wait.flag =
      static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(flag) - map.bases[map.rank]);
  if (deadline_ns == kDeadlineOfMap) deadline_ns = map.deadline_ns;
  Clock::time_point start;
  for (std::uint32_t looks = 0;; ++looks) {
    const W seen = load(flag);
    wait.seen = seen;
    const auto ahead = static_cast<std::make_signed_t<W>>(static_cast<W>(seen - value));
    if (until == Until::kEqual ? ahead == 0 : ahead >= 0) return wait;
    if (aborted(map, &wait.rank)) {
      wait.state = PeerWait::State::kAborted;
      return wait;
    }
    const Clock::time_point now = Clock::now();
    if (looks == 0) start = now;
    wait.waited_ns = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now - start).count());
    if (wait.waited_ns >= deadline_ns) {
      wait.state = PeerWait::State::kTimeout;
      return wait;
    }
    // Ranks may outnumber cores, so the core is left to others soon.
    if (looks >= 512) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (looks >= 32) {
      std::this_thread::yield();
    }
  }
}

// Ends all waits of all ranks, now and later, because of a wait that failed. SymmetricHeap::check()
// then throws on every rank and names wait.rank. If several ranks give up, all report the first.
// `culprit`: the rank that is to blame; by default the one that was waited for.
inline void give_up(const PeerMap& map, const PeerWait& wait, int culprit = -1) {
  if (wait.state != PeerWait::State::kTimeout) return;  // whoever ended the heap has told all ranks
  PeerControl& mine = *control_of(map, map.rank);
  std::uint64_t none = 0;
  // Another thread of this rank may be here: one record is enough.
  if (!std::atomic_ref(mine.claim).compare_exchange_strong(none, 1)) return;
  mine.failure = {map.rank, wait.rank, wait.flag, wait.expected, wait.seen, wait.waited_ns, 0};
  if (culprit >= 0 && culprit != wait.rank) {
    mine.failure.peer = culprit;
    mine.failure.awaited = static_cast<std::uint64_t>(wait.rank) + 1;
  }
  // Releases the record; where another rank was first, acquires its record for those told below.
  std::uint64_t verdict = 0;
  const std::uint64_t own = static_cast<std::uint64_t>(map.rank) + 1;
  if (std::atomic_ref(control_of(map, 0)->verdict)
          .compare_exchange_strong(verdict, own, std::memory_order_acq_rel)) {
    verdict = own;
  }
  for (int r = 0; r < map.size; ++r) {
    none = 0;  // The first failure that ended a rank stays.
    std::atomic_ref(control_of(map, r)->abort)
        .compare_exchange_strong(none, verdict, std::memory_order_acq_rel);
  }
}

}  // namespace switchyard::host
