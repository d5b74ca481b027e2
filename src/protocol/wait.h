// The one way to wait. Every spin in both engines goes through wait_until, so every one has a
// deadline, a name for what it waits for, and watches the abort word.
#pragma once

#include <cstdint>

#include "protocol/atomics.h"
#include "protocol/control.h"

namespace switchyard::protocol {

// The missing step, as far as the waiter knows.
struct Missing {
  Phase phase = Phase::kNone;
  int peer = 0;
  std::uint64_t slot = 0;      // tile or row index within the phase
  std::uint64_t expected = 0;  // the value of the counter that is waited for
  std::uint64_t observed = 0;  // the value last seen
};

enum class WaitResult : std::uint8_t { kReady, kAborted };

// How a culprit is found when nothing moves any more.
//
// A waiting rank writes in its word `waits_for` whom it waits for. It writes again at every look at
// the clock, so the word keeps changing. The word stays the same if its rank has stopped inside a
// wait, is dead, or is not in a pass. Such a word is not believed, because what it names may have
// arrived since.
//
// Among the waits that are believed, the earliest in the order of the protocol (epoch, then phase)
// names the culprit. A step of the protocol depends on earlier steps only, so a rank that owes the
// earliest missing step waits for nobody; all other waits are consequences.
//
// One thread of a rank judges at a time. It takes notes in its rank's Control for a part of the
// deadline, judging_time(), and the earliest wait that it then knows of is the verdict. It also
// takes at least Pace::kLeastLooksOfAJudge looks. On a host with more threads than cores, a waiting
// rank may be on a core as rarely as the judge, and with fewer looks would seem to have stopped.
SWITCHYARD_HOST_DEVICE constexpr std::uint64_t judging_time(std::uint64_t deadline_ns) {
  // This is long compared with the time between two writes of a waiting rank (a millisecond, or a
  // few time slices of a busy host), and short compared with a user's patience.
  constexpr std::uint64_t kLongest = 2'000'000'000;
  return deadline_ns / 2 < kLongest ? deadline_ns / 2 : kLongest;
}

// Makes this thread the judge. Returns false if another thread of this rank is.
SWITCHYARD_HOST_DEVICE inline bool start_judging(const Heaps& heaps) {
  Control* mine = heaps.control(heaps.rank);
  if (compare_exchange(&mine->judging, std::uint64_t{0}, std::uint64_t{1}) != 0) return false;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) {
    mine->sightings[r] = {load_relaxed(&heaps.control(r)->waits_for), 0};
  }
  return true;
}

// Takes one look at the `waits_for` words of all ranks.
SWITCHYARD_HOST_DEVICE inline void look_around(const Heaps& heaps) {
  Control* mine = heaps.control(heaps.rank);
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) {
    Sighting& seen = mine->sightings[r];
    const std::uint64_t now = load_relaxed(&heaps.control(r)->waits_for);
    // A rank has several threads but one word, so each look may show another thread's wait.
    if (now != 0 && now != seen.last && (seen.earliest == 0 || now < seen.earliest)) {
      seen.earliest = now;
    }
    seen.last = now;
  }
}

SWITCHYARD_HOST_DEVICE inline void stop_judging(const Heaps& heaps) {
  store_release(&heaps.control(heaps.rank)->judging, std::uint64_t{0});
}

struct Culprit {
  int rank;
  Phase phase;  // the missing step
  std::uint64_t epoch;
  int witness;  // the rank that waits for it
};
// Finds the culprit among the waits that the judge has seen and `own`, the judge's own wait.
SWITCHYARD_HOST_DEVICE inline Culprit find_culprit(const Heaps& heaps, const WaitsFor& own) {
  std::uint64_t earliest = own.pack(0);
  int witness = heaps.rank;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) {
    const std::uint64_t seen = heaps.control(heaps.rank)->sightings[r].earliest;
    // Beats are left out of the comparison. Among equal waits this reports the judge's own, of
    // which it knows more.
    if (seen != 0 && seen >> WaitsFor::kBeatBits < earliest >> WaitsFor::kBeatBits) {
      earliest = seen;
      witness = r;
    }
  }
  const WaitsFor wait = WaitsFor::unpack(earliest);
  return {wait.peer, wait.phase, wait.epoch, witness};
}

