// The GPU engine's output against the fp64 reference: the CPU engine's matrix, and what only a GPU
// has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "gpu/device.h"
#include "layer/engine.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/layers.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

using GpuTest = OnGpu<::testing::Test>;

using EveryModelOnGpu = OnGpu<::testing::TestWithParam<ModelEntry>>;

TEST_P(EveryModelOnGpu, IsAsGoodAsAStraightforwardProgram) {
  const LayerSpec spec = small_spec(GetParam());
  const MoeWeights w = make_weights(spec, DType::kBF16, 11);
  DeviceLayer layer(spec, w, 1000);
  expect_good_at_every_size(layer, w, 1, [&](const Batch& batch, const BatchResult& result) {
    expect_accurate(spec, w, batch, result);
  });
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelOnGpu, ::testing::ValuesIn(model_table()),
                         name_of_model);

// Larger than a tile in every direction, ragged in every direction.
LayerSpec wide_spec(int experts, int top_k) { return spec_of(584, 360, experts, top_k); }

void expect_accurate_with_given(const LayerSpec& spec, const SyntheticRouting& routing,
                                std::int64_t tokens) {
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  const Batch batch{
      Matrix::random(tokens, spec.hidden, DType::kBF16, 17), routing.ids, routing.weights, {}};
  DeviceLayer layer(spec, w, static_cast<int>(tokens));
  const BatchResult result = layer.run(batch, DType::kBF16);
  EXPECT_EQ(result.ids, routing.ids);
  expect_accurate(spec, w, batch, result);
}

using GpuRouting = GpuTest;

TEST_F(GpuRouting, EverySkewAndTileHeight) {
  for (const int top_k : {1, 2, 8, 16}) {
    for (const double beta : {1.0, 0.8, 0.5, 0.1}) {
      for (const int tokens : {5, 300, 1500}) {
        SCOPED_TRACE(::testing::Message()
                     << "top-" << top_k << " beta " << beta << " T " << tokens);
        const LayerSpec spec = wide_spec(24, top_k);
        expect_accurate_with_given(spec, synthetic_routing(tokens, 24, top_k, beta, 9), tokens);
      }
    }
  }
}

TEST_F(GpuRouting, EveryRowCountOfOneExpert) {
  const LayerSpec spec = wide_spec(3, 1);
  for (int tokens = 1; tokens <= 600; tokens += tokens < 40 ? 1 : 13) {
    SCOPED_TRACE(tokens);
    const auto n = static_cast<std::size_t>(tokens);
    expect_accurate_with_given(
        spec, {std::vector<std::int32_t>(n, 1), std::vector<float>(n, 0.75f)}, tokens);
  }
}

// With many tokens, tiles in bands; with few, the second GEMM split over K.
TEST_F(GpuRouting, DeepExperts) {
  LayerSpec spec = spec_of(72, 2056, 3, 1);
  spec.expert_bias = true;
  for (const int shared : {0, 2100}) {
    spec.shared_intermediate = shared;
    for (const int tokens : {1, 7, 31, 600, 2900}) {
      SCOPED_TRACE(::testing::Message() << "shared " << shared << " T " << tokens);
      expect_accurate_with_given(spec, synthetic_routing(tokens, 3, 1, 0.8, 9), tokens);
    }
  }
}

// One stage for either GEMM, and for one of them.
TEST_F(GpuRouting, ShallowExperts) {
  for (const auto& [hidden, intermediate] : {std::pair{16, 24}, {16, 200}, {200, 24}}) {
    const LayerSpec spec = spec_of(hidden, intermediate, 16, 4);
    const MoeWeights w = make_weights(spec, DType::kBF16);
    for (const int tokens : {3, 40, 900}) {
      SCOPED_TRACE(::testing::Message()
                   << "H " << hidden << " I " << intermediate << " T " << tokens);
      const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
      expect_accurate(spec, w, batch, DeviceLayer(spec, w, tokens).run(batch, DType::kBF16));
    }
  }
}

