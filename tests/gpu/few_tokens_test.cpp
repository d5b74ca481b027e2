// Passes of few tokens with the routing given, which have a kernel of their own, and those of a few
// more, which have not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/kernel_types.h"
#include "support/layers.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

constexpr int kMostTokens = 9;  // one more than the kernel has columns for

Batch given_batch(const LayerSpec& spec, int tokens, std::uint64_t seed, bool with_empty = false) {
  SyntheticRouting routing = synthetic_routing(tokens, spec.num_experts, spec.top_k, 0.9, seed);
  if (with_empty) {
    for (std::size_t i = seed % 3; i < routing.ids.size(); i += 3) {
      routing.ids[i] = kNoExpert;
    }
  }
  return {Matrix::random(tokens, spec.hidden, DType::kBF16, seed),
          std::move(routing.ids),
          std::move(routing.weights),
          {}};
}

void expect_counted(const LayerSpec& spec, const Batch& batch, const BatchResult& result) {
  EXPECT_TRUE(counts_rows_of(spec, batch, result.stats[0]));
  EXPECT_EQ(result.stats[0].tokens, static_cast<std::uint64_t>(batch.x.rows()));
}

void expect_accurate_everywhere(const LayerSpec& spec, DType type, bool with_empty = false) {
  const bool fp8 = type == kFp8;
  const MoeWeights w = weights_in(spec, type);
  DeviceLayer layer(spec, w, kMostTokens);
  double distances = 0;
  for (int tokens = 1; tokens <= kMostTokens; ++tokens) {
    SCOPED_TRACE(::testing::Message() << "H " << spec.hidden << " I " << spec.intermediate
                                      << " top-" << spec.top_k << " T " << tokens);
    const Batch batch = given_batch(spec, tokens, 20 + static_cast<std::uint64_t>(tokens),
                                    with_empty && tokens > 1);
    const BatchResult result = layer.run(batch, DType::kBF16);
    if (fp8) {
      // One code that rounds the other way is much of the distance of so few tokens; not of all.
      distances += expect_accurate_fp8(spec, w, batch, result, 2);
    } else {
      expect_accurate(spec, w, batch, result);
    }
    expect_counted(spec, batch, result);
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == result.output) << "repeated";
  }
  if (spec.intermediate >= 128) {
    EXPECT_LE(distances / kMostTokens, 0.8);  // as in fp8_test.cpp
  }
}

class GpuFewTokens : public OnGpu<::testing::TestWithParam<DType>> {
 protected:
  static LayerSpec spec(int hidden, int intermediate, int num_experts, int top_k) {
    return spec_for(GetParam(), hidden, intermediate, num_experts, top_k);
  }
};
INSTANTIATE_TEST_SUITE_P(Types, GpuFewTokens, ::testing::ValuesIn(compiled_types()), name_of_type);

TEST_P(GpuFewTokens, EveryShape) {
  for (const int top_k : {1, 2, 8}) {
    for (const auto& [hidden, intermediate] :
         {std::pair{16, 16}, {200, 24}, {584, 360}, {72, 2056}, {2048, 136}, {1032, 128}}) {
      expect_accurate_everywhere(spec(hidden, intermediate, 12, top_k), GetParam());
    }
  }
}

// In the sanitizer's list.
TEST_P(GpuFewTokens, SanitizeOddShape) {
  LayerSpec odd = spec(208, 48, 5, 2);
  odd.expert_bias = true;
  expect_accurate_everywhere(odd, GetParam(), true);
}

TEST_P(GpuFewTokens, EveryActivationWithBiases) {
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::kSitu); ++kind) {
    for (const bool gated : {true, false}) {
      if (!gated && kind == static_cast<int>(ActivationKind::kSitu)) continue;
      LayerSpec any = spec(320, 208, 6, 2);
      any.activation.kind = static_cast<ActivationKind>(kind);
      any.activation.gated = gated;
      any.expert_bias = true;
      SCOPED_TRACE(::testing::Message() << "kind " << kind << " gated " << gated);
      expect_accurate_everywhere(any, GetParam());
    }
  }
  LayerSpec clamped = spec(320, 208, 6, 2);
  clamped.activation.alpha = 1.702f;
  clamped.activation.limit = 1;
  clamped.activation.up_bias = 1;
  expect_accurate_everywhere(clamped, GetParam());
  clamped.activation.kind = ActivationKind::kSitu;
  clamped.activation.alpha = 0.7f;
  expect_accurate_everywhere(clamped, GetParam());
}

