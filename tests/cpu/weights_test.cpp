// Weights as callers have them: in other layouts, changed in place, in other memory.
#include <gtest/gtest.h>

#include "cpu/tile_gemm.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/specs.h"

namespace switchyard::testing {
namespace {

constexpr int kTokens = 60;

LayerSpec spec_with_everything() { return with_everything(spec_of(96, 64, 16, 4), 48); }

// The bytes of one kind of tensor, of all experts.
struct Part {
  std::string name;
  struct Bytes {
    void* to;
    const void* from;
    std::size_t count;
  };
  std::vector<Bytes> bytes;

  void overwrite() const {
    for (const Bytes& b : bytes) std::memcpy(b.to, b.from, b.count);
  }
};

// Copies that turn the weights that `to` views into those of `from`, of the same shapes.
std::vector<Part> parts_of(const MoeWeights& to, const MoeWeights& from) {
  std::vector<Part> parts;
  const auto add = [&](const std::string& name, const void* a, const void* b, std::size_t count) {
    if (a == nullptr || count == 0) return;
    auto part = std::ranges::find(parts, name, &Part::name);
    if (part == parts.end()) part = parts.insert(parts.end(), {name, {}});
    part->bytes.push_back({const_cast<void*>(a), b, count});
  };
  const auto matrix = [&](const std::string& name, const MatrixView& a, const MatrixView& b) {
    ASSERT_EQ(a.row_stride, b.row_stride);
    add(name, a.data, b.data, static_cast<std::size_t>(a.rows * a.row_stride) * size_of(a.dtype));
    if (a.scale == nullptr) return;
    const std::int64_t rows = (a.rows + a.scale_rows - 1) / a.scale_rows;
    add(name + " scales", a.scale, b.scale,
        static_cast<std::size_t>(rows * a.scale_stride) * sizeof(float));
  };
  const auto vector = [&](const std::string& name, const VectorView& a, const VectorView& b) {
    if (a.empty()) return;
    ASSERT_EQ(a.stride, 1);
    add(name, a.data, b.data, static_cast<std::size_t>(a.size) * size_of(a.dtype));
  };
  const auto ffn = [&](const std::string& of, const FfnWeights& a, const FfnWeights& b) {
    matrix(of + "gate", a.gate, b.gate);
    matrix(of + "up", a.up, b.up);
    matrix(of + "down", a.down, b.down);
    vector(of + "gate_bias", a.gate_bias, b.gate_bias);
    vector(of + "up_bias", a.up_bias, b.up_bias);
    vector(of + "down_bias", a.down_bias, b.down_bias);
  };
  for (std::size_t e = 0; e < to.experts.size(); ++e) ffn("", to.experts[e], from.experts[e]);
  ffn("shared ", to.shared, from.shared);
  matrix("router", to.router, from.router);
  vector("router_bias", to.router_bias, from.router_bias);
  vector("correction_bias", to.correction_bias, from.correction_bias);
  vector("shared_gate", to.shared_gate, from.shared_gate);
  return parts;
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
      MoeLayer layer(world, spec_, weights, {.cpu = {.num_threads = 1}});
      forward_share(layer, batch_, shares, world.rank(), before);
      world.barrier();
      change(layer, world);
      world.barrier();
      forward_share(layer, batch_, shares, world.rank(), after);
    });
    return {std::move(before), std::move(after)};
  }
  MoeWeights weights(std::uint64_t seed) const {
    const DType dtype = std::get<1>(GetParam());
    return dtype == kFp8 ? fp8_weights(spec_, seed)
                         : generate_weights(spec_, dtype, seed, {.num_threads = 1});
  }
  // Only a router is ever copied: one that is not of the type in which the gate multiplies.
  static bool converts(const MatrixView& router) {
    const bool multiplies_bf16 = std::get<1>(GetParam()) == DType::kBF16 && cpu::has_native_bf16();
    return router.dtype != DType::kF32 && !(router.dtype == DType::kBF16 && multiplies_bf16);
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
                                                              DType::kBF16, kFp8)));

TEST_P(ChangedWeights, InPlaceAreSeenAfterRefresh) {
  const MoeWeights mine = weights(3), next = weights(7);
  const BatchResult expected[] = {fresh(mine), fresh(next)};
  const auto [before, after] = around(mine, [&](MoeLayer& layer, World& world) {
    if (world.rank() == 0) {
      for (const Part& part : parts_of(mine, next)) part.overwrite();
    }
    world.barrier();
    layer.refresh();
  });
  EXPECT_TRUE(before.output == expected[0].output);
  EXPECT_FALSE(expected[0].output == expected[1].output);
  EXPECT_TRUE(after.output == expected[1].output);
  EXPECT_EQ(after.ids, expected[1].ids);
  EXPECT_EQ(after.weights, expected[1].weights);
}

// Every tensor by itself: a layer sees its change at once, unless it says that it has copies, and
// after refresh() in any case.
TEST_P(ChangedWeights, InPlaceAreSeenTensorByTensor) {
  for (std::size_t i = 0;; ++i) {
    const MoeWeights mine = weights(3), next = weights(7);
    const std::vector<Part> parts = parts_of(mine, next);
    if (i == parts.size()) break;
    SCOPED_TRACE(parts[i].name);
    const BatchResult old = fresh(mine);
    for (const bool refreshes : {false, true}) {
      const MoeWeights changed = weights(3);
      const auto [before, after] = around(changed, [&](MoeLayer& layer, World& world) {
        if (world.rank() == 0) parts_of(changed, next)[i].overwrite();
        world.barrier();
        EXPECT_EQ(layer.copies(), converts(mine.router));
        if (refreshes) layer.refresh();
      });
      const BatchResult expected = fresh(changed);
      EXPECT_TRUE(before.output == old.output);
      EXPECT_FALSE(expected.output == old.output);
      const bool stale = converts(mine.router) && parts[i].name == "router" && !refreshes;
      EXPECT_EQ(after.output == expected.output, !stale);
    }
  }
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
  MoeLayer layer(World::single(), spec, mine, {.cpu = {.num_threads = 1}});
  BatchResult before = empty_result(spec, batch, 1, DType::kF32), after = before;
  const Shares shares = Shares::even(kTokens, 1);
  forward_share(layer, batch, shares, 0, before);
  LayerSpec other = spec;
  other.intermediate = 32;
  EXPECT_ERROR(layer.rebind(generate_weights(other, DType::kF32, 3, {})), kShapeMismatch,
               "experts[0].gate");
  EXPECT_ERROR(layer.rebind(generate_weights(spec, DType::kBF16, 3, {})), kDTypeMismatch,
               "router is bf16, and was f32");
  MoeWeights without = mine;
  without.router = {};
  EXPECT_ERROR(layer.rebind(without), kMissingTensor, "made with a router");
  MoeWeights half = generate_weights(spec, DType::kBF16, 3, {});
  half.router = mine.router;
  EXPECT_ERROR(layer.rebind(half), kDTypeMismatch, "computes in f32", "compute in bf16");
  int word = 0;
  EXPECT_ERROR(layer.refresh(&word), kInvalidArgument, "stream");
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