TEST_F(GpuRouting, EmptySlotsContributeNothing) {
  const LayerSpec spec = wide_spec(16, 4);
  for (const int tokens : {20, 290, 500}) {
    SyntheticRouting routing = synthetic_routing(tokens, 16, 4, 1.0, 2);
    for (std::size_t i = 0; i < routing.ids.size(); i += 3) routing.ids[i] = kNoExpert;
    for (std::size_t i = 0; i < 8; ++i) routing.ids[i] = kNoExpert;  // tokens without any expert
    expect_accurate_with_given(spec, routing, tokens);
  }
}

// Whatever weight it is given.
TEST_F(GpuRouting, AnEmptySlotsWeightIsNotRead) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {20, 290}) {
    SyntheticRouting routing = synthetic_routing(tokens, 16, 4, 1.0, 2);
    for (std::size_t i = 0; i < routing.ids.size(); i += 3) {
      routing.ids[i] = kNoExpert;
      routing.weights[i] = 0;
    }
    Batch batch{
        Matrix::random(tokens, spec.hidden, DType::kBF16, 17), routing.ids, routing.weights, {}};
    DeviceLayer layer(spec, w, tokens);
    const BatchResult expected = layer.run(batch, DType::kBF16);
    for (std::size_t i = 0; i < batch.topk_ids.size(); i += 3) batch.topk_weights[i] = NAN;
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output) << tokens;
  }
}

// In small passes and large ones, whose tokens many blocks route.
TEST_F(GpuRouting, TokensWithNanLogitsAreCounted) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {20, 290}) {
    Batch batch = random_batch(spec, tokens, DType::kBF16, 6);
    DeviceLayer layer(spec, w, tokens);
    EXPECT_EQ(layer.run(batch, DType::kBF16).stats[0].nan_tokens, 0);
    for (const int token : {3, 7, 19}) batch.x.set(token * spec.hidden + 5, NAN);
    const BatchResult result = layer.run(batch, DType::kBF16);
    EXPECT_EQ(result.stats[0].nan_tokens, 3) << tokens;
    EXPECT_EQ(result.stats[0].nan_logits, 3 * 16) << tokens;
    for (std::size_t k = 0; k < 4; ++k) EXPECT_EQ(result.ids[7 * 4 + k], kNoExpert);
    EXPECT_EQ(
        layer.run(random_batch(spec, tokens, DType::kBF16, 6), DType::kBF16).stats[0].nan_tokens,
        0);
  }
}

TEST_F(GpuRouting, NoTokensAtAll) {
  const LayerSpec spec = wide_spec(16, 4);
  DeviceLayer layer(spec, make_weights(spec, DType::kBF16, 3), 8);
  const BatchResult result =
      layer.run({Matrix(0, spec.hidden, DType::kBF16), {}, {}, {}}, DType::kBF16);
  EXPECT_EQ(std::accumulate(result.stats[0].tokens_per_expert.begin(),
                            result.stats[0].tokens_per_expert.end(), std::int64_t{0}),
            0);
}

TEST_F(GpuRouting, ABadIdIsAnErrorAndTheLayerLives) {
  const LayerSpec spec = wide_spec(16, 4);
  DeviceLayer layer(spec, make_weights(spec, DType::kBF16, 3), 64);
  SyntheticRouting routing = synthetic_routing(64, 16, 4, 1.0, 2);
  const Batch good{
      Matrix::random(64, spec.hidden, DType::kBF16, 1), routing.ids, routing.weights, {}};
  Batch bad = good;
  bad.topk_ids[77] = 16;
  EXPECT_ERROR(layer.run(bad, DType::kBF16), kInvalidArgument,
               "token 19 has expert id 16; expert ids are 0 to 15, or -1 for none");
  const BatchResult result = layer.run(good, DType::kBF16);
  EXPECT_EQ(result.ids, good.topk_ids);
}

