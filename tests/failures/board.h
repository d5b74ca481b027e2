// Memory in which the ranks of a trial tell the one that plays it what became of them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "failures/trial.h"

namespace switchyard::failures {

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum class Outcome : int {
  kNone,     // it has said nothing
  kDone,     // it finished everything
  kTimeout,  // TimeoutError
  kOther,    // another error
};

struct RankBoard {
  std::atomic<int> pid;
  std::atomic<int> round;              // from 1 on; 0: it has no world yet
  std::atomic<std::int64_t> began_ns;  // of the call that it is in, or that failed; 0: of none yet
  std::atomic<std::int64_t> failed_ns;
  std::atomic<std::int64_t> ended_ns;  // 0: it has not closed everything
  std::atomic<Outcome> outcome;        // set behind what was said
  int code, peer, waiter;              // of the TimeoutError
  char phase[24];
  char doing[24];  // the call
  char words[1500];
};

struct Board {
  std::atomic<std::int64_t> harmed_ns;
  RankBoard ranks[kMostRanks];
};
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "processes share it");

}  // namespace switchyard::failures
