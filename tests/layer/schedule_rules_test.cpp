// The GPU's rules of the schedule, and what takes their place.
#include <gtest/gtest.h>

#include <utility>

#include "gpu/schedule/rules.h"

namespace switchyard::gpu {
namespace {

// OLMoE in bf16 on one GPU.
LaunchFacts olmoe(std::int64_t tokens) { return {tokens, 64, 8, 1, 32, 6144, true, {}}; }

TEST(ChooseLaunch, ByTheRule) {
  EXPECT_EQ(choose_launch({}, olmoe(0)), Launch::kSmall);
  EXPECT_EQ(choose_launch({}, olmoe(32)), Launch::kSmall);
  EXPECT_EQ(choose_launch({}, olmoe(33)), Launch::kSingle);
  EXPECT_EQ(choose_launch({}, olmoe(767)), Launch::kSingle);  // 95.9 rows per expert
  EXPECT_EQ(choose_launch({}, olmoe(768)), Launch::kPaired);
  LaunchFacts facts = olmoe(32);
  facts.num_experts = 256;  // 8192 logits
  EXPECT_EQ(choose_launch({}, facts), Launch::kSingle);
  facts = olmoe(8);
  facts.num_ranks = 2;
  EXPECT_EQ(choose_launch({}, facts), Launch::kSingle);
  facts.tokens = 384;
  EXPECT_EQ(choose_launch({}, facts), Launch::kPaired);
  facts.pairs_fit = false;
  EXPECT_EQ(choose_launch({}, facts), Launch::kSingle);
}

TEST(ChooseLaunch, ByTheCaller) {
  EXPECT_EQ(choose_launch({.small_tokens = 0}, olmoe(1)), Launch::kSingle);
  EXPECT_EQ(choose_launch({.small_tokens = 8}, olmoe(8)), Launch::kSmall);
  EXPECT_EQ(choose_launch({.small_tokens = 8}, olmoe(9)), Launch::kSingle);
  LaunchFacts facts = olmoe(32);
  facts.num_experts = 512;
  EXPECT_EQ(choose_launch({.small_tokens = 32}, facts), Launch::kSmall);
  facts.top_k = 17;  // more slots than a block has room for
  EXPECT_EQ(choose_launch({.small_tokens = 32}, facts), Launch::kSingle);
  EXPECT_EQ(choose_launch({.paired_rows = 0}, olmoe(33)), Launch::kPaired);
  EXPECT_EQ(choose_launch({.paired_rows = 0}, olmoe(32)), Launch::kSmall);
  EXPECT_EQ(choose_launch({.small_tokens = 0, .paired_rows = 0}, olmoe(1)), Launch::kPaired);
  EXPECT_EQ(choose_launch({.paired_rows = -1}, olmoe(1 << 20)), Launch::kSingle);
}

TEST(ChooseLaunch, LowPassesHaveFewRowsOfEachExpert) {
  const auto of = [](std::int64_t tokens, const Schedule& schedule = {}) {
    LaunchFacts facts = olmoe(tokens);
    facts.low_tokens = tokens;
    return choose_launch(schedule, facts);
  };
  EXPECT_EQ(of(32), Launch::kSmallLow);
  EXPECT_EQ(of(32, {.low_rows = 0}), Launch::kSmall);
  EXPECT_EQ(of(32, {.small_tokens = 0}), Launch::kLow);
  EXPECT_EQ(of(33), Launch::kLow);
  EXPECT_EQ(of(88), Launch::kLow);  // 11 rows per expert
  EXPECT_EQ(of(89), Launch::kTallLow);
  EXPECT_EQ(of(208), Launch::kTallLow);  // 26
  EXPECT_EQ(of(209), Launch::kSingle);
  EXPECT_EQ(of(33, {.low_rows = 0}), Launch::kSingle);
  EXPECT_EQ(of(64, {.low_rows = 8}), Launch::kLow);
  EXPECT_EQ(of(65, {.low_rows = 8}), Launch::kSingle);
  EXPECT_EQ(of(1000, {.paired_rows = 0, .low_rows = 1000}), Launch::kTallLow);
  LaunchFacts few_experts = olmoe(32);  // 16 rows per expert: a small pass has no higher tiles
  few_experts.num_experts = 16;
  few_experts.low_tokens = 32;
  EXPECT_EQ(choose_launch({}, few_experts), Launch::kSmall);
  EXPECT_EQ(choose_launch({.low_rows = 16}, few_experts), Launch::kSmallLow);
  LaunchFacts high = olmoe(520);  // 65 rows per expert
  high.low_tokens = 520;
  EXPECT_EQ(choose_launch({}, high), Launch::kSingle);
  high.tall_rows = 80;
  EXPECT_EQ(choose_launch({}, high), Launch::kTallLow);
  high.low_tokens = 521;
  EXPECT_EQ(choose_launch({}, high), Launch::kSingle);
}

TEST(ChooseLaunch, LowPassesOfFewTokensWhereNoKernelIsSmallAndLow) {
  const auto of = [](std::int64_t tokens, const Schedule& schedule = {}, bool given = true) {
    LaunchFacts facts = olmoe(tokens);
    if (given) facts.low_tokens = tokens;
    facts.small_low = false;
    return choose_launch(schedule, facts);
  };
  EXPECT_EQ(of(kLowTokens - 1), Launch::kSmall);
  EXPECT_EQ(of(kLowTokens), Launch::kLow);
  EXPECT_EQ(of(32), Launch::kLow);
  EXPECT_EQ(of(32, {}, false), Launch::kSmall);
  EXPECT_EQ(of(32, {.small_tokens = 32}), Launch::kSmall);
  EXPECT_EQ(of(32, {.splits = 2}), Launch::kSmall);
  EXPECT_EQ(of(32, {.low_rows = 0}), Launch::kSmall);
  LaunchFacts few_experts = olmoe(32);  // 16 rows per expert
  few_experts.num_experts = 16;
  few_experts.low_tokens = 32;
  few_experts.small_low = false;
  EXPECT_EQ(choose_launch({}, few_experts), Launch::kTallLow);
}

TEST(Splits, GiveEveryBlockATaskAndAreNotTooLong) {
  const TileOrder rule{};
  EXPECT_EQ(log2_splits(rule, 64, 2048, 512, 2), 1u);  // 128 tasks
  EXPECT_EQ(log2_splits(rule, 32, 2048, 512, 2), 2u);
  EXPECT_EQ(log2_splits(rule, 32, 2048, 1024, 2), 1u);  // no shorter parts
  EXPECT_EQ(log2_splits(rule, 256, 2048, 512, 2), 0u);
  EXPECT_EQ(log2_splits(rule, 256, 8192, 512, 2), 0u);
  EXPECT_EQ(log2_splits(rule, 256, 14336, 512, 2), 1u);  // Mixtral's
  EXPECT_EQ(log2_splits(rule, 256, 32768, 512, 2), 2u);
  EXPECT_EQ(log2_splits(rule, 256, 32768, 512, 0), 0u);  // of large passes
  TileOrder forced{};
  forced.forced_splits = 1;
  EXPECT_EQ(log2_splits(forced, 256, 14336, 512, 2), 0u);
}

TEST(FirstSources, WaitUntilAllAreHereOrPatienceEnds) {
  constexpr std::uint32_t kAll = 0b1111;
  EXPECT_EQ(first_sources(kAll, kAll, 0, true), kAll);
  EXPECT_EQ(first_sources(kAll, kAll, 0, false), kAll);
  EXPECT_EQ(first_sources(kAll, 0b0011, 0, true), 0u);
  EXPECT_EQ(first_sources(kAll, 0b0011, 0, false), 0b0011u);
}

// Ranks that did not wait for this one are served before it serves itself, and at once.
TEST(FirstSources, OfALateRankAreThoseThatAreAhead) {
  constexpr std::uint32_t kAll = 0b1111;
  EXPECT_EQ(first_sources(kAll, kAll, 0b0101, true), 0b0101u);
  EXPECT_EQ(first_sources(kAll, 0b0111, 0b0101, true), 0b0101u);
}

TEST(PatienceOfRounds, IsWhatASecondRoundCosts) {
  // OLMoE on two ranks, 512 rows of each expert: reading is hidden in either round.
  constexpr double kBytes = 32.0 * 3 * 2048 * 1024 * 2;
  EXPECT_DOUBLE_EQ(patience_ns({2048, 64, 8, 2, kBytes, 0, false}), 20'000);
  // 64 rows: all of the time is reading, 100 us of it.
  EXPECT_NEAR(patience_ns({256, 64, 8, 2, kBytes, 0, false}), 20'000 + kBytes / 4000, 1);
  // 300 rows: 1.5 readings or two.
  EXPECT_NEAR(patience_ns({1200, 64, 8, 2, kBytes, 0, false}), 20'000 + kBytes / 8000, 1);
  // Products of 300 us: a sixth of them. In FP8 they take half the time.
  EXPECT_NEAR(patience_ns({2048, 64, 8, 2, kBytes, 97.5e9, false}), 70'000, 1);
  EXPECT_NEAR(patience_ns({2048, 64, 8, 2, kBytes / 2, 97.5e9, true}), 45'000, 1);
}

// A gated FFN with so many rows of gate and up, on 132 blocks.
OrderFacts facts_of(std::uint32_t rows) { return {132, rows, 128, 256, 4096, 8}; }

TEST(ChooseOrder, ByTheRule) {
  const TileOrder narrow = choose_order({}, facts_of(2048));  // 16 tasks for a tile
  EXPECT_EQ(narrow.log2_band, 0u);
  EXPECT_EQ(narrow.lag, 18u);  // 264 / 16, rounded up, and 1
  EXPECT_EQ(narrow.banded_lag, narrow.lag);
  const TileOrder wide = choose_order({}, facts_of(28672));  // 224 tasks for a tile
  EXPECT_EQ(wide.log2_band, 3u);
  EXPECT_EQ(wide.lag, 3u);
  EXPECT_EQ(wide.banded_lag, 1u);
  EXPECT_EQ(choose_order({}, facts_of(0)).lag, 265u) << "no experts here";
  OrderFacts more = facts_of(2048);
  more.rounds = 5;
  EXPECT_EQ(choose_order({}, more).lag, 43u);  // 660 / 16, rounded up, and 1
  EXPECT_EQ(choose_order({.lag = 3}, more).lag, 3u);
}

TEST(ChooseOrder, ByTheCaller) {
  const TileOrder order = choose_order({.lag = 5, .band = 4, .splits = 2}, facts_of(28672));
  EXPECT_EQ(order.lag, 5u);
  EXPECT_EQ(order.banded_lag, 5u);
  EXPECT_EQ(order.log2_band, 2u);
  EXPECT_EQ(choose_order({.band = 1}, facts_of(28672)).banded_lag, 3u);
  EXPECT_EQ(choose_order({.band = 2}, facts_of(2048)).banded_lag, 9u);
}

// A tile's slot is free when GEMM2 of the tile before it there is done: that must come earlier in
// the order than the tile's own GEMM1.
TEST(ChooseOrder, SlotsSufficeForEveryOrder) {
  for (const int lag : {1, 2, 7, kMostLag}) {
    for (const int band : {1, 2, kMostBand}) {
      const TileOrder order = choose_order({.lag = lag, .band = band}, facts_of(2048));
      const std::uint64_t slots = h_slots(order, ~std::uint64_t{0});
      EXPECT_GT(slots, static_cast<std::uint64_t>(lag)) << "a band of one";
      EXPECT_GE(slots,
                (std::uint64_t{static_cast<unsigned>(lag)} + 1) * static_cast<unsigned>(band));
      EXPECT_EQ(h_slots(order, 3), 3u);
    }
  }
}

TEST(Splits, AsManyAsGiveEveryBlockATask) {
  const TileOrder free{};
  EXPECT_EQ(log2_splits(free, 16, 2048, 512, 2), 2u);
  EXPECT_EQ(log2_splits(free, 64, 2048, 512, 2), 1u);
  EXPECT_EQ(log2_splits(free, 128, 2048, 512, 2), 0u);
  EXPECT_EQ(log2_splits(free, 16, 1024, 512, 2), 1u) << "no part is shorter";
  for (const int splits : {1, 2, 4}) {
    const TileOrder forced = choose_order({.splits = splits}, facts_of(2048));
    EXPECT_EQ(1 << log2_splits(forced, 128, 64, 512, 2), splits);
  }
}

TEST(Splits, EveryPartHasAStage) {
  OrderFacts facts = facts_of(2048);
  for (const auto& [stages, splits] : {std::pair{1u, 1}, {2u, 2}, {3u, 2}, {4u, 4}, {100u, 4}}) {
    facts.gemm2_stages = stages;
    const TileOrder order = choose_order({.splits = 4}, facts);
    EXPECT_EQ(1 << log2_splits(order, 1, 4096, 512, 2), splits) << stages << " stages";
  }
}

TEST(CombineChunk, OneTaskForEveryBlock) {
  EXPECT_EQ(log2_combine_chunk(132, 132, 8), 0u);
  EXPECT_EQ(log2_combine_chunk(133, 132, 8), 1u);
  EXPECT_EQ(log2_combine_chunk(1 << 20, 132, 8), 3u);
}

}  // namespace
}  // namespace switchyard::gpu
