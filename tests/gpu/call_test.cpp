// The forms in which a call may hand over its routing and take its output, on a GPU. Small and
// large passes are different kernels, hence two numbers of tokens everywhere.
#include <gtest/gtest.h>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/calls.h"
#include "support/device_batch.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

constexpr int kExperts = 16, kTopK = 4;

template <typename T>
gpu::DeviceBuffer uploaded(const std::vector<T>& values) {
  gpu::DeviceBuffer buffer(values.size() * sizeof(T));
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

class GpuCalls : public OnGpu<::testing::TestWithParam<int>> {
 protected:
  GpuCalls() : tokens_(GetParam()), spec_(spec_of(584, 360, kExperts, kTopK)) {
    const SyntheticRouting routing = synthetic_routing(tokens_, kExperts, kTopK, 0.8, 2);
    batch_.topk_ids = routing.ids;
    batch_.topk_weights = routing.weights;
  }

  int tokens_;
  LayerSpec spec_;
  MoeWeights weights_ = make_weights(spec_, DType::kBF16, 3);
  Batch batch_{Matrix::random(tokens_, spec_.hidden, DType::kBF16, 17), {}, {}, {}};
};
INSTANTIATE_TEST_SUITE_P(Tokens, GpuCalls, ::testing::Values(24, 300));

TEST_P(GpuCalls, IdsInI64AndWeightsInBf16) {
  const WideRouting wide(batch_);
  const gpu::DeviceBuffer ids = uploaded(wide.ids), weights = uploaded(wide.weights);
  DeviceLayer layer(spec_, weights_, tokens_);
  const BatchResult expected = layer.run(wide.rounded, DType::kBF16);
  expect_accurate(spec_, weights_, wide.rounded, expected);
  const BatchResult result =
      layer.run(batch_, DType::kBF16, [&](ForwardInput& input, ForwardOutput&, std::size_t) {
        input.topk_ids = {ids.data(), DType::kI64, wide.ids.size()};
        input.topk_weights = {weights.data(), DType::kBF16, wide.weights.size()};
      });
  EXPECT_EQ(result.ids, wide.rounded.topk_ids);
  EXPECT_EQ(result.weights, wide.rounded.topk_weights);
  EXPECT_TRUE(result.output == expected.output);
}

TEST_P(GpuCalls, LargeIdsAreNoneWhereAsked) {
  Sentinels sentinels(batch_, kExperts);
  DeviceLayer layer(spec_, weights_, tokens_, {.large_ids_are_none = true});
  const BatchResult expected = layer.run(sentinels.without, DType::kBF16);
  const BatchResult result = layer.run(sentinels.with, DType::kBF16);
  EXPECT_EQ(result.ids, sentinels.without.topk_ids);
  EXPECT_TRUE(result.output == expected.output);
  EXPECT_EQ(result.stats[0].bad_slots, 0);
  sentinels.with.topk_ids[kTopK * 7] = -2;
  EXPECT_ERROR(layer.run(sentinels.with, DType::kBF16), kInvalidArgument,
               "token 7 has expert id -2");
}

TEST_P(GpuCalls, BadIdsAreSkippedAndCountedWhereAsked) {
  BadRouting routing(batch_, kExperts, kTopK);
  DeviceLayer layer(spec_, weights_, tokens_, {.bad_ids = BadIds::kSkip});
  const BatchResult expected = layer.run(routing.good, DType::kBF16);
  EXPECT_EQ(expected.stats[0].bad_slots, 0);
  const BatchResult result = layer.run(routing.bad, DType::kBF16);
  EXPECT_EQ(result.ids, routing.good.topk_ids);
  EXPECT_TRUE(result.output == expected.output);
  EXPECT_EQ(result.stats[0].bad_slots, routing.count);
  layer.layer().check();
}

TEST_P(GpuCalls, IdleSlotsMayNameAnExpertOnceMore) {
  const IdleSlots slots(batch_, kTopK);
  DeviceLayer layer(spec_, weights_, tokens_);
  const BatchResult expected = layer.run(slots.without, DType::kBF16);
  const BatchResult result = layer.run(slots.given, DType::kBF16);
  EXPECT_EQ(result.ids, slots.without.topk_ids);
  EXPECT_TRUE(result.output == expected.output);
  EXPECT_EQ(result.stats[0].bad_slots, 0);
  layer.layer().check();
}

TEST_P(GpuCalls, IdsThatNoI32HoldsAreBad) {
  std::vector<std::int64_t> wide(batch_.topk_ids.begin(), batch_.topk_ids.end());
  wide[6] = (std::int64_t{1} << 32) + 3;  // whose lower half is an expert's
  const gpu::DeviceBuffer ids = uploaded(wide);
  const AdjustCall adjust = [&](ForwardInput& input, ForwardOutput&, std::size_t) {
    input.topk_ids = {ids.data(), DType::kI64, wide.size()};
  };
  DeviceLayer raises(spec_, weights_, tokens_);
  EXPECT_ERROR(raises.run(batch_, DType::kBF16, adjust), kInvalidArgument,
               "token 1 has expert id ");
  DeviceLayer skips(spec_, weights_, tokens_, {.bad_ids = BadIds::kSkip});
  const BatchResult result = skips.run(batch_, DType::kBF16, adjust);
  EXPECT_EQ(result.ids[6], kNoExpert);
  EXPECT_EQ(result.stats[0].bad_slots, 1);
}

TEST_P(GpuCalls, TokensOutsideTheHashTableAreSkippedWhereAsked) {
  spec_.routing.method = RoutingMethod::kHash;
  weights_ = make_weights(spec_, DType::kBF16, 3);
  Batch batch = random_batch(spec_, tokens_, DType::kBF16, 4);
  DeviceLayer layer(spec_, weights_, tokens_, {.bad_ids = BadIds::kSkip});
  const BatchResult good = layer.run(batch, DType::kBF16);
  batch.token_ids[7] = -5;
  const BatchResult result = layer.run(batch, DType::kBF16);
  EXPECT_EQ(result.stats[0].bad_slots, kTopK);
  for (std::size_t i = 0; i < result.ids.size(); ++i) {
    EXPECT_EQ(result.ids[i], i / kTopK == 7 ? kNoExpert : good.ids[i]);
  }
}

// The layer's routing of given logits: what it makes of them the host's routing makes, too.
TEST_P(GpuCalls, LogitsAreRoutedAsTheLayerRoutes) {
  const LayerSpec grouped = grouped_routing(spec_);
  LayerSpec shared = spec_;
  shared.shared_intermediate = 48;
  shared.shared_sigmoid_gate = true;
  LayerSpec many = spec_;
  many.num_experts = 300;
  for (const LayerSpec& spec : {spec_, grouped, shared, many}) {
    MoeWeights weights = make_weights(spec, DType::kBF16, 3);
    weights.router = {};
    weights.router_bias = {};
    Batch batch = random_batch(spec, tokens_, DType::kBF16, 4);
    DeviceLayer layer(spec, weights, tokens_);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      // Rows further apart than they are long.
      const std::int64_t stride = spec.num_experts + 5;
      const Matrix logits = Matrix::random(tokens_, stride, dtype, 9);
      gpu::DeviceBuffer memory(static_cast<std::size_t>(tokens_ * stride) * size_of(dtype));
      memory.upload(logits.view().data, memory.bytes());
      const BatchResult result =
          layer.run(batch, DType::kBF16, [&](ForwardInput& input, ForwardOutput&, std::size_t) {
            input.logits = {memory.data(), dtype, tokens_, spec.num_experts, stride};
          });
      std::vector<float> values, bias;
      for (std::int64_t t = 0; t < tokens_; ++t) {
        for (int e = 0; e < spec.num_experts; ++e) values.push_back(logits.get(t * stride + e));
      }
      if (spec.routing.has_correction_bias) {
        ASSERT_EQ(weights.correction_bias.dtype, DType::kF32);
        const auto* const given = static_cast<const float*>(weights.correction_bias.data);
        bias.assign(given, given + spec.num_experts);
      }
      std::vector<std::int32_t> ids(result.ids.size());
      std::vector<float> expected(result.ids.size());
      route(spec, values, bias, {}, ids, expected);
      EXPECT_EQ(result.ids, ids);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(result.weights[i], expected[i], 1e-5f);
      }
      expect_accurate(spec, weights, batch, result);
    }
  }
}

