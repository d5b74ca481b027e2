// Experts in other places than contiguous shards, and several times, against the fp64 reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;

TEST(ExpertPlacement, APlaceIsChosenForEachRank) {
  // Ranks 0 to 3 have places 0 1, 2 3, 4 5, 6 7.
  const ExpertPlacement placement{{3, 0, 1, 2, 0, 3, 4, 0}};
  EXPECT_THAT(places_for(placement, 5, 0, 4), ElementsAre(1, 2, 3, 0, 6));
  EXPECT_THAT(places_for(placement, 5, 1, 4), ElementsAre(4, 2, 3, 5, 6));
  EXPECT_THAT(places_for(placement, 5, 2, 4), ElementsAre(4, 2, 3, 5, 6));
  EXPECT_THAT(places_for(placement, 5, 3, 4), ElementsAre(7, 2, 3, 5, 6));
  EXPECT_THAT(places_for({}, 3, 1, 2), ElementsAre(0, 1, 2));
  EXPECT_ERROR(places_for({{0, 1, 5}}, 3, 0, 1), kInvalidArgument, "expert 5 at place 2");
  EXPECT_ERROR(places_for({{0, 2, 2}}, 3, 0, 1), kInvalidArgument, "no place for expert 1");
}

constexpr int kTokens = 120;

class Placements : public ::testing::TestWithParam<int> {
 protected:
  // The weights that rank `rank` is given: those of its places only.
  static MoeWeights of_rank(const MoeWeights& weights, const ExpertPlacement& placement, int rank,
                            int ranks) {
    const int places = placement.num_places(static_cast<int>(weights.experts.size()));
    MoeWeights own = weights;
    own.experts.clear();
    own.experts.resize(static_cast<std::size_t>(places));
    const ExpertRange range = own_experts(places, rank, ranks);
    for (int p = range.begin; p < range.end; ++p) {
      const auto at = static_cast<std::size_t>(p);
      own.experts[at] = weights.experts[static_cast<std::size_t>(placement.expert_at[at])];
    }
    return own;
  }
  // All experts in a random order, some of them again.
  static ExpertPlacement random_placement(int experts, int places, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    ExpertPlacement placement;
    placement.expert_at.resize(static_cast<std::size_t>(places));
    for (int p = 0; p < places; ++p) {
      placement.expert_at[static_cast<std::size_t>(p)] =
          p < experts ? p : static_cast<std::int32_t>(random() % static_cast<unsigned>(experts));
    }
    std::ranges::shuffle(placement.expert_at, random);
    return placement;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Placements, ::testing::Values(1, 2, 4, 8));

TEST_P(Placements, MatchFp64) {
  const int ranks = GetParam();
  LayerSpec gated = spec_of(96, 64, 16, 4);
  gated.shared_intermediate = 48;
  LayerSpec on_input = spec_of(96, 64, 13, 3);
  on_input.weight_on_input = true;
  for (const LayerSpec& spec : {gated, on_input}) {
    for (const int places : {spec.num_experts, spec.num_experts + 3, 2 * spec.num_experts}) {
      SCOPED_TRACE(::testing::Message() << places << " places of " << spec.num_experts);
      const ExpertPlacement placement = random_placement(spec.num_experts, places, 5);
      const MoeWeights w = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
      const Batch batch = random_batch(spec, kTokens, DType::kF32, 4);
      const Shares shares = Shares::even(kTokens, ranks);
      const BatchResult plain = run_batch(spec, w, batch, shares, DType::kF32);
      BatchResult result = empty_result(spec, batch, ranks, DType::kF32);
      run_all_ranks(World::threads(ranks), [&](const World& world) {
        MoeLayer layer(world, spec, of_rank(w, placement, world.rank(), ranks),
                       {.cpu = {.num_threads = 2}, .placement = placement});
        for (int i = 0; i < 3; ++i) {
          forward_share(layer, batch, shares, world.rank(), result);
        }
      });
      EXPECT_EQ(result.ids, plain.ids);
      EXPECT_EQ(result.weights, plain.weights);
      EXPECT_LE(output_error(spec, w, batch, result), 1e-5);
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(result.stats[r].tokens_per_expert, plain.stats[r].tokens_per_expert);
      }
    }
  }
}