TEST_F(GpuRouting, ATokenIdOutsideTheTableIsAnError) {
  LayerSpec spec = wide_spec(16, 4);
  spec.routing.method = RoutingMethod::kHash;
  DeviceLayer layer(spec, make_weights(spec, DType::kBF16, 3), 40);
  Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  batch.token_ids[7] = -5;
  EXPECT_ERROR(layer.run(batch, DType::kBF16), kInvalidArgument,
               "token id -5 of token 7 is outside the routing table's vocabulary of ");
}

// As often as there are tokens, so that it would have more rows than an expert can.
TEST_F(GpuRouting, AnExpertNamedTwiceIsAnErrorAndHasTheTokenOnce) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {24, 300}) {
    SyntheticRouting routing = synthetic_routing(tokens, 16, 4, 1.0, 2);
    const Batch once_each{
        Matrix::random(tokens, spec.hidden, DType::kBF16, 1), routing.ids, routing.weights, {}};
    Batch twice = once_each, once = once_each;
    for (std::size_t i = 0; i < routing.ids.size(); ++i) {
      twice.topk_ids[i] = 15;
      once.topk_ids[i] = i % 4 == 0 ? 15 : kNoExpert;
    }
    DeviceLayer layer(spec, w, tokens);
    const BatchResult expected = layer.run(once, DType::kBF16);
    layer.load(twice, DType::kBF16);
    layer.poison();
    layer.enqueue();
    layer.stream().synchronize();
    EXPECT_ERROR(layer.layer().check(), kInvalidArgument, "names expert 15 twice");
    layer.layer().check();  // said once
    const BatchResult result = layer.fetch();
    EXPECT_EQ(result.ids, expected.ids) << tokens;
    EXPECT_TRUE(result.output == expected.output) << tokens;
  }
}

TEST_F(GpuRouting, BeforeTheFirstPassThereIsNothing) {
  const LayerOptions options{.diagnostics = {.trace = true}};
  const LayerSpec spec = wide_spec(16, 4);
  DeviceLayer layer(spec, make_weights(spec, DType::kBF16, 3), 8, options);
  EXPECT_EQ(layer.layer().stats().epoch, 0u);
  EXPECT_THAT(layer.layer().stats().tokens_per_expert, ::testing::Each(0));
  EXPECT_TRUE(layer.layer().trace().events.empty());
}

using GpuWeights = GpuTest;

TEST_F(GpuWeights, ATableOfTokenIdsMayBeOnTheDevice) {
  LayerSpec spec = wide_spec(16, 4);
  spec.routing.method = RoutingMethod::kHash;
  MoeWeights w = make_weights(spec, DType::kBF16, 3);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  const BatchResult expected = DeviceLayer(spec, w, 40).run(batch, DType::kBF16);
  const auto* const host = static_cast<const std::int64_t*>(w.hash_table.data);
  const auto entries = static_cast<std::size_t>(w.hash_table.rows * w.hash_table.cols);
  std::vector<std::int64_t> table(host, host + entries);
  gpu::DeviceBuffer memory(entries * sizeof(std::int64_t));
  memory.upload(table.data(), memory.bytes());
  w.hash_table.data = memory.data();
  EXPECT_TRUE(DeviceLayer(spec, w, 40).run(batch, DType::kBF16).output == expected.output);
  table[4 * 7 + 2] = table[4 * 7];
  w.hash_table.data = table.data();
  EXPECT_ERROR(DeviceLayer(spec, w, 40), kInvalidArgument, "twice for token id 7");
}

// The experts' matrices as two arrays in device memory, and views of them. `reversed` puts the last
// expert first.
struct WeightsOnDevice {
  WeightsOnDevice(const LayerSpec& spec, const MoeWeights& host, bool reversed) : views(host) {
    const auto bytes = static_cast<std::size_t>(spec.hidden) *
                       static_cast<std::size_t>(spec.intermediate) * sizeof(std::uint16_t);
    const std::size_t num_experts = host.experts.size();
    std::vector<std::byte> array(3 * num_experts * bytes);
    memory = gpu::DeviceBuffer(array.size());
    const auto move = [&](MatrixView& view, std::size_t place) {
      std::memcpy(array.data() + place * bytes, view.data, bytes);
      view.data = memory.data() + place * bytes;
    };
    for (std::size_t e = 0; e < num_experts; ++e) {
      const std::size_t place = reversed ? num_experts - 1 - e : e;
      move(views.experts[e].gate, 2 * place);
      move(views.experts[e].up, 2 * place + 1);
      move(views.experts[e].down, 2 * num_experts + place);
    }
    memory.upload(array.data(), array.size());
  }

