// Weights as callers have them: in other layouts, changed in place, in other memory.
#include <gtest/gtest.h>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

constexpr int kTokens = 60;

// A spec in which everything that a layer copies is there.
LayerSpec spec_with_everything() {
  LayerSpec spec = spec_of(96, 64, 16, 4);
  spec.expert_bias = true;
  spec.router_bias = true;
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  spec.shared_intermediate = 48;
  spec.shared_sigmoid_gate = true;
  return spec;
}

// Copies `from` over the weights that `to` views, of the same shapes.
void overwrite(const MoeWeights& to, const MoeWeights& from) {
  const auto matrix = [](const MatrixView& a, const MatrixView& b) {
    if (a.empty()) return;
    ASSERT_EQ(a.row_stride, b.row_stride);
    std::memcpy(const_cast<void*>(a.data), b.data,
                static_cast<std::size_t>(a.rows * a.row_stride) * size_of(a.dtype));
  };
  const auto vector = [](const VectorView& a, const VectorView& b) {
    if (a.empty()) return;
    ASSERT_EQ(a.stride, 1);
    std::memcpy(const_cast<void*>(a.data), b.data,
                static_cast<std::size_t>(a.size) * size_of(a.dtype));
  };
  const auto ffn = [&](const FfnWeights& a, const FfnWeights& b) {
    matrix(a.gate, b.gate);
    matrix(a.up, b.up);
    matrix(a.down, b.down);
    vector(a.gate_bias, b.gate_bias);
    vector(a.up_bias, b.up_bias);
    vector(a.down_bias, b.down_bias);
  };
  for (std::size_t e = 0; e < to.experts.size(); ++e) ffn(to.experts[e], from.experts[e]);
  ffn(to.shared, from.shared);
  matrix(to.router, from.router);
  vector(to.router_bias, from.router_bias);
  vector(to.correction_bias, from.correction_bias);
  vector(to.shared_gate, from.shared_gate);
}

class ChangedWeights : public ::testing::TestWithParam<std::tuple<int, DType>> {
 protected:
  // A batch before and after change(layer), which all ranks make.
  template <typename Change>
  std::pair<BatchResult, BatchResult> around(const MoeWeights& weights, Change&& change) {
    const auto [ranks, dtype] = GetParam();
    const Shares shares = Shares::even(kTokens, ranks);
    BatchResult before = empty_result(spec_, batch_, ranks, DType::kF32), after = before;
    run_all_ranks(World::threads(ranks), [&](World world) {
      LayerOptions options;
      options.num_threads = 1;
      MoeLayer layer(world, spec_, weights, options);
      forward_share(layer, batch_, shares, world.rank(), before);
      world.barrier();
      change(layer, world);
      world.barrier();
      forward_share(layer, batch_, shares, world.rank(), after);
    });
    return {std::move(before), std::move(after)};
  }
  MoeWeights weights(std::uint64_t seed) const {
    return generate_weights(spec_, std::get<1>(GetParam()), seed, {.num_threads = 1});
  }
  BatchResult fresh(const MoeWeights& w) const {
    return run_batch(spec_, w, batch_, Shares::even(kTokens, std::get<0>(GetParam())), DType::kF32);
  }

  LayerSpec spec_ = spec_with_everything();
  Batch batch_ = random_batch(spec_, kTokens, DType::kF32, 4);
};
INSTANTIATE_TEST_SUITE_P(RanksAndTypes, ChangedWeights,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(DType::kF32, DType::kF16,
                                                              DType::kBF16)));

TEST_P(ChangedWeights, InPlaceAreSeenAfterRefresh) {
  const MoeWeights mine = weights(3), next = weights(7);
  const BatchResult expected[] = {fresh(mine), fresh(next)};
  const auto [before, after] = around(mine, [&](MoeLayer& layer, World& world) {
    if (world.rank() == 0) overwrite(mine, next);
    world.barrier();
    layer.refresh();
  });
  EXPECT_TRUE(before.output == expected[0].output);
  EXPECT_FALSE(expected[0].output == expected[1].output);
  EXPECT_TRUE(after.output == expected[1].output);
  EXPECT_EQ(after.ids, expected[1].ids);
  EXPECT_EQ(after.weights, expected[1].weights);
}