TEST_P(GpuFewTokens, EmptySlots) {
  const LayerSpec spec = GpuFewTokens::spec(320, 272, 16, 4);
  expect_accurate_everywhere(spec, GetParam(), true);
  DeviceLayer layer(spec, weights_in(spec, GetParam()), 8);
  for (const int tokens : {1, 8}) {
    Batch none = given_batch(spec, tokens, 1);
    for (std::int32_t& id : none.topk_ids) id = kNoExpert;
    for (const float y : layer.run(none, DType::kBF16).output.floats()) ASSERT_EQ(y, 0);
  }
}

TEST_P(GpuFewTokens, ScalesTheOutputAndRefusesBadIds) {
  const LayerSpec spec = GpuFewTokens::spec(320, 272, 16, 4);
  DeviceLayer layer(spec, weights_in(spec, GetParam()), 8);
  Batch batch = given_batch(spec, 3, 1);
  const std::vector<float> once = layer.run(batch, DType::kBF16).output.floats();
  const std::vector<float> twice =
      layer
          .run(batch, DType::kBF16,
               [](ForwardInput&, ForwardOutput& output, std::size_t) { output.scale = 2; })
          .output.floats();
  for (std::size_t i = 0; i < once.size(); ++i) ASSERT_EQ(twice[i], 2 * once[i]);
  batch.topk_ids[4 * 2 + 1] = batch.topk_ids[4 * 2];
  layer.load(batch, DType::kBF16);
  layer.enqueue();
  layer.stream().synchronize();
  EXPECT_ERROR(layer.layer().check(), kInvalidArgument, "token 2 names expert");
  EXPECT_EQ(layer.layer().stats().bad_slots, 1);
}

// What is not finite stays with its token.
TEST_P(GpuFewTokens, PoisonStays) {
  const LayerSpec spec = GpuFewTokens::spec(320, 272, 8, 4);
  DeviceLayer layer(spec, weights_in(spec, GetParam()), 8);
  Batch batch = given_batch(spec, 8, 1);
  const std::vector<float> clean = layer.run(batch, DType::kBF16).output.floats();
  batch.x.set(1 * spec.hidden + 3, NAN);
  batch.x.set(4 * spec.hidden + 130, INFINITY);
  batch.x.set(7 * spec.hidden + 319, -INFINITY);
  const std::vector<float> poisoned = layer.run(batch, DType::kBF16).output.floats();
  for (std::size_t i = 0; i < clean.size(); ++i) {
    const std::size_t token = i / static_cast<std::size_t>(spec.hidden);
    if (token == 1 || token == 4 || token == 7) {
      ASSERT_FALSE(std::isfinite(poisoned[i])) << i;
    } else {
      ASSERT_EQ(poisoned[i], clean[i]) << i;
    }
  }
}

using GpuFewTokensInFp8 = OnGpu<::testing::Test>;

// What weights are multiplied by may change between passes.
TEST_F(GpuFewTokensInFp8, SeeRefreshedScales) {
  const LayerSpec spec = spec_of(320, 272, 8, 2);
  const MoeWeights w = fp8_weights(spec);
  const Rescaled other(w, 128, 128, 2);
  const Batch batch = given_batch(spec, 2, 1);
  const BatchResult expected = DeviceLayer(spec, other.get(), 2).run(batch, DType::kBF16);
  MoeWeights changing = w;
  changing.owner.reset();  // a layer lets go of what it has copied
  std::deque<std::vector<float>> scales;
  std::vector<const float*> next;
  for_each_matrix(changing, [&](MatrixView& m) {
    const auto count = static_cast<std::size_t>((m.rows + 127) / 128 * m.scale_stride);
    m.scale = scales.emplace_back(m.f32_scale(), m.f32_scale() + count).data();
  });
  MoeWeights targets = other.get();
  for_each_matrix(targets, [&](MatrixView& m) { next.push_back(m.f32_scale()); });
  DeviceLayer layer(spec, changing, 2);
  EXPECT_FALSE(layer.run(batch, DType::kBF16).output == expected.output);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    std::copy_n(next[i], scales[i].size(), scales[i].begin());
  }
  layer.layer().refresh(layer.stream().handle());
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
}

