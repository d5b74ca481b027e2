// The recorder of routings: what a layer routed in its last steps, and its limits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <span>
#include <vector>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/layers.h"
#include "support/ranks.h"
#include "switchyard/recording.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;

constexpr int kExperts = 6, kTopK = 2, kTokens = 40;

// Batches whose routing is given, and what it counts.
struct GivenRouting {
  explicit GivenRouting(int steps, const LayerSpec& spec) {
    for (int i = 0; i < steps; ++i) {
      Batch batch = random_batch(spec, kTokens, DType::kF32, static_cast<std::uint64_t>(90 + i));
      const double beta = 0.6 + 0.1 * (i % 5);
      const SyntheticRouting routing =
          synthetic_routing(kTokens, kExperts, kTopK, beta, static_cast<std::uint64_t>(i));
      batch.topk_ids = routing.ids;
      batch.topk_weights = routing.weights;
      batch.topk_ids[static_cast<std::size_t>(i)] = kNoExpert;
      std::vector<std::int64_t> counted(kExperts);
      for (const std::int32_t id : batch.topk_ids) {
        if (id >= 0) ++counted[static_cast<std::size_t>(id)];
      }
      counts.push_back(counted);
      batches.push_back(std::move(batch));
    }
  }
  std::vector<Batch> batches;
  std::vector<std::vector<std::int64_t>> counts;
};

LayerSpec small_spec() { return spec_of(96, 64, kExperts, kTopK); }

class RecorderOfRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RecorderOfRanks, ::testing::Values(1, 2, 4));

// Every rank records what all ranks' tokens chose.
TEST_P(RecorderOfRanks, HasTheLastSteps) {
  const int ranks = GetParam();
  const LayerSpec spec = small_spec();
  const MoeWeights weights = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  const GivenRouting given(7, spec);
  const Shares shares = Shares::even(kTokens, ranks);
  std::vector<Recording> recordings(static_cast<std::size_t>(ranks));
  BatchResult result = empty_result(spec, given.batches[0], ranks, DType::kF32);
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    MoeLayer layer(
        world, spec, weights,
        {.cpu = {.num_threads = 2}, .diagnostics = {.recorded_steps = 4, .name = "layers.3"}});
    EXPECT_TRUE(layer.recording().steps.empty());
    for (std::size_t i = 0; i < given.batches.size(); ++i) {
      forward_share(layer, given.batches[i], shares, world.rank(), result);
      const Recording recording = layer.recording();
      EXPECT_EQ(recording.steps.size(), std::min<std::size_t>(i + 1, 4));
      EXPECT_EQ(recording.overwritten, i < 4 ? 0 : i - 3);
      EXPECT_EQ(recording.steps.back().counts, layer.stats().tokens_per_expert);
      EXPECT_EQ(recording.steps.back().epoch, layer.stats().epoch);
    }
    recordings[static_cast<std::size_t>(world.rank())] = layer.recording();
  });
  for (int r = 0; r < ranks; ++r) {
    const Recording& recording = recordings[static_cast<std::size_t>(r)];
    EXPECT_EQ(recording.layer, "layers.3");
    EXPECT_EQ(recording.rank, r);
    EXPECT_EQ(recording.num_ranks, ranks);
    EXPECT_EQ(recording.num_experts, kExperts);
    EXPECT_EQ(recording.top_k, kTopK);
    EXPECT_EQ(recording.n, 2 * 64);
    EXPECT_EQ(recording.k, 96);
    EXPECT_EQ(recording.overwritten, 3u);
    ASSERT_EQ(recording.steps.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(recording.steps[i].step, i + 3);
      EXPECT_EQ(recording.steps[i].counts, given.counts[i + 3]);
      EXPECT_EQ(recording.steps[i].tokens, shares.count[static_cast<std::size_t>(r)]);
    }
    const std::vector<double> betas = balancedness_of(recording);
    ASSERT_EQ(betas.size(), 4u);
    EXPECT_DOUBLE_EQ(betas[1], balancedness(given.counts[4]));
  }
}

// Experts, not places, whatever the placement was at the time.
TEST(Recorder, CountsExpertsNotPlaces) {
  const LayerSpec spec = small_spec();
  const MoeWeights weights = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  const auto placed = [&](const ExpertPlacement& placement) {
    MoeWeights its = weights;
    its.experts.clear();
    for (const std::int32_t e : placement.expert_at) {
      its.experts.push_back(weights.experts[static_cast<std::size_t>(e)]);
    }
    return its;
  };
  const ExpertPlacement first{{5, 4, 3, 2, 1, 0, 0}}, second{{1, 0, 2, 5, 3, 4, 4}};
  const GivenRouting given(2, spec);
  BatchResult result = empty_result(spec, given.batches[0], 1, DType::kF32);
  MoeLayer layer(
      World::single(), spec, placed(first),
      {.cpu = {.num_threads = 1}, .placement = first, .diagnostics = {.recorded_steps = 2}});
  forward_share(layer, given.batches[0], Shares::even(kTokens, 1), 0, result);
  layer.rebind(placed(second), second);
  forward_share(layer, given.batches[1], Shares::even(kTokens, 1), 0, result);
  const Recording recording = layer.recording();
  ASSERT_EQ(recording.steps.size(), 2u);
  EXPECT_EQ(recording.steps[0].counts, given.counts[0]);
  EXPECT_EQ(recording.steps[1].counts, given.counts[1]);
}

TEST(Recorder, IsOffUnlessAskedFor) {
  const LayerSpec spec = small_spec();
  const MoeWeights weights = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  LayerOptions options{.cpu = {.num_threads = 1}};
  MoeLayer off(World::single(), spec, weights, options);
  EXPECT_ERROR(off.recording(), kInvalidArgument, "recorded_steps");
  options.diagnostics.recorded_steps = 100;
  const MoeLayer on(World::single(), spec, weights, options);
  EXPECT_EQ(on.workspace_bytes() - off.workspace_bytes(), 8u + 100 * (16 + 4 * kExperts));
  options.diagnostics.recorded_steps = -1;
  EXPECT_ERROR(MoeLayer(World::single(), spec, weights, options), kInvalidArgument,
               "recorded_steps is -1");
  options.diagnostics.recorded_steps = (1 << 20) + 1;
  EXPECT_ERROR(MoeLayer(World::single(), spec, weights, options), kInvalidArgument,
               "recorded_steps is 1048577");
}

}  // namespace
}  // namespace switchyard::testing