// Raises every rank's abort word. Deadlines of several ranks may pass at once, and all must report
// the same failure. So each writes a record of its own, and one verdict word takes the first.
// Later ranks spread that verdict, too. Thus no rank waits for another here, and a rank that dies
// here is not missed. A record is complete before its rank can become the verdict.
SWITCHYARD_HOST_DEVICE inline void abort_world(const Heaps& heaps, const FailureRecord& record) {
  constexpr std::uint64_t kNone = 0;
  Control* mine = heaps.control(heaps.rank);
  if (compare_exchange(&mine->claim, kNone, std::uint64_t{1}) != kNone) return;  // another thread
  mine->failure = record;
  const std::uint64_t own = static_cast<std::uint64_t>(heaps.rank) + 1;
  std::uint64_t first = compare_exchange(&heaps.control(heaps.arbiter)->verdict, kNone, own);
  if (first == kNone) first = own;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) store_release(&heaps.control(r)->abort, first);
}

// The rank whose `failure` record explains a rank's abort word; `owner` itself if the word is not
// raised yet.
inline int failed_rank(std::uint64_t abort, int owner) {
  return abort == 0 ? owner : static_cast<int>(abort) - 1;
}

SWITCHYARD_HOST_DEVICE inline bool aborted(const Heaps& heaps) {
  return load_acquire(&heaps.control(heaps.rank)->abort) != 0;
}

SWITCHYARD_HOST_DEVICE inline void note_progress(const Heaps& heaps) {
  // Several threads of a rank may count at once. Readers only look for a change, but no change may
  // be lost.
  SystemAtomic<std::uint64_t>(heaps.control(heaps.rank)->progress)
      .fetch_add(1, order::memory_order_relaxed);
}

SWITCHYARD_HOST_DEVICE inline std::uint64_t total_progress(const Heaps& heaps) {
  std::uint64_t total = 0;
  SWITCHYARD_ROLLED
  for (int r = 0; r < heaps.size(); ++r) total += load_relaxed(&heaps.control(r)->progress);
  return total;
}

// The paces of threads that wait alone inherit these. Threads that wait together, as the lanes of a
// warp do when ready() is a vote, must leave at the same look: a lane that left earlier would be
// missing in the next vote, and the others would wait there for ever.
struct WaitsAlone {
  // True in the one thread, of those that wait together, that reads the clock and judges.
  SWITCHYARD_HOST_DEVICE static constexpr bool keeps_clock() { return true; }
  // True if `holds` is true in any of the threads that wait together.
  SWITCHYARD_HOST_DEVICE static constexpr bool any(bool holds) { return holds; }
};