  gpu::DeviceBuffer memory;
  MoeWeights views;
};

TEST_F(GpuWeights, OneArrayOnTheDeviceIsUsedWhereItIs) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights host = make_weights(spec, DType::kBF16, 3);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  const BatchResult expected = DeviceLayer(spec, host, 40).run(batch, DType::kBF16);
  for (const bool reversed : {false, true}) {
    SCOPED_TRACE(reversed ? "copied: experts in another order" : "used in place");
    WeightsOnDevice device(spec, host, reversed);
    DeviceLayer layer(spec, device.views, 40);
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
    device.memory.fill(0, layer.stream());
    const BatchResult after = layer.run(batch, DType::kBF16);
    if (reversed) {
      EXPECT_TRUE(after.output == expected.output);
    } else {
      const auto* const y = static_cast<const std::uint16_t*>(after.output.view().data);
      EXPECT_TRUE(std::all_of(y, y + 40 * spec.hidden, [](auto code) { return code << 1 == 0; }));
    }
  }
}

TEST_F(GpuWeights, OfAnotherTypeOnTheDeviceAreConverted) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights host = make_weights(spec, DType::kF16, 3);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  const BatchResult expected = DeviceLayer(spec, host, 40).run(batch, DType::kBF16);
  WeightsOnDevice device(spec, host, false);
  DeviceLayer layer(spec, device.views, 40);
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
  MatrixView& up = device.views.experts[3].up;
  up.data = up.row(up.rows - 1);
  up.row_stride = -up.row_stride;
  MoeWeights reversed = host;
  MatrixView& host_up = reversed.experts[3].up;
  host_up.data = host_up.row(host_up.rows - 1);
  host_up.row_stride = -host_up.row_stride;
  const BatchResult other = DeviceLayer(spec, reversed, 40).run(batch, DType::kBF16);
  EXPECT_FALSE(other.output == expected.output);
  EXPECT_TRUE(DeviceLayer(spec, device.views, 40).run(batch, DType::kBF16).output == other.output);
}

TEST_F(GpuWeights, OfAnotherDeviceAreCopied) {
  if (gpu::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights host = make_weights(spec, DType::kBF16, 3);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  const int here = gpu::current_device();
  gpu::set_device(here == 0 ? 1 : 0);
  std::optional<WeightsOnDevice> elsewhere(std::in_place, spec, host, false);
  gpu::set_device(here);
  const BatchResult expected = DeviceLayer(spec, host, 40).run(batch, DType::kBF16);
  DeviceLayer layer(spec, elsewhere->views, 40);
  elsewhere.reset();
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
}

using GpuMemory = GpuTest;

// The passes of two layers take turns in the same memory, in a graph and without.
TEST_F(GpuMemory, LayersOfAModelShareIt) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w[] = {make_weights(spec, DType::kBF16, 3), make_weights(spec, DType::kBF16, 4)};
  for (const int tokens : {3, 40, 290}) {
    SCOPED_TRACE(tokens);
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    const BatchResult expected[] = {DeviceLayer(spec, w[0], 300).run(batch, DType::kBF16),
                                    DeviceLayer(spec, w[1], 300).run(batch, DType::kBF16)};
    const Workspace workspace(DeviceLayer::world(), spec,
                              {.backend = Backend::kCuda, .max_tokens = 300});
    std::optional<DeviceLayer> first(std::in_place, spec, w[0], 300,
                                     LayerOptions{.workspace = &workspace});
    DeviceLayer second(spec, w[1], 300, {.workspace = &workspace});
    EXPECT_EQ(second.layer().workspace_bytes(), first->layer().workspace_bytes());
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(first->run(batch, DType::kBF16).output == expected[0].output);
      EXPECT_TRUE(second.run(batch, DType::kBF16).output == expected[1].output);
    }
    gpu::Graph graph = gpu::Graph::capture(first->stream(), [&] { first->enqueue(); });
    for (int i = 0; i < 3; ++i) {
      graph.launch(first->stream());
      EXPECT_TRUE(first->fetch().output == expected[0].output);
      EXPECT_TRUE(second.run(batch, DType::kBF16).output == expected[1].output);
    }
    EXPECT_EQ(second.layer().stats().epoch, 12u);
    first.reset();
    EXPECT_TRUE(second.run(batch, DType::kBF16).output == expected[1].output);
  }
}

