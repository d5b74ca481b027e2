#include "protocol/wait.h"

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace switchyard::protocol {
namespace {

// Four ranks' heaps, seen by rank 0 unless another is asked for, and a clock that moves by one
// microsecond per look.
class Wait : public ::testing::Test {
 protected:
  struct FakePace : WaitsAlone {
    static constexpr std::uint32_t kLooksPerAbortCheck = 1;
    static constexpr std::uint32_t kLeastLooksOfAJudge = 64;
    std::uint64_t time = 0;
    std::function<void(std::uint32_t)> on_pause = [](std::uint32_t) {};
    bool reads_clock(std::uint32_t looks) const { return looks % 64 == 0; }
    std::uint64_t now() const { return time; }
    void pause(std::uint32_t looks) {
      time += 1000;
      on_pause(looks);
    }
  };

  Wait() {
    heaps_.experts = {4, 4};
    for (int r = 0; r < 4; ++r) {
      memory_.emplace_back(std::aligned_alloc(alignof(Control), sizeof(Control)), &std::free);
      std::memset(memory_.back().get(), 0, sizeof(Control));
      heaps_.base[r] = static_cast<std::byte*>(memory_.back().get());
    }
  }

  WaitResult wait_for(int peer, std::uint64_t deadline_ns, const std::function<bool()>& ready) {
    return wait_until(heaps_, 9, deadline_ns, pace_, ready, [peer] {
      return Missing{Phase::kDispatch, peer, 5, 9, 8};
    });
  }

  // Rank `rank` shows that it still waits: once every look, until it stops.
  void beat(int rank, const WaitsFor& wait, std::uint32_t looks) {
    heaps_.control(rank)->waits_for = wait.pack(looks);
  }
  // The record of a wait for rank 1's part of dispatch in epoch 9 that ends at the deadline, with
  // `others` called at every look.
  FailureRecord fail_with(const std::function<void(std::uint32_t)>& others) {
    pace_.on_pause = others;
    EXPECT_EQ(wait_for(1, 20'000'000, [] { return false; }), WaitResult::kAborted);
    return failure_told_by(0);
  }

  Heaps heaps_of(int rank) const {
    Heaps heaps = heaps_;
    heaps.rank = rank;
    return heaps;
  }
  // What `rank` would tell its caller.
  const FailureRecord& failure_told_by(int rank) const {
    return heaps_.control(failed_rank(load_acquire(&heaps_.control(rank)->abort), rank))->failure;
  }

  Heaps heaps_;
  FakePace pace_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
};

TEST_F(Wait, ReturnsWhenReadyAndLeavesNoTrace) {
  int looks = 0;
  EXPECT_EQ(wait_for(1, 1'000'000'000, [&] { return ++looks == 500; }), WaitResult::kReady);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(heaps_.control(r)->abort, 0u);
    EXPECT_EQ(heaps_.control(r)->waits_for, 0u);
  }
}

TEST_F(Wait, SaysWhatItWaitsForMeanwhile) {
  std::uint64_t seen = 0;
  EXPECT_EQ(wait_for(2, 1'000'000'000,
                     [&] {
                       seen = std::max(seen, heaps_.control(0)->waits_for);
                       return seen != 0;
                     }),
            WaitResult::kReady);
  EXPECT_EQ(WaitsFor::unpack(seen).peer, 2);
  EXPECT_EQ(WaitsFor::unpack(seen).phase, Phase::kDispatch);
}

// The word is in the host's memory, where kernels must not store in every pass: a wait is shown
// there when nothing has moved for 2 ms.
TEST_F(Wait, IsShownOutsideWhenNothingHasMovedForLong) {
  std::uint64_t shown = 0;
  heaps_.shown = &shown;
  std::uint64_t before = 0, after = 0;  // what was shown within 2 ms, and later
  pace_.on_pause = [&](std::uint32_t) { (pace_.time < 2'000'000 ? before : after) |= shown; };
  EXPECT_EQ(wait_for(2, 1'000'000'000, [&] { return pace_.time > 3'000'000; }), WaitResult::kReady);
  EXPECT_EQ(before, 0u);
  EXPECT_NE(after, 0u);
  EXPECT_EQ(shown, 0u);

  // A short wait leaves the word alone: it may be another thread's.
  shown = 77;
  pace_.time = 0;
  pace_.on_pause = [](std::uint32_t) {};
  EXPECT_EQ(wait_for(2, 1'000'000'000, [&] { return pace_.time > 1'000'000; }), WaitResult::kReady);
  EXPECT_EQ(shown, 77u);

  // While ranks make progress, nothing is shown.
  shown = 0;
  after = pace_.time = 0;
  pace_.on_pause = [&](std::uint32_t) {
    heaps_.control(3)->progress += 1;
    after |= shown;
  };
  EXPECT_EQ(wait_for(2, 1'000'000'000, [&] { return pace_.time > 9'000'000; }), WaitResult::kReady);
  EXPECT_EQ(after, 0u);

  // Waits for the rank's own threads are of no interest there.
  pace_.time = 0;
  pace_.on_pause = [&](std::uint32_t) { after |= shown; };
  EXPECT_EQ(wait_for(0, 1'000'000'000, [&] { return pace_.time > 9'000'000; }), WaitResult::kReady);
  EXPECT_EQ(after, 0u);
}

TEST_F(Wait, DeadlineNamesTheAwaitedRankThatShowsNoLife) {
  EXPECT_EQ(wait_for(1, 20'000'000, [] { return false; }), WaitResult::kAborted);
  for (int r = 0; r < 4; ++r) {
    ASSERT_EQ(heaps_.control(r)->abort, 1u) << "rank " << r;
    const FailureRecord& failure = failure_told_by(r);
    EXPECT_EQ(failure.waiter, 0);
    EXPECT_EQ(failure.peer, 1);
    EXPECT_EQ(failure.phase, Phase::kDispatch);
    EXPECT_EQ(failure.epoch, 9u);
    EXPECT_EQ(failure.slot, 5u);
    EXPECT_EQ(failure.expected, 9u);
    EXPECT_EQ(failure.observed, 8u);
    EXPECT_GE(failure.waited_ns, 20'000'000u);
    EXPECT_LT(failure.waited_ns, 22'000'000u);
    EXPECT_EQ(failure.witness, 0);
  }
  EXPECT_EQ(heaps_.control(0)->judging, 0u);
}

TEST_F(Wait, TheEarliestWaitNamesTheCulprit) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    beat(1, {Phase::kCounts, 3, 9}, looks);   // 0 waits for 1 waits for 3
    beat(2, {Phase::kCombine, 1, 9}, looks);  // a consequence
  });
  EXPECT_EQ(failure.peer, 3);
  EXPECT_EQ(failure.phase, Phase::kCounts);
  EXPECT_EQ(failure.witness, 1);
}

TEST_F(Wait, AnEarlierEpochComesBeforeAnEarlierPhase) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    beat(1, {Phase::kCombine, 2, 8}, looks);
    beat(3, {Phase::kCounts, 1, 9}, looks);
  });
  EXPECT_EQ(failure.peer, 2);
  EXPECT_EQ(failure.phase, Phase::kCombine);
  EXPECT_EQ(failure.epoch, 8u);
}

// Rank 1 was stopped while it waited for rank 3, or for us, or has ended there: what it waited for
// may long have come.
TEST_F(Wait, TheWordOfAStoppedRankIsNotBelieved) {
  for (const int stale_peer : {0, 2, 3}) {
    heaps_.control(1)->waits_for = WaitsFor{Phase::kCounts, stale_peer, 9}.pack(77);
    const FailureRecord failure = fail_with([&](std::uint32_t looks) {
      beat(2, {Phase::kDispatch, 1, 9}, looks);
    });
    EXPECT_EQ(failure.peer, 1);
    EXPECT_EQ(failure.phase, Phase::kDispatch);
    for (int r = 0; r < 4; ++r) *heaps_.control(r) = Control{};
  }
}

TEST_F(Wait, ChainsThatCloseAreResolvedByTheOrderOfSteps) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    beat(1, {Phase::kCombine, 0, 9}, looks);  // 0 waits for 1's dispatch, 1 for 0's outputs
  });
  EXPECT_EQ(failure.peer, 1);
  EXPECT_EQ(failure.phase, Phase::kDispatch);
}

TEST_F(Wait, TheJudgeMayBeTheCulprit) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    beat(1, {Phase::kCounts, 0, 9}, looks);  // another thread of rank 0 hangs
  });
  EXPECT_EQ(failure.peer, 0);
  EXPECT_EQ(failure.phase, Phase::kCounts);
}