// One waiting thread's knowledge of how long the world has stood still and who is to blame.
class Patience {
 public:
  // Looks at the clock and at the world while `lack` is missing. Returns true if it aborted the
  // world because the deadline passed.
  template <typename Pace>
  SWITCHYARD_HOST_DEVICE bool look(const Heaps& heaps, std::uint64_t epoch,
                                   std::uint64_t deadline_ns, Pace& pace, const Missing& lack,
                                   std::uint32_t beat) {
    const WaitsFor wait{lack.phase, lack.peer, epoch, lack.peer == heaps.rank};
    store_release(&heaps.control(heaps.rank)->waits_for, wait.pack(beat));
    if constexpr (requires { pace.show(wait); }) {
      pace.show(wait);
      if (lack.peer != heaps.rank && pace.is_gone(lack.peer)) {
        // Its last stores may be seen only now, so the next look decides.
        if (gone_ == lack.peer + 1) return end_by_loss(heaps, epoch, deadline_ns, pace, lack);
        gone_ = lack.peer + 1;
      }
    }
    const auto now = static_cast<std::uint32_t>(pace.now() / kTick);
    const std::uint64_t judging_ns = judging_time(deadline_ns);
    const std::uint64_t passed = std::uint64_t{now - last_} * kTick;
    last_ = now;
    const auto seen = static_cast<std::uint32_t>(total_progress(heaps));
    if (seen != progress_ || !clock_runs_) {
      clock_runs_ = true;
      progress_ = seen;
      waited_ = 0;
      if (judging_ != 0) stop_judging(heaps);
      judging_ = 0;
      return false;
    }
    waited_ += passed < judging_ns / 4 ? passed : judging_ns / 4;
    if (heaps.shown != nullptr && !wait.own && waited_ >= shown_after(deadline_ns)) {
      shown_ = true;
      store_relaxed(heaps.shown, wait.pack(beat));
    }
    if (waited_ < deadline_ns - judging_ns) return false;
    if (judging_ == 0) {
      judging_ = start_judging(heaps) ? 1 : 0;
      waited_ = deadline_ns - judging_ns;
      return false;
    }
    look_around(heaps);
    if (++judging_ <= Pace::kLeastLooksOfAJudge || waited_ <= deadline_ns) return false;
    Culprit culprit = find_culprit(heaps, wait);
    // Between hosts one rank passes on what another has sent, which waits do not show. But a rank
    // that is silent altogether has stopped, or cannot be reached, whatever others wait for.
    if constexpr (requires { pace.silent_rank(deadline_ns); }) {
      const int silent = pace.silent_rank(deadline_ns);
      if (silent >= 0 && silent != culprit.rank)
        culprit = {silent, wait.phase, wait.epoch, heaps.rank};
    }
    // The culprit may itself wait outside this pass, for a rank that the judge's notes do not show.
    if constexpr (requires { pace.behind(culprit.rank, deadline_ns); }) {
      if (culprit.rank != heaps.rank) {
        const auto behind = pace.behind(culprit.rank, deadline_ns);
        // A rank that is not of this heap is named by those who wait for it. This one waits for
        // them a little longer.
        if (!behind && waited_ <= deadline_ns + deadline_ns / 16) return false;
        if (behind && behind->rank != culprit.rank && behind->rank != heaps.rank &&
            behind->witness >= 0) {
          culprit.rank = behind->rank;
          culprit.witness = behind->witness;
        }
      }
    }
    const FailureRecord record{heaps.rank,    culprit.rank, culprit.phase,
                               culprit.epoch, lack.slot,    lack.expected,
                               lack.observed, waited_,      culprit.witness};
    // Other hosts may find a failure of their own. One of all ranks then decides, and the abort
    // word says what.
    if constexpr (requires { pace.propose(record); }) {
      if (pace.propose(record)) return false;
    }
    abort_world(heaps, record);
    return true;
  }

  // Called when the wait is over, for whatever reason.
  template <typename Pace>
  SWITCHYARD_HOST_DEVICE void end(const Heaps& heaps, const Pace& pace) const {
    if (clock_runs_) {
      store_release(&heaps.control(heaps.rank)->waits_for, std::uint64_t{0});
      if (shown_) store_relaxed(heaps.shown, std::uint64_t{0});
      if constexpr (requires { pace.end_wait(); }) pace.end_wait();
    }
    if (judging_ != 0) stop_judging(heaps);
  }

