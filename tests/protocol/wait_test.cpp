#include "protocol/wait.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace switchyard::protocol {
namespace {

// Four ranks' heaps, seen by rank 0 unless another is asked for, and a clock that moves by one
// microsecond per look.
class Wait : public ::testing::Test {
 protected:
  struct FakePace {
    static constexpr std::uint32_t kLooksPerAbortCheck = 1;
    std::uint64_t time = 0;
    std::function<void(std::uint32_t)> on_pause = [](std::uint32_t) {};
    std::uint64_t now() const { return time; }
    void pause(std::uint32_t looks) {
      time += 1000;
      on_pause(looks);
    }
  };

  Wait() {
    LayoutParams p;
    p.num_ranks = 4;
    p.num_experts = 4;
    p.top_k = 1;
    p.hidden = 1;
    p.max_tokens = 1;
    p.cells_per_token = 1;
    p.element_bytes = 4;
    heaps_.layout = HeapLayout(p);
    for (int r = 0; r < 4; ++r) {
      memory_.emplace_back(std::aligned_alloc(4096, heaps_.layout.bytes()), &std::free);
      std::memset(memory_.back().get(), 0, heaps_.layout.bytes());
      heaps_.base[r] = static_cast<std::byte*>(memory_.back().get());
    }
  }

  WaitResult wait_for(int peer, std::uint64_t deadline_ns, const std::function<bool()>& ready) {
    return wait_until(heaps_, 9, deadline_ns, pace_, ready, [peer] {
      return Missing{Phase::kDispatch, peer, 5, 9, 8};
    });
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

TEST_F(Wait, DeadlineNamesTheRankAtTheEndOfTheChain) {
  heaps_.control(1)->waits_for = WaitsFor{Phase::kCounts, 3}.pack();  // 0 waits for 1 waits for 3
  EXPECT_EQ(wait_for(1, 2'000'000, [] { return false; }), WaitResult::kAborted);
  for (int r = 0; r < 4; ++r) {
    ASSERT_EQ(heaps_.control(r)->abort, 1u) << "rank " << r;
    const FailureRecord& failure = failure_told_by(r);
    EXPECT_EQ(failure.waiter, 0);
    EXPECT_EQ(failure.peer, 3);
    EXPECT_EQ(failure.phase, Phase::kCounts);
    EXPECT_EQ(failure.epoch, 9u);
    EXPECT_EQ(failure.slot, 5u);
    EXPECT_EQ(failure.expected, 9u);
    EXPECT_EQ(failure.observed, 8u);
    EXPECT_GE(failure.waited_ns, 2'000'000u);
    EXPECT_LT(failure.waited_ns, 2'200'000u);
  }
}

TEST_F(Wait, ChainsThatCloseEnd) {
  heaps_.control(1)->waits_for = WaitsFor{Phase::kCounts, 2}.pack();
  heaps_.control(2)->waits_for = WaitsFor{Phase::kCombine, 1}.pack();
  const Culprit culprit = find_culprit(heaps_, 1, Phase::kDispatch);
  EXPECT_TRUE(culprit.rank == 1 || culprit.rank == 2);
  heaps_.control(2)->waits_for = WaitsFor{Phase::kCombine, 0}.pack();
  EXPECT_EQ(find_culprit(heaps_, 1, Phase::kDispatch).rank, 0);
}

TEST_F(Wait, ProgressOfAnyRankExtendsTheDeadline) {
  pace_.on_pause = [&](std::uint32_t looks) {
    if (looks % 1500 == 0 && looks <= 15'000) ++heaps_.control(3)->progress;
  };
  EXPECT_EQ(wait_for(1, 2'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_GT(pace_.time, 17'000'000u);
  EXPECT_LT(pace_.time, 17'300'000u);
}

TEST_F(Wait, SeesAnotherRanksAbort) {
  pace_.on_pause = [&](std::uint32_t looks) {
    if (looks == 10) abort_world(heaps_of(2), {2, 3, Phase::kCombine, 4, 0, 0, 0, 1});
  };
  EXPECT_EQ(wait_for(1, 1'000'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_EQ(failure_told_by(0).waiter, 2);
}

TEST_F(Wait, TheFirstRecordStays) {
  abort_world(heaps_of(2), {2, 3, Phase::kCombine, 4, 0, 0, 0, 1});
  abort_world(heaps_of(2), {2, 0, Phase::kCounts, 4, 0, 0, 0, 2});
  abort_world(heaps_of(1), {1, 0, Phase::kCounts, 5, 0, 0, 0, 1});
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
        abort_world(heaps_of(r), {r, 3 - r, Phase::kCombine, 4, 0, 0, 0, 1});
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
  heaps_.control(2)->failure = {2, 3, Phase::kCombine, 4, 0, 0, 0, 1};
  heaps_.control(0)->verdict = 3;
  abort_world(heaps_of(1), {1, 0, Phase::kCounts, 4, 0, 0, 0, 1});
  for (int r = 0; r < 4; ++r) EXPECT_EQ(failure_told_by(r).waiter, 2);
}

}  // namespace
}  // namespace switchyard::protocol