// A replica on every rank: nothing travels.
TEST_P(Placements, OwnReplicasAreUsed) {
  const int ranks = GetParam();
  const LayerSpec spec = spec_of(96, 64, 4, 2);
  ExpertPlacement everywhere;
  for (int r = 0; r < ranks; ++r) {
    for (const std::int32_t e : {2, 0, 3, 1}) everywhere.expert_at.push_back(e);
  }
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  const Batch batch = random_batch(spec, kTokens, DType::kF32, 4);
  const Shares shares = Shares::even(kTokens, ranks);
  BatchResult result = empty_result(spec, batch, ranks, DType::kF32);
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    MoeLayer layer(world, spec, of_rank(w, everywhere, world.rank(), ranks),
                   {.cpu = {.num_threads = 1}, .placement = everywhere});
    forward_share(layer, batch, shares, world.rank(), result);
  });
  EXPECT_LE(output_error(spec, w, batch, result), 1e-5);
  for (const ForwardStats& stats : result.stats) {
    EXPECT_EQ(stats.dispatch_bytes, 0u);
    EXPECT_EQ(stats.combine_bytes, 0u);
  }
}

TEST_P(Placements, ChangeBetweenPasses) {
  const int ranks = GetParam();
  const LayerSpec spec = spec_of(96, 64, 16, 4);
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  const Batch batch = random_batch(spec, kTokens, DType::kF32, 4);
  const Shares shares = Shares::even(kTokens, ranks);
  std::vector<BatchResult> results(4, empty_result(spec, batch, ranks, DType::kF32));
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    const LayerOptions options{.cpu = {.num_threads = 1}, .placement = random_placement(16, 24, 0)};
    MoeLayer layer(world, spec, of_rank(w, options.placement, world.rank(), ranks), options);
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (i != 0) {
        const ExpertPlacement next = random_placement(16, 24, i);
        layer.rebind(of_rank(w, next, world.rank(), ranks), next);
      }
      forward_share(layer, batch, shares, world.rank(), results[i]);
    }
  });
  for (const BatchResult& result : results) {
    EXPECT_EQ(result.ids, results[0].ids);
    EXPECT_LE(output_error(spec, w, batch, result), 1e-5);
  }
}

TEST(PlacementErrors, AreTold) {
  const LayerSpec spec = spec_of(96, 64, 4, 2);
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  const auto make = [&](const World& world, const ExpertPlacement& placement) {
    const LayerOptions options{.cpu = {.num_threads = 1}, .placement = placement};
    MoeWeights own = w;
    own.experts.clear();
    for (const std::int32_t e : placement.expert_at) {
      own.experts.push_back(w.experts[static_cast<std::size_t>(e % 4)]);
    }
    return MoeLayer(world, spec, own, options);
  };
  EXPECT_ERROR(make(World::single(), {{0, 1, 2}}), kInvalidArgument, "no place for expert 3");
  EXPECT_ERROR(make(World::single(), {{0, 1, 2, 3, 4}}), kInvalidArgument, "expert 4");
  LayerOptions options;
  options.placement = {{0, 1, 2, 3, 0}};
  EXPECT_ERROR(MoeLayer(World::single(), spec, w, options), kShapeMismatch,
               "for 4 experts, but the placement has 5");
  MoeLayer layer = make(World::single(), {{0, 1, 2, 3, 0}});
  EXPECT_ERROR(layer.rebind(w, ExpertPlacement{{0, 1, 2, 3}}), kInvalidArgument,
               "4 places, and the layer was made with 5");
  test::run_threads(World::threads(2, test::with_deadline(test::kGenerous)), [&](World& world) {
    const ExpertPlacement mine{world.rank() == 0 ? std::vector<std::int32_t>{0, 1, 2, 3}
                                                 : std::vector<std::int32_t>{3, 2, 1, 0}};
    EXPECT_ERROR(make(world, mine), kSpecMismatch, "placement");
    MoeLayer same = make(world, {{0, 1, 2, 3}});
    MoeWeights own = w;
    EXPECT_ERROR(same.rebind(own, mine), kSpecMismatch, "placement");
  });
}

}  // namespace
}  // namespace switchyard::testing
