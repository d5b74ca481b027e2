// The one way to wait. Every spin in both engines goes through wait_until, so every one has a
// deadline, a name for what it waits for, and an ear for the abort word.
#pragma once

#include <cstdint>

#include "protocol/atomics.h"
#include "protocol/layout.h"

namespace switchyard::protocol {

// What is missing, as far as the waiter can tell.
struct Missing {
  Phase phase = Phase::kNone;
  int peer = 0;
  std::uint64_t slot = 0;      // tile or row index within the phase
  std::uint64_t expected = 0;  // the counter's value waited for
  std::uint64_t observed = 0;  // and the one last seen
};

enum class WaitResult : std::uint8_t { kReady, kAborted };

// The rank at the end of the chain of "waits for" links that starts at `peer`: the one that waits
// for nobody, or the first one met twice.
struct Culprit {
  int rank;
  Phase phase;  // in which it is awaited
};
SWITCHYARD_HOST_DEVICE inline Culprit find_culprit(const Heaps& heaps, int peer, Phase phase) {
  Culprit culprit{peer, phase};
  std::uint64_t seen = 0;
  while (culprit.rank != heaps.rank && !(seen >> culprit.rank & 1)) {
    seen |= std::uint64_t{1} << culprit.rank;
    const WaitsFor next = WaitsFor::unpack(load_acquire(&heaps.control(culprit.rank)->waits_for));
    if (next.phase == Phase::kNone || next.peer == culprit.rank) break;
    culprit = {next.peer, next.phase};
  }
  static_assert(kMaxRanks <= 64, "the set of ranks met is one word");
  return culprit;
}

// Raises every rank's abort word. Deadlines of several ranks may pass at once, and all are to tell
// the same story: each writes a record of its own, rank 0's verdict word takes the first, and
// whoever comes later spreads that verdict too, so that nobody waits for anybody and a rank that
// dies in here is not missed. A record is whole before its rank can become the verdict.
SWITCHYARD_HOST_DEVICE inline void abort_world(const Heaps& heaps, const FailureRecord& record) {
  constexpr std::uint64_t kNone = 0;
  Control* mine = heaps.control(heaps.rank);
  if (compare_exchange(&mine->claim, kNone, std::uint64_t{1}) != kNone) return;  // another thread
  mine->failure = record;
  const std::uint64_t own = static_cast<std::uint64_t>(heaps.rank) + 1;
  std::uint64_t first = compare_exchange(&heaps.control(0)->verdict, kNone, own);
  if (first == kNone) first = own;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) store_release(&heaps.control(r)->abort, first);
}

// Whose `failure` says why, of what a rank's abort word was: its own if nobody has raised it yet.
inline int failed_rank(std::uint64_t abort, int owner) {
  return abort == 0 ? owner : static_cast<int>(abort) - 1;
}

SWITCHYARD_HOST_DEVICE inline bool aborted(const Heaps& heaps) {
  return load_acquire(&heaps.control(heaps.rank)->abort) != 0;
}

SWITCHYARD_HOST_DEVICE inline void note_progress(const Heaps& heaps) {
  // Several threads of a rank may count at once; only change matters, but it must not be lost.
  SystemAtomic<std::uint64_t>(heaps.control(heaps.rank)->progress)
      .fetch_add(1, order::memory_order_relaxed);
}

SWITCHYARD_HOST_DEVICE inline std::uint64_t total_progress(const Heaps& heaps) {
  std::uint64_t total = 0;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) total += load_relaxed(&heaps.control(r)->progress);
  return total;
}

// Waits until ready() is true.
//   missing()  -> Missing, called now and then: what is lacking, with a phase other than kNone
//   pace       now() in ns; pause(n): called after the n-th failed look, may yield or sleep;
//              kLooksPerAbortCheck: a GPU's look at another word doubles the time of a look
// The deadline counts from the last step that any rank completed: a pass has finitely many steps,
// so a slow world is waited for, and one in which nothing moves for deadline_ns is not.
template <typename Ready, typename WhatIsMissing, typename Pace>
SWITCHYARD_HOST_DEVICE WaitResult wait_until(const Heaps& heaps, std::uint64_t epoch,
                                             std::uint64_t deadline_ns, Pace& pace, Ready&& ready,
                                             WhatIsMissing&& missing) {
  if (ready()) [[likely]] {
    return WaitResult::kReady;
  }
  // Most waits end within a few looks: the clock and the words of others are left alone until then.
  constexpr std::uint32_t kLooksPerClockRead = 64;
  Control* mine = heaps.control(heaps.rank);
  bool clock_runs = false;
  std::uint64_t start = 0, progress = 0;
  WaitResult result = WaitResult::kReady;
  SWITCHYARD_ROLLED
  for (std::uint32_t looks = 1;; ++looks) {
    pace.pause(looks);
    if (ready()) break;
    if (looks % Pace::kLooksPerAbortCheck == 0 && aborted(heaps)) {
      result = WaitResult::kAborted;
      break;
    }
    if (looks % kLooksPerClockRead != 0) continue;
    const Missing lack = missing();
    store_release(&mine->waits_for, WaitsFor{lack.phase, lack.peer}.pack());
    const std::uint64_t now = pace.now();
    if (const std::uint64_t seen = total_progress(heaps); seen != progress || !clock_runs) {
      clock_runs = true;
      progress = seen;
      start = now;
    } else if (now - start > deadline_ns) {
      const Culprit culprit = find_culprit(heaps, lack.peer, lack.phase);
      abort_world(heaps, {heaps.rank, culprit.rank, culprit.phase, epoch, lack.slot, lack.expected,
                          lack.observed, now - start});
      result = WaitResult::kAborted;
      break;
    }
  }
  if (clock_runs) store_release(&mine->waits_for, WaitsFor{}.pack());
  return result;
}

}  // namespace switchyard::protocol