 private:
  // Aborts the world because a rank that this one waits for will never do its part. (It may have
  // ended because it gave up on another.) Returns false if another rank is going to say so.
  template <typename Pace>
  bool end_by_loss(const Heaps& heaps, std::uint64_t epoch, std::uint64_t deadline_ns, Pace& pace,
                   const Missing& lack) {
    const auto behind = pace.behind(lack.peer, deadline_ns);
    const int lost = behind && behind->rank != heaps.rank ? behind->rank : lack.peer;
    const FailureRecord record{heaps.rank,    lost,          Phase::kLink, epoch,     lack.slot,
                               lack.expected, lack.observed, waited_ + 1,  heaps.rank};
    if (pace.propose(record)) return false;
    abort_world(heaps, record);
    return true;
  }

  // Times and counts are kept in 32 bits, because kernels are short of registers. Between two looks
  // few ticks pass and few steps are completed, so the low bits suffice.
  static constexpr std::uint64_t kTick = 1024;  // ns

  // A kernel's wait is shown outside the GPU once nothing has moved for so long. The word is in the
  // host's memory, and the next release at system scope waits until a store there has crossed the
  // bus, so waits of every pass must not store there.
  SWITCHYARD_HOST_DEVICE static constexpr std::uint64_t shown_after(std::uint64_t deadline_ns) {
    constexpr std::uint64_t kLong = 2'000'000;  // ns
    return deadline_ns / 8 < kLong ? deadline_ns / 8 : kLong;
  }

  // Most waits end within a few looks. Until then this thread neither starts the clock nor reads
  // other ranks' words.
  bool clock_runs_ = false;
  bool shown_ = false;         // in heaps.shown
  std::uint32_t judging_ = 0;  // 1 + the looks since this thread became the judge; 0: it is not
  std::uint32_t last_ = 0, progress_ = 0;
  std::uint64_t waited_ = 0;  // ns
  int gone_ = 0;  // 1 + the rank that was gone at the last look; 0: none. Kernels do not use it.
};

// Waits until ready() is true.
//   missing()  -> Missing, called now and then: the missing step, with a phase other than kNone
//   pace       now() in ns
//              pause(n), called after the n-th failed look; it may yield or sleep
//              reads_clock(n): true if a look at the clock and at other ranks follows the n-th look
//              kLooksPerAbortCheck: on a GPU, a look at another word doubles the time of a look
//              kLeastLooksOfAJudge, and the members of WaitsAlone
//              silent_rank(deadline in ns), where ranks may be on other hosts: a rank that was not
//              heard of for a good part of the deadline, or -1
//              propose(record), there, too: false if this rank has to end the world itself; else
//              another rank does soon
//              show(wait), end_wait(), is_gone(rank), behind(rank, deadline in ns), where the
//              waiter knows the world's record: see WorldRecord
// The deadline counts from the last step that any rank completed. A pass has finitely many steps,
// so a slow world is waited for, and one in which nothing moves for deadline_ns is not. A rank that
// was itself stopped for a while cannot judge that time, and does not count it.
template <typename Ready, typename WhatIsMissing, typename Pace>
SWITCHYARD_HOST_DEVICE WaitResult wait_until(const Heaps& heaps, std::uint64_t epoch,
                                             std::uint64_t deadline_ns, Pace& pace, Ready&& ready,
                                             WhatIsMissing&& missing) {
  if (ready()) [[likely]] {
    return WaitResult::kReady;
  }
  Patience patience;
  WaitResult result = WaitResult::kReady;
  SWITCHYARD_ROLLED
  for (std::uint32_t looks = 1;; ++looks) {
    pace.pause(looks);
    if (ready()) break;
    if (looks % Pace::kLooksPerAbortCheck == 0 && pace.any(aborted(heaps))) {
      result = WaitResult::kAborted;
      break;
    }
    if (!pace.reads_clock(looks)) continue;
    const Missing lack = missing();
    if (pace.any(pace.keeps_clock() &&
                 patience.look(heaps, epoch, deadline_ns, pace, lack, looks))) {
      result = WaitResult::kAborted;
      break;
    }
  }
  patience.end(heaps, pace);
  return result;
}

}  // namespace switchyard::protocol
