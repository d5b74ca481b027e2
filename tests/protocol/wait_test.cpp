#include "protocol/wait.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace switchyard::protocol {
namespace {

// Four ranks' heaps, seen by rank 0, and a clock that moves by one microsecond per look.
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
    const Control* control = heaps_.control(r);
    ASSERT_EQ(control->abort, 1u) << "rank " << r;
    EXPECT_EQ(control->failure.waiter, 0);
    EXPECT_EQ(control->failure.peer, 3);
    EXPECT_EQ(control->failure.phase, Phase::kCounts);
    EXPECT_EQ(control->failure.epoch, 9u);
    EXPECT_EQ(control->failure.slot, 5u);
    EXPECT_EQ(control->failure.expected, 9u);
    EXPECT_EQ(control->failure.observed, 8u);
    EXPECT_GE(control->failure.waited_ns, 2'000'000u);
    EXPECT_LT(control->failure.waited_ns, 2'200'000u);
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
    if (looks == 10) abort_world(heaps_, {2, 3, Phase::kCombine, 4, 0, 0, 0, 1});
  };
  EXPECT_EQ(wait_for(1, 1'000'000'000, [] { return false; }), WaitResult::kAborted);
  EXPECT_EQ(heaps_.control(0)->failure.waiter, 2);
}

TEST_F(Wait, TheFirstRecordStays) {
  abort_world(heaps_, {2, 3, Phase::kCombine, 4, 0, 0, 0, 1});
  abort_world(heaps_, {1, 0, Phase::kCounts, 5, 0, 0, 0, 1});
  for (int r = 0; r < 4; ++r) EXPECT_EQ(heaps_.control(r)->failure.waiter, 2);
}

}  // namespace
}  // namespace switchyard::protocol