// Blocks of a GPU wait for each other as a consequence of what one of them waits for.
TEST_F(Wait, AWaitForAnotherRankComesBeforeOneForOwnThreads) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    beat(1, looks % 128 == 0 ? WaitsFor{Phase::kCombine, 3, 9} : WaitsFor{Phase::kGate, 1, 9, true},
         looks / 64);
    beat(3, {Phase::kGate, 3, 9, true}, looks);
  });
  EXPECT_EQ(failure.peer, 1);
  EXPECT_EQ(failure.phase, Phase::kDispatch);
}

// A host with more threads than cores: the judge has looked a few times only when its time is up.
TEST_F(Wait, AJudgeThatIsRarelyOnACoreLooksLonger) {
  const FailureRecord failure = fail_with([&](std::uint32_t looks) {
    pace_.time += 99'000;
    if (looks % 64 != 0) return;
    pace_.time += 2'000'000;
    // Rank 1 waits, too, and is as rarely on a core.
    if (looks % 1280 == 0) beat(1, {Phase::kCounts, 3, 9}, looks / 64);
  });
  EXPECT_EQ(failure.peer, 3);
}

TEST_F(Wait, TimeInWhichTheWaiterItselfWasStoppedDoesNotCount) {
  int stops = 0;
  pace_.on_pause = [&](std::uint32_t looks) {
    if (looks % 640 == 0 && ++stops <= 4) pace_.time += 1'000'000'000;
  };
  EXPECT_EQ(wait_for(1, 10'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_GE(pace_.time, 4'000'000'000u + 5'000'000u);
  EXPECT_GE(stops, 4);
}

TEST_F(Wait, ProgressAcquits) {
  bool judged = false;
  pace_.on_pause = [&](std::uint32_t) {
    if (heaps_.control(0)->judging != 0 && !judged) {
      judged = true;
      ++heaps_.control(1)->progress;
    }
  };
  EXPECT_EQ(wait_for(1, 20'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_TRUE(judged);
  EXPECT_GT(pace_.time, 30'000'000u);
}

TEST_F(Wait, OneThreadOfARankJudges) {
  heaps_.control(0)->judging = 1;  // another thread
  int looks = 0;
  EXPECT_EQ(wait_for(1, 20'000'000, [&] { return ++looks == 200'000; }), WaitResult::kReady);
  EXPECT_EQ(heaps_.control(0)->judging, 1u);
  EXPECT_EQ(heaps_.control(0)->abort, 0u);
}

TEST(WaitsFor, WordsCompareLikeTheStepsThatAreMissing) {
  const WaitsFor in_order[] = {
      {Phase::kCounts, 63, 1},       {Phase::kDispatch, 0, 1},
      {Phase::kCombine, 5, 1},       {Phase::kCounts, 0, 2},
      {Phase::kCounts, 0, 1u << 31}, {Phase::kCounts, 0, WaitsFor::kMostEpochs},
      {Phase::kGate, 0, 1, true},
  };
  for (std::size_t i = 0; i + 1 < std::size(in_order); ++i) {
    EXPECT_LT(in_order[i].pack(~0u), in_order[i + 1].pack(0)) << i;
  }
  for (const WaitsFor& wait : in_order) {
    const WaitsFor read = WaitsFor::unpack(wait.pack(12345));
    EXPECT_EQ(read.phase, wait.phase);
    EXPECT_EQ(read.peer, wait.peer);
    EXPECT_EQ(read.epoch, wait.epoch);
    EXPECT_EQ(read.own, wait.own);
  }
}

// Lanes that vote: a vote ends when all of them are there. A lane that left its wait before the
// others is missing in the next vote.
class Lanes {
 public:
  explicit Lanes(int count) : count_(count) {}
  bool any(bool holds) {
    std::unique_lock lock(mutex_);
    voted_ = voted_ || holds;
    const std::uint64_t round = round_;
    if (++there_ == count_) {
      outcome_ = voted_;
      voted_ = false;
      there_ = 0;
      ++round_;
      all_there_.notify_all();
    } else if (!all_there_.wait_for(lock, std::chrono::seconds(20),
                                    [&] { return round_ != round; })) {
      std::fprintf(stderr, "a lane is missing in a vote\n");
      std::abort();
    }
    return outcome_;
  }

 private:
  const int count_;
  std::mutex mutex_;
  std::condition_variable all_there_;
  int there_ = 0;
  bool voted_ = false, outcome_ = false;
  std::uint64_t round_ = 0;
};

// One lane of those.
struct LanePace {
  static constexpr std::uint32_t kLooksPerAbortCheck = 8;
  static constexpr std::uint32_t kLeastLooksOfAJudge = 16;
  Lanes& lanes;
  int lane;
  std::uint64_t time = 0;
  bool keeps_clock() const { return lane == 0; }
  bool any(bool holds) const { return lanes.any(holds); }
  bool reads_clock(std::uint32_t looks) const { return looks % 16 == 0; }
  std::uint64_t now() const { return time; }
  void pause(std::uint32_t) { time += 1000; }
};

TEST_F(Wait, ThreadsThatWaitTogetherLeaveTogether) {
  constexpr int kLanes = 4;
  // Past the deadline, by another's abort, which lanes may see at different looks, and in time.
  for (const int looks_until : {0, 1000, -1000}) {
    for (int r = 0; r < 4; ++r) *heaps_.control(r) = Control{};
    Lanes lanes(kLanes);
    std::vector<std::thread> threads;
    std::vector<WaitResult> results(kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([&, lane] {
        LanePace pace{lanes, lane};
        int looks = 0;
        results[static_cast<std::size_t>(lane)] = wait_until(
            heaps_, 9, looks_until == 0 ? 2'000'000 : 2'000'000'000, pace,
            [&] {
              ++looks;
              if (lane == 2 && looks == looks_until) {
                abort_world(heaps_of(1), {1, 2, Phase::kCombine, 4, 0, 0, 0, 1, 1});
              }
              return lanes.any(lane == 3 && looks == -looks_until);
            },
            [] {
              return Missing{Phase::kDispatch, 1, 5, 9, 8};
            });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const WaitResult result : results) {
      EXPECT_EQ(result, looks_until < 0 ? WaitResult::kReady : WaitResult::kAborted);
    }
    EXPECT_EQ(heaps_.control(0)->waits_for, 0u);
    EXPECT_EQ(heaps_.control(0)->judging, 0u);
  }
}

TEST_F(Wait, ProgressOfAnyRankExtendsTheDeadline) {
  pace_.on_pause = [&](std::uint32_t looks) {
    if (looks % 15000 == 0 && looks <= 150'000) ++heaps_.control(3)->progress;
  };
  EXPECT_EQ(wait_for(1, 20'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_GT(pace_.time, 170'000'000u);
  EXPECT_LT(pace_.time, 173'000'000u);
}

TEST_F(Wait, SeesAnotherRanksAbort) {
  pace_.on_pause = [&](std::uint32_t looks) {
    if (looks == 10) abort_world(heaps_of(2), {2, 3, Phase::kCombine, 4, 0, 0, 0, 1, 2});
  };
  EXPECT_EQ(wait_for(1, 1'000'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_EQ(failure_told_by(0).waiter, 2);
}

TEST_F(Wait, TheFirstRecordStays) {
  abort_world(heaps_of(2), {2, 3, Phase::kCombine, 4, 0, 0, 0, 1, 2});
  abort_world(heaps_of(2), {2, 0, Phase::kCounts, 4, 0, 0, 0, 2, 2});
  abort_world(heaps_of(1), {1, 0, Phase::kCounts, 5, 0, 0, 0, 1, 1});
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(failure_told_by(r).waiter, 2);
    EXPECT_EQ(failure_told_by(r).phase, Phase::kCombine);
  }
}

TEST_F(Wait, DeadlinesThatPassAtOnceTellOneStory) {
  for (int repeat = 0; repeat < 500; ++repeat) {
    for (int r = 0; r < 4; ++r) *heaps_.control(r) = Control{};
    std::barrier at_once(4);
    std::vector<std::thread> ranks;
    for (int r = 0; r < 4; ++r) {
      ranks.emplace_back([&, r] {
        at_once.arrive_and_wait();
        abort_world(heaps_of(r), {r, 3 - r, Phase::kCombine, 4, 0, 0, 0, 1, 2});
        // As soon as the rank's own word is raised, not only in the end.
        const FailureRecord told = failure_told_by(r);
        EXPECT_EQ(told.peer, 3 - told.waiter);
        EXPECT_EQ(told.waiter, load_acquire(&heaps_.control(0)->verdict) - 1);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (int r = 0; r < 4; ++r) EXPECT_EQ(failure_told_by(r).waiter, failure_told_by(0).waiter);
  }
}

// A rank that dies between its verdict and the words it was to raise.
TEST_F(Wait, AnothersVerdictIsSpread) {
  heaps_.control(2)->failure = {2, 3, Phase::kCombine, 4, 0, 0, 0, 1, 2};
  heaps_.control(0)->verdict = 3;
  abort_world(heaps_of(1), {1, 0, Phase::kCounts, 4, 0, 0, 0, 1, 2});
  for (int r = 0; r < 4; ++r) EXPECT_EQ(failure_told_by(r).waiter, 2);
}

}  // namespace
}  // namespace switchyard::protocol