TEST_F(GpuMemory, LayersThatNeedMoreDoNotShareIt) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  const Workspace workspace(DeviceLayer::world(), spec,
                            {.backend = Backend::kCuda, .max_tokens = 300});
  const LayerOptions shared{.workspace = &workspace};
  EXPECT_ERROR(DeviceLayer(spec, w, 301, shared), kInvalidArgument, "does not fit");
  LayerSpec more = spec;
  more.top_k = 5;
  EXPECT_ERROR(DeviceLayer(more, make_weights(more, DType::kBF16, 3), 300, shared),
               kInvalidArgument, "does not fit");
  LayerOptions other_world = shared;
  other_world.backend = Backend::kCuda;
  other_world.max_tokens = 300;
  EXPECT_ERROR(MoeLayer(World::single(), spec, w, other_world), kInvalidArgument, "another world");
  const Workspace on_cpu(DeviceLayer::world(), spec, {.num_threads = 1});
  EXPECT_ERROR(DeviceLayer(spec, w, 300, {.workspace = &on_cpu}), kInvalidArgument,
               "of the cpu backend");
}

using GpuTypes = GpuTest;

TEST_F(GpuTypes, ActivationsAndOutputsOfEveryType) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const DType in : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const int tokens : {3, 130}) {
        SCOPED_TRACE(::testing::Message() << to_string(in) << " to " << to_string(out));
        DeviceLayer layer(spec, w, tokens);
        const Batch batch = random_batch(spec, tokens, in, 4);
        expect_accurate(spec, w, batch, layer.run(batch, out));
      }
    }
  }
}

// As of one row that is expanded to many, without and with a tensor map over them.
TEST_F(GpuTypes, RowsMayOverlap) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {3, 130, 500}) {
    Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    const std::size_t row_bytes = static_cast<std::size_t>(spec.hidden) * 2;
    for (int t = 1; t < tokens; ++t) std::memcpy(batch.x.row(t), batch.x.row(0), row_bytes);
    DeviceLayer layer(spec, w, tokens);
    const BatchResult expected = layer.run(batch, DType::kBF16);
    layer.load(batch, DType::kBF16);
    layer.set_row_stride(0);
    layer.poison();
    layer.enqueue();
    EXPECT_TRUE(layer.fetch().output == expected.output) << tokens;
    layer.set_row_stride(-spec.hidden);
    EXPECT_THROW(layer.enqueue(), Error) << tokens;
  }
}

TEST_F(GpuTypes, WeightsOfEveryType) {
  const LayerSpec spec = wide_spec(16, 4);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kF8E4M3}) {
    const MoeWeights w = make_weights(spec, dtype, 3);
    DeviceLayer layer(spec, w, 130, {.compute = DType::kBF16});
    const Batch batch = random_batch(spec, 130, DType::kBF16, 4);
    expect_accurate(spec, w, batch, layer.run(batch, DType::kBF16));
  }
}

using GpuOptions = GpuTest;