// What would go stale: without refresh() the gate and the biases are the old ones.
TEST_P(ChangedWeights, InPlaceAreNotAllSeenWithoutIt) {
  const MoeWeights mine = weights(3), next = weights(7);
  const BatchResult expected = fresh(next);
  const auto [before, after] = around(mine, [&](MoeLayer&, World& world) {
    if (world.rank() == 0) overwrite(mine, next);
  });
  EXPECT_FALSE(after.output == expected.output);
}

TEST_P(ChangedWeights, OfAnotherArrayAreSeenAfterRebind) {
  const MoeWeights mine = weights(3);
  MoeWeights next = weights(7);
  const BatchResult expected[] = {fresh(mine), fresh(next)};
  const auto [before, after] = around(mine, [&](MoeLayer& layer, World& world) {
    layer.rebind(weights_of_rank(next, world.rank(), world.size()));
    world.barrier();
    if (world.rank() == 0) next.owner.reset();  // the layer holds on to it
  });
  EXPECT_TRUE(before.output == expected[0].output);
  EXPECT_TRUE(after.output == expected[1].output);
}

TEST(Rebind, OfWhatDoesNotFitIsRefusedAndLeavesTheLayer) {
  const LayerSpec spec = spec_with_everything();
  const MoeWeights mine = generate_weights(spec, DType::kF32, 3, {});
  const Batch batch = random_batch(spec, kTokens, DType::kF32, 4);
  MoeLayer layer(World::single(), spec, mine, {.num_threads = 1});
  BatchResult before = empty_result(spec, batch, 1, DType::kF32), after = before;
  const Shares shares = Shares::even(kTokens, 1);
  forward_share(layer, batch, shares, 0, before);
  LayerSpec other = spec;
  other.intermediate = 32;
  EXPECT_ERROR(layer.rebind(generate_weights(other, DType::kF32, 3, {})), ErrorCode::kShapeMismatch,
               "experts[0].gate");
  EXPECT_ERROR(layer.rebind(generate_weights(spec, DType::kBF16, 3, {})), ErrorCode::kDTypeMismatch,
               "router is bf16, and was f32");
  MoeWeights without = mine;
  without.router = {};
  EXPECT_ERROR(layer.rebind(without), ErrorCode::kMissingTensor, "made with a router");
  MoeWeights half = generate_weights(spec, DType::kBF16, 3, {});
  half.router = mine.router;
  EXPECT_ERROR(layer.rebind(half), ErrorCode::kDTypeMismatch, "computes in f32", "compute in bf16");
  int word = 0;
  EXPECT_ERROR(layer.refresh(&word), ErrorCode::kInvalidArgument, "stream");
  forward_share(layer, batch, shares, 0, after);
  EXPECT_TRUE(after.output == before.output);
}

// [E, H, 2 I] and [E, I, H], up first, and gate and up in turn: the same bits as [2 I, H].
TEST(Layouts, GiveTheSameBits) {
  const LayerSpec spec = spec_of(96, 64, 8, 2);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MoeWeights plain = generate_weights(spec, dtype, 3, {});
    const Batch batch = random_batch(spec, kTokens, dtype, 4);
    const Shares shares = Shares::even(kTokens, 2);
    const BatchResult expected = run_batch(spec, plain, batch, shares, dtype);
    for (const GateUpLayout layout : kGateUpLayouts) {
      const LaidOutWeights weights(spec, plain, layout);
      const BatchResult result = run_batch(spec, weights.views, batch, shares, dtype);
      EXPECT_TRUE(result.output == expected.output)
          << to_string(dtype) << ", layout " << static_cast<int>(layout);
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