TEST_P(GpuCalls, OutputsAreScaledAndAdded) {
  spec_.shared_intermediate = 48;
  weights_ = make_weights(spec_, DType::kBF16, 3);
  DeviceLayer layer(spec_, weights_, tokens_);
  const BatchResult plain = layer.run(batch_, DType::kF32);
  const BatchResult scaled =
      layer.run(batch_, DType::kF32,
                [](ForwardInput&, ForwardOutput& output, std::size_t) { output.scale = -2; });
  for (std::int64_t i = 0; i < tokens_ * spec_.hidden; ++i) {
    ASSERT_EQ(scaled.output.get(i), -2 * plain.output.get(i)) << i;
  }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Matrix before = Matrix::random(tokens_, spec_.hidden, dtype, 31);
    const BatchResult added =
        layer.run(batch_, dtype, [&](ForwardInput&, ForwardOutput& output, std::size_t) {
          layer.stream().synchronize();  // what poisons the output has done so
          gpu::copy_memory(output.data, before.view().data,
                           static_cast<std::size_t>(tokens_ * spec_.hidden) * size_of(dtype));
          output.scale = 0.5f;
          output.accumulate = true;
        });
    expect_half_added(added.output, before, plain.output);
  }
}

}  // namespace
}  // namespace switchyard::testing