TEST_F(GpuOptions, FewerMultiprocessorsGiveTheSameBits) {
  LayerSpec spec = wide_spec(16, 4);
  spec.shared_intermediate = 200;
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  const int num_sms = gpu::device_info(gpu::current_device()).num_sms;
  for (const int tokens : {3, 200, 450}) {
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    const BatchResult all = DeviceLayer(spec, w, tokens).run(batch, DType::kBF16);
    expect_accurate(spec, w, batch, all);
    for (const int reserved : {1, 17, num_sms - 1}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << reserved << " reserved");
      const BatchResult fewer =
          DeviceLayer(spec, w, tokens,
                      {.cuda = {.reserved_sms = reserved, .cooperative_launch = reserved != 17}})
              .run(batch, DType::kBF16);
      EXPECT_EQ(fewer.ids, all.ids);
      EXPECT_TRUE(fewer.weights == all.weights);
      EXPECT_TRUE(fewer.output == all.output);
    }
  }
}

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::kSystem;
}

// There are 64 tiles, and slots for a few, to which a warp's rows all go.
TEST_F(GpuOptions, OneMultiprocessorPacksMoreTilesThanItHasSlots) {
  const LayerSpec spec = wide_spec(64, 1);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  Batch batch = random_batch(spec, 64, DType::kBF16, 4);
  for (int t = 0; t < 64; ++t) batch.topk_ids.push_back(t);
  batch.topk_weights.assign(64, 0.5f);
  const BatchResult expected = DeviceLayer(spec, w, 64).run(batch, DType::kBF16);
  DeviceLayer layer(
      spec, w, 64, {.cuda = {.reserved_sms = gpu::device_info(gpu::current_device()).num_sms - 1}});
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
}

TEST_F(GpuOptions, WhatItDoesNotDoIsRefused) {
  const auto build = [](const LayerSpec& spec, LayerOptions options = {}) {
    return code_of([&] { DeviceLayer(spec, make_weights(spec, DType::kBF16, 3), 8, options); });
  };
  LayerSpec spec = wide_spec(16, 4);
  spec.hidden = 36;
  EXPECT_EQ(build(spec), ErrorCode::kUnsupported);
  LayerOptions options{.compute = DType::kF32};
  EXPECT_EQ(build(wide_spec(16, 4), options), ErrorCode::kUnsupported);
  options = {};
  options.cuda.reserved_sms = gpu::device_info(gpu::current_device()).num_sms;
  EXPECT_NE(build(wide_spec(16, 4), options), ErrorCode::kSystem);
  spec = wide_spec(16, 16);
  EXPECT_EQ(code_of([&] { DeviceLayer(spec, make_weights(spec, DType::kBF16, 3), 1 << 23); }),
            ErrorCode::kCapacityExceeded);
}

TEST_F(GpuOptions, EveryActivation) {
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh,
        ActivationKind::kRelu, ActivationKind::kRelu2, ActivationKind::kIdentity,
        ActivationKind::kSitu}) {
    for (const bool gated : {true, false}) {
      if (!gated && kind == ActivationKind::kSitu) continue;
      for (const int tokens : {5, 290}) {
        LayerSpec spec = wide_spec(16, 4);
        spec.activation = {.kind = kind, .gated = gated};
        if (kind == ActivationKind::kSitu) spec.activation.limit = 0.8f;
        spec.expert_bias = tokens == 5;
        SCOPED_TRACE(::testing::Message() << name_of(spec.activation) << (gated ? " gated" : "")
                                          << ", " << tokens << " tokens");
        const MoeWeights w = make_weights(spec, DType::kBF16, 3);
        const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
        expect_accurate(spec, w, batch, DeviceLayer(spec, w, tokens).run(batch, DType::kBF16));
      }
    }
  }
}