// Passes of few and of many tokens, of two layers of different shapes in one memory, in one graph
// that is replayed with other activations.
TEST_P(GpuFewTokens, TakeTurnsWithLargePassesInGraphs) {
  const DType type = GetParam(), compute = is_four_bit(type) ? DType::kBF16 : type;
  const std::vector<LayerSpec> specs = {spec_of(512, 256, 24, 4), spec_of(256, 768, 12, 8)};
  const std::vector<MoeWeights> weights = {make_weights(specs[0], type, 3),
                                           make_weights(specs[1], type, 4)};
  const Workspace workspace(DeviceLayer::world(), specs,
                            {.backend = Backend::kCuda, .max_tokens = 64, .compute = compute});
  std::vector<std::unique_ptr<DeviceLayer>> layers;
  for (std::size_t l = 0; l < 2; ++l) {
    layers.push_back(std::make_unique<DeviceLayer>(
        specs[l], weights[l], 64, LayerOptions{.workspace = &workspace, .compute = compute}));
  }
  struct Pass {
    std::size_t layer;
    int tokens;
  };
  constexpr Pass kPasses[] = {{0, 1}, {1, 1}, {0, 8}, {1, 40}, {0, 3}, {0, 64}, {1, 8}, {1, 1}};
  constexpr std::size_t kCount = std::size(kPasses), kInputs = 3;
  std::vector<std::unique_ptr<DeviceBatch>> batches;
  std::vector<std::vector<Batch>> inputs(kInputs);
  std::vector<std::vector<BatchResult>> expected(kInputs);
  for (std::size_t i = 0; i < kInputs; ++i) {
    for (std::size_t n = 0; n < kCount; ++n) {
      const LayerSpec& spec = specs[kPasses[n].layer];
      Batch batch = given_batch(spec, kPasses[n].tokens, 7);
      batch.x = Matrix::random(kPasses[n].tokens, spec.hidden, DType::kBF16, 10 * i + n);
      expected[i].push_back(layers[kPasses[n].layer]->run(batch, DType::kBF16));
      inputs[i].push_back(std::move(batch));
    }
  }
  for (std::size_t n = 0; n < kCount; ++n) {
    batches.push_back(
        std::make_unique<DeviceBatch>(specs[kPasses[n].layer], inputs[0][n], DType::kBF16));
  }
  const gpu::Stream& stream = layers[0]->stream();
  gpu::Graph graph = gpu::Graph::capture(stream, [&] {
    for (std::size_t n = 0; n < kCount; ++n) {
      batches[n]->enqueue(layers[kPasses[n].layer]->layer(), stream);
    }
  });
  EXPECT_EQ(graph.num_kernel_nodes(), static_cast<int>(kCount));
  for (int replay = 0; replay < 1000; ++replay) {
    const std::size_t i = static_cast<std::size_t>(replay) % kInputs;
    for (std::size_t n = 0; n < kCount; ++n) {
      batches[n]->replace_activations(inputs[i][n]);
      batches[n]->poison(stream);
    }
    graph.launch(stream);
    stream.synchronize();
    for (std::size_t n = 0; n < kCount; ++n) {
      ASSERT_TRUE(batches[n]->fetch().output == expected[i][n].output)
          << "replay " << replay << ", pass " << n;
    }
  }
  EXPECT_EQ(layers[1]->layer().stats().epoch, (kInputs + 1000) * kCount);
}

}  // namespace
}  // namespace switchyard::testing