// The second GEMM of this layer is one task of several milliseconds, in which nothing else moves:
// those that wait for it give up, the pass drains, and the process lives.
TEST_F(GpuOptions, AWaitPastItsDeadlineIsATypedError) {
  LayerSpec slow = wide_spec(1, 1);
  slow.hidden = 16;
  slow.intermediate = 1 << 20;
  const MoeWeights slow_weights = make_weights(slow, DType::kBF16, 3);
  const LayerOptions options{.deadline = std::chrono::milliseconds(1)};
  // Fewer would split the task; the second number is done by pairs of blocks.
  for (const int tokens : {40, 200}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    const auto slots = static_cast<std::size_t>(tokens);
    DeviceLayer layer(slow, slow_weights, tokens, options);
    const Batch batch{Matrix::random(tokens, slow.hidden, DType::kBF16, 17),
                      std::vector<std::int32_t>(slots, 0),
                      std::vector<float>(slots, 1.0f),
                      {}};
    layer.load(batch, DType::kBF16);
    layer.enqueue();
    try {
      layer.layer().stats();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
      EXPECT_EQ(error.failure().epoch, 1u) << error.what();
    }
    EXPECT_EQ(code_of([&] { layer.enqueue(); }), ErrorCode::kTimeout) << "the layer is dead";
  }
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  expect_accurate(spec, w, batch, DeviceLayer(spec, w, 40).run(batch, DType::kBF16));
}

TEST_F(GpuOptions, RowsThatAreNotAlignedAreRefused) {
  const LayerSpec spec = wide_spec(16, 4);
  DeviceLayer layer(spec, make_weights(spec, DType::kBF16, 3), 8);
  const gpu::DeviceBuffer memory(1 << 16);
  ForwardInput input;
  input.activations = {memory.data() + 2, DType::kBF16, 4, spec.hidden, spec.hidden};
  const ForwardOutput output{.data = memory.data() + (1 << 15)};
  EXPECT_EQ(code_of([&] { layer.layer().forward(input, output); }), ErrorCode::kInvalidArgument);
  input.activations = {memory.data(), DType::kBF16, 4, spec.hidden, spec.hidden + 1};
  EXPECT_EQ(code_of([&] { layer.layer().forward(input, output); }), ErrorCode::kInvalidArgument);
}

using GpuGraph = GpuTest;

TEST_F(GpuGraph, IsOneKernelAndReplaysWithOtherRouting) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  DeviceLayer layer(spec, w, 200);
  const Batch first = random_batch(spec, 200, DType::kBF16, 4);
  const Batch second = random_batch(spec, 200, DType::kBF16, 5);
  const BatchResult expected = layer.run(second, DType::kBF16);
  layer.load(first, DType::kBF16);
  gpu::Graph graph = gpu::Graph::capture(layer.stream(), [&] { layer.enqueue(); });
  EXPECT_EQ(graph.num_nodes(), 1);
  EXPECT_EQ(graph.num_kernel_nodes(), 1);
  layer.replace_activations(second);
  for (int i = 0; i < 3; ++i) {
    layer.poison();
    graph.launch(layer.stream());
    const BatchResult result = layer.fetch();
    EXPECT_TRUE(result.output == expected.output);
    EXPECT_EQ(result.ids, expected.ids);
  }
}

// The pass that the graph launched counts, not the last call.
TEST_F(GpuGraph, StatsAndErrorsAreOfThePassesItLaunches) {
  const LayerSpec spec = wide_spec(16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {24, 200}) {
    DeviceLayer layer(spec, w, 300);
    SyntheticRouting routing = synthetic_routing(tokens, 16, 4, 1.0, 2);
    routing.ids[5] = 99;
    const Batch bad{
        Matrix::random(tokens, spec.hidden, DType::kBF16, 1), routing.ids, routing.weights, {}};
    layer.load(bad, DType::kBF16);
    gpu::Graph graph = gpu::Graph::capture(layer.stream(), [&] { layer.enqueue(); });
    layer.layer().check();
    graph.launch(layer.stream());
    layer.stream().synchronize();
    EXPECT_ERROR(layer.layer().check(), kInvalidArgument, "token 1 has expert id 99");
    DeviceBatch other(spec, random_batch(spec, 300, DType::kBF16, 4), DType::kBF16);
    other.enqueue(layer.layer(), layer.stream());
    layer.stream().synchronize();
    EXPECT_EQ(layer.layer().stats().tokens, 300);
    graph.launch(layer.stream());
    layer.stream().synchronize();
    EXPECT_THROW(layer.layer().check(), Error);
    EXPECT_EQ(layer.layer().stats().tokens, tokens);
  }
}

}  // namespace
}  // namespace switchyard::testing
