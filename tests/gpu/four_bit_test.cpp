// The GPU engine and GroupedGemm with four-bit experts against the fp64 reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/device_batch.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kMxfp4 = DType::kF4E2M1, kInt4 = DType::kU4;

// H and I of layers. In stages of 64 columns they leave remainders of 0 to 3 from groups of four.
constexpr std::pair<int, int> kShapes[] = {{2880, 2880}, {2880, 64}, {256, 2880}, {96, 320},
                                           {32, 32},     {608, 352}, {448, 192}};

// Kernels multiply experts of one type, so there is no shared expert.
LayerSpec without_shared(LayerSpec spec) {
  spec.hidden = 288;
  spec.intermediate = 320;
  spec.shared_intermediate = 0;
  spec.shared_sigmoid_gate = false;
  return spec;
}

using EveryModelInFourBitsOnGpu = OnGpu<::testing::TestWithParam<std::tuple<ModelEntry, DType>>>;

TEST_P(EveryModelInFourBitsOnGpu, IsAsGoodAsAStraightforwardProgram) {
  const LayerSpec spec = without_shared(small_spec(std::get<0>(GetParam())));
  const MoeWeights w = make_weights(spec, std::get<1>(GetParam()), 11, 1);
  DeviceLayer layer(spec, w, 1000);
  EXPECT_EQ(layer.layer().compute(), DType::kBF16);
  expect_good_at_every_size(layer, w, 3, [&](const Batch& batch, const BatchResult& result) {
    expect_accurate(spec, w, batch, result);
  });
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelInFourBitsOnGpu,
                         ::testing::Combine(::testing::ValuesIn(model_table()),
                                            ::testing::Values(kMxfp4, kInt4)),
                         [](const auto& given) {
                           return identifier(std::get<0>(given.param).name) +
                                  (std::get<1>(given.param) == kMxfp4 ? "_mxfp4" : "_int4");
                         });

using GpuFourBits = OnGpu<::testing::Test>;

BatchResult run_on_gpu(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch) {
  const int tokens = static_cast<int>(std::max<std::int64_t>(1, batch.x.rows()));
  return DeviceLayer(spec, weights, tokens).run(batch, DType::kBF16);
}

TEST_F(GpuFourBits, EverySkewTileHeightAndSize) {
  for (const DType dtype : {kMxfp4, kInt4}) {
    for (const auto& [hidden, intermediate] : kShapes) {
      for (const bool gated : {true, false}) {
        LayerSpec spec{
            .hidden = hidden, .intermediate = intermediate, .num_experts = 12, .top_k = 3};
        spec.activation.gated = gated;
        const MoeWeights w = make_weights(spec, dtype);
        for (const double beta : {1.0, 0.1}) {
          for (const int tokens : {5, 300, 1500}) {
            SCOPED_TRACE(::testing::Message()
                         << to_string(dtype) << " " << hidden << " x " << intermediate << " gated "
                         << gated << " beta " << beta << " T " << tokens);
            const Batch batch = routed(spec, tokens, beta);
            expect_accurate(spec, w, batch, run_on_gpu(spec, w, batch));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// The matrix unit alone sums a row's products, with some fourteen bits. So more of h's codes are
// rounded otherwise than those of FP8 weights are (see fp8_test.cpp), and where few tokens or
// columns of h make the sums, such a code weighs more.
void expect_accurate_in_fp8(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                            const BatchResult& result) {
  expect_accurate_fp8(spec, w, batch, result, batch.x.rows() <= 30 ? 2.5 : 2, reference::kWholeRow);
}

void expect_accurate_in_bf16(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                             const BatchResult& result) {
  expect_accurate(spec, w, batch, result);
}

using EveryModelInMxfp4OnGpu = OnGpu<::testing::TestWithParam<ModelEntry>>;

TEST_P(EveryModelInMxfp4OnGpu, IsAsGoodWithTokensInFp8) {
  const LayerSpec spec = without_shared(small_spec(GetParam()));
  const MoeWeights w = make_weights(spec, kMxfp4, 11, 1);
  DeviceLayer layer(spec, w, 1000, {.compute = kFp8});
  EXPECT_EQ(layer.layer().compute(), kFp8);
  expect_good_at_every_size(layer, w, 3, [&](const Batch& batch, const BatchResult& result) {
    expect_accurate_in_fp8(spec, w, batch, result);
  });
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelInMxfp4OnGpu, ::testing::ValuesIn(model_table()),
                         name_of_model);

TEST_F(GpuFourBits, EverySkewTileHeightAndSizeWithTokensInFp8) {
  for (const auto& [hidden, intermediate] : kShapes) {
    for (const bool gated : {true, false}) {
      LayerSpec spec{.hidden = hidden, .intermediate = intermediate, .num_experts = 12, .top_k = 3};
      spec.activation.gated = gated;
      const MoeWeights w = make_weights(spec, kMxfp4);
      for (const double beta : {1.0, 0.1}) {
        for (const int tokens : {5, 30, 300, 1500}) {
          SCOPED_TRACE(::testing::Message() << hidden << " x " << intermediate << " gated " << gated
                                            << " beta " << beta << " T " << tokens);
          const Batch batch = routed(spec, tokens, beta);
          expect_accurate_in_fp8(
              spec, w, batch,
              DeviceLayer(spec, w, tokens, {.compute = kFp8}).run(batch, DType::kBF16));
          if (tokens <= kMostSmallTokens) {
            DeviceLayer small(
                spec, w, tokens,
                {.cuda = {.schedule = {.small_tokens = kMostSmallTokens}}, .compute = kFp8});
            expect_accurate_in_fp8(spec, w, batch, small.run(batch, DType::kBF16));
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// E5M2 has the codes of a row exactly within 28 octaves of its largest scale. Groups of zeros may
// have any scale.
TEST_F(GpuFourBits, ScalesWithinTwentyEightOctavesAreExactWithTokensInFp8) {
  const LayerSpec spec = without_shared({.num_experts = 6, .top_k = 2});
  for (const int octaves : {1, 8, 15, 21, 29}) {
    SCOPED_TRACE(octaves);
    MoeWeights weights = make_weights(spec, kMxfp4);
    std::deque<std::vector<std::uint8_t>> scales, codes;
    for_each_four_bit_matrix(weights, [&](MatrixView& m) {
      std::vector<std::uint8_t>& of = scales.emplace_back();
      const auto* const bytes = static_cast<const std::uint8_t*>(m.data);
      std::vector<std::uint8_t>& data =
          codes.emplace_back(bytes, bytes + m.rows * m.row_stride / 2);
      for (std::int64_t i = 0; i < m.rows * m.scale_stride; ++i) {
        of.push_back(static_cast<std::uint8_t>(123 - i * 7 % octaves));
      }
      of[2] = 3;
      of[3] = 127;
      std::fill_n(data.begin() + 32, 32, std::uint8_t{0x80});
      m.scale = of.data();
      m.data = data.data();
    });
    for (const int tokens : {20, 70}) {
      const Batch batch = routed(spec, tokens, 0.5);
      expect_accurate_in_fp8(
          spec, weights, batch,
          DeviceLayer(spec, weights, tokens, {.compute = kFp8}).run(batch, DType::kBF16));
    }
  }
  MoeWeights weights = make_weights(spec, kMxfp4);
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(spec.hidden) * 10, 120);
  scales[17 * 10 + 3] = 120 - 29;
  weights.experts[4].down.scale = scales.data();
  const std::string message = test::error_of(
      ErrorCode::kUnsupported, [&] { DeviceLayer layer(spec, weights, 10, {.compute = kFp8}); });
  EXPECT_THAT(message, HasSubstr("expert 4's down's scale of row 17, group 3"));
  EXPECT_THAT(message, HasSubstr("within 28 octaves; compute in bf16"));
}

// Tokens in FP8 are brought to one scale for each row. That is the same code where the caller made
// them so, exact where scales are powers of two of each other, and else rounds once more. Groups of
// zeros may have any scale.
TEST_F(GpuFourBits, TokensThatComeInFp8) {
  const LayerSpec spec = without_shared({.num_experts = 12, .top_k = 3});
  const MoeWeights w = make_weights(spec, kMxfp4);
  DeviceLayer layer(spec, w, 400, {.compute = kFp8});
  for (const int tokens : {7, 40, 75, 400}) {
    SCOPED_TRACE(tokens);
    const Batch batch = routed(spec, tokens, 0.5);
    Batch given = batch;
    given.x = Matrix::quantised(batch.x, true);
    const BatchResult by_row = layer.run(batch, DType::kBF16);
    EXPECT_TRUE(layer.run(given, DType::kBF16).output == by_row.output);

    Batch powers = batch;
    for (std::int64_t i = 0; i < tokens * spec.hidden; ++i) {
      const std::int64_t group = i % spec.hidden / 128;
      const float largest = std::ldexp(7.0f, -static_cast<int>(group % 3));
      const float x = batch.x.get(i);
      powers.x.set(i, i % spec.hidden % 128 == 5 ? largest : std::clamp(x, -largest, largest));
    }
    powers.x = Matrix::quantised(powers.x);
    expect_accurate_in_fp8(spec, w, powers, layer.run(powers, DType::kBF16));

    // A group of zeros whose scale is not that of its numbers.
    Batch zeros = batch;
    for (std::int64_t i = 0; i < tokens * spec.hidden; ++i) {
      if (i % spec.hidden < 128) zeros.x.set(i, 0);
    }
    zeros.x = Matrix::quantised(zeros.x);
    zeros.x.set_scales_of_group(0, 64.0f);
    const double error_beside_zeros = output_error(spec, w, zeros, layer.run(zeros, DType::kBF16),
                                                   nullptr, true, reference::kWholeRow);
    EXPECT_LT(error_beside_zeros, 0.07);

    given.x = Matrix::quantised(batch.x);
    const double error = output_error(spec, w, given, layer.run(given, DType::kBF16), nullptr, true,
                                      reference::kWholeRow);
    EXPECT_LT(error, 0.07);
  }
}

TEST_F(GpuFourBits, ScalesOfEveryKind) {
  const LayerSpec spec = without_shared({.num_experts = 6, .top_k = 2});
  for (const int octaves : {1, 7, 20, 100}) {
    SCOPED_TRACE(octaves);
    MoeWeights weights = make_weights(spec, kMxfp4);
    std::deque<std::vector<std::uint8_t>> scales;
    for_each_four_bit_matrix(weights, [&](MatrixView& m) {
      std::vector<std::uint8_t>& of = scales.emplace_back();
      for (std::int64_t i = 0; i < m.rows * m.scale_stride; ++i) {
        of.push_back(static_cast<std::uint8_t>(123 - i * 7 % octaves));
      }
      m.scale = of.data();
    });
    const Batch batch = routed(spec, 70, 0.5);
    expect_accurate(spec, weights, batch, run_on_gpu(spec, weights, batch));
  }
}

TEST_F(GpuFourBits, ScalesThatHaveNoNumberAreReported) {
  const LayerSpec spec = without_shared({.num_experts = 6, .top_k = 2});
  for (const auto& [code, error, words] : {std::tuple{255, ErrorCode::kInvalidArgument, "is NaN"},
                                           {129, ErrorCode::kUnsupported, "is 2^2"}}) {
    MoeWeights weights = make_weights(spec, kMxfp4);
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(spec.hidden) * 10, 120);
    scales[17 * 10 + 3] = static_cast<std::uint8_t>(code);
    weights.experts[4].down.scale = scales.data();
    const std::string message =
        test::error_of(error, [&] { DeviceLayer layer(spec, weights, 10); });
    EXPECT_THAT(message, HasSubstr("expert 4's down's scale of row 17, group 3"));
    EXPECT_THAT(message, HasSubstr(words));
  }
}

TEST_F(GpuFourBits, NonsenseIsRefused) {
  LayerSpec spec = without_shared({.num_experts = 6, .top_k = 2});
  const auto message = [&](const MoeWeights& weights, LayerOptions options = {}) {
    return test::error_of(ErrorCode::kUnsupported,
                          [&] { DeviceLayer layer(spec, weights, 10, options); });
  };
  EXPECT_THAT(message(make_weights(spec, kMxfp4), {.compute = DType::kF32}),
              HasSubstr("with tokens in bf16 or f8_e4m3, not f32"));
  MoeWeights zeros = make_weights(spec, kInt4);
  const std::vector<std::uint8_t> zero(1 << 20, 7);
  for_each_four_bit_matrix(zeros, [&](MatrixView& m) { m.zero = zero.data(); });
  EXPECT_THAT(message(zeros), HasSubstr("take no zero points"));
}

// Passes whose routing is given have kernels of their own if their tiles have at most 16 rows: one
// for small passes (with tokens in bf16), one for others. From 75 tokens on tiles have up to 32 (80
// of tokens in FP8), in a third. Skewed routing gives an expert several tiles. The bits are those
// of other kernels, as far as small passes do not cut K.
TEST_F(GpuFourBits, LowPassesOfEverySkewAndSize) {
  for (const auto& [dtype, compute] :
       {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
    const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
    for (const auto& [hidden, intermediate] : kShapes) {
      for (const bool gated : {true, false}) {
        LayerSpec spec{
            .hidden = hidden, .intermediate = intermediate, .num_experts = 12, .top_k = 3};
        spec.activation.gated = gated;
        const MoeWeights w = make_weights(spec, dtype);
        const auto layer_of = [&](std::optional<int> small, int low) {
          return DeviceLayer(
              spec, w, 130,
              {.cuda = {.schedule = {.small_tokens = small, .low_rows = low}}, .compute = compute});
        };
        DeviceLayer by_size = layer_of({}, 64), low = layer_of(0, 64), high = layer_of(0, 0);
        for (const double beta : {1.0, 0.1}) {
          for (const int tokens : {1, 5, 20, 33, 75, 130}) {
            SCOPED_TRACE(::testing::Message() << to_string(dtype) << " in " << to_string(compute)
                                              << " " << hidden << " x " << intermediate << " gated "
                                              << gated << " beta " << beta << " T " << tokens);
            const Batch batch = routed(spec, tokens, beta);
            const BatchResult result = low.run(batch, DType::kBF16);
            check(spec, w, batch, result);
            // (Small passes may cut K. The reference takes longest, so it is not asked in vain.)
            const BatchResult chosen = by_size.run(batch, DType::kBF16);
            if (!(chosen.output == result.output)) check(spec, w, batch, chosen);
            EXPECT_TRUE(low.run(batch, DType::kBF16).output == result.output) << "repeated";
            EXPECT_TRUE(high.run(batch, DType::kBF16).output == result.output) << "high tiles";
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// One expert has all rows, so that tiles have every height. The bits are those of high tiles.
TEST_F(GpuFourBits, LowPassesOfEveryHeight) {
  const LayerSpec spec = without_shared({.num_experts = 1, .top_k = 1});
  const MoeWeights w = make_weights(spec, kMxfp4);
  for (const DType compute : {DType::kBF16, kFp8}) {
    const auto layer_of = [&](int low) {
      return DeviceLayer(
          spec, w, 96,
          {.cuda = {.schedule = {.small_tokens = 0, .low_rows = low}}, .compute = compute});
    };
    DeviceLayer low = layer_of(96), high = layer_of(0);
    for (int tokens = 1; tokens <= 96; ++tokens) {
      const Batch batch = routed(spec, tokens, 1.0);
      ASSERT_TRUE(low.run(batch, DType::kBF16).output == high.run(batch, DType::kBF16).output)
          << to_string(compute) << ", " << tokens << " tokens";
    }
  }
}

// A low pass between other passes of the layer, in inputs and outputs of every type.
TEST_F(GpuFourBits, LowPassesAmongOthers) {
  const LayerSpec spec = without_shared({.num_experts = 40, .top_k = 4});
  const MoeWeights w = make_weights(spec, kMxfp4);
  for (const DType compute : {DType::kBF16, kFp8}) {
    const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
    DeviceLayer layer(spec, w, 2000, {.compute = compute});
    for (const DType input : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const DType output : {DType::kBF16, DType::kF16, DType::kF32}) {
        for (const int tokens : {2, 110, 2000, 111, 260, 261, 40}) {
          SCOPED_TRACE(::testing::Message() << to_string(compute) << ", " << tokens << " tokens, "
                                            << to_string(input) << " to " << to_string(output));
          const Batch batch = routed(spec, tokens, 0.3, input);
          check(spec, w, batch, layer.run(batch, output));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// A launch chooses the experts, and another is the low pass: the bits are those of the layer whose
// passes are in one launch.
TEST_F(GpuFourBits, LowPassesThatChooseTheirExperts) {
  for (const auto& [dtype, compute] :
       {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
    for (const bool hashed : {false, true}) {
      LayerSpec spec = without_shared({.num_experts = 40, .top_k = 4});
      if (hashed) spec.routing.method = RoutingMethod::kHash;
      const MoeWeights w = make_weights(spec, dtype);
      const auto layer_of = [&](std::optional<int> low) {
        return DeviceLayer(
            spec, w, 300,
            {.cuda = {.schedule = {.small_tokens = 0, .low_rows = low}}, .compute = compute});
      };
      DeviceLayer low = layer_of({}), large = layer_of(0),
                  by_size(spec, w, 300, {.compute = compute});
      for (const DType input : {DType::kBF16, DType::kF16, DType::kF32}) {
        for (const int tokens : {0, 1, 5, 33, 110, 260}) {
          SCOPED_TRACE(::testing::Message()
                       << to_string(dtype) << " in " << to_string(compute) << ", " << tokens
                       << " tokens in " << to_string(input) << (hashed ? ", hashed" : ""));
          const Batch batch = random_batch(spec, tokens, input, 5);
          const BatchResult expected = large.run(batch, DType::kBF16);
          const BatchResult result = low.run(batch, DType::kBF16);
          // (The reference's gate takes activations as they are, the layer's rounds them to bf16.)
          if (input == DType::kBF16) expect_same_routing(spec, w, batch, result);
          EXPECT_EQ(result.ids, expected.ids);
          EXPECT_EQ(result.weights, expected.weights);
          EXPECT_TRUE(result.output == expected.output);
          EXPECT_EQ(result.stats[0].tokens_per_expert, expected.stats[0].tokens_per_expert);
          EXPECT_TRUE(low.run(batch, DType::kBF16).output == result.output) << "repeated";
          // (Small passes may cut K, and add in another order.)
          const BatchResult chosen = by_size.run(batch, DType::kBF16);
          EXPECT_EQ(chosen.ids, expected.ids);
          if (tokens != 0 && !(chosen.output == result.output)) {
            const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
            check(spec, w, batch, chosen);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(GpuFourBits, LowPassesThatChooseTheirExpertsFromWhatIsOdd) {
  LayerSpec spec = without_shared({.num_experts = 40, .top_k = 4});
  const MoeWeights w = make_weights(spec, kMxfp4);
  for (const DType compute : {DType::kBF16, kFp8}) {
    const auto layer_of = [&](const LayerSpec& its, const MoeWeights& weights, int low,
                              const ExpertPlacement& placement = {}) {
      return DeviceLayer(
          its, weights, 110,
          {.cuda = {.schedule = {.low_rows = low}}, .compute = compute, .placement = placement});
    };
    DeviceLayer low = layer_of(spec, w, 26), large = layer_of(spec, w, 0);
    for (const int tokens : {12, 110}) {
      SCOPED_TRACE(::testing::Message() << to_string(compute) << ", " << tokens << " tokens");
      // Logits that are no numbers.
      Batch batch = random_batch(spec, tokens, DType::kBF16, 6);
      for (const int token : {3, 7, 11}) batch.x.set(token * spec.hidden + 5, NAN);
      const BatchResult nan = low.run(batch, DType::kBF16);
      EXPECT_EQ(nan.stats[0].nan_tokens, 3);
      EXPECT_EQ(nan.stats[0].nan_logits, 3 * 40);
      for (std::size_t k = 0; k < 4; ++k) EXPECT_EQ(nan.ids[7 * 4 + k], kNoExpert);
      // Logits that the call gives, in rows that stand apart.
      batch = random_batch(spec, tokens, DType::kBF16, 7);
      const Matrix logits = Matrix::random(tokens, 44, DType::kF32, 9);
      gpu::DeviceBuffer memory(static_cast<std::size_t>(tokens) * 44 * sizeof(float));
      memory.upload(logits.view().data, memory.bytes());
      const AdjustCall with_logits = [&](ForwardInput& input, ForwardOutput&, std::size_t) {
        input.logits = {memory.data(), DType::kF32, tokens, 40, 44};
      };
      const BatchResult of_logits = low.run(batch, DType::kBF16, with_logits);
      EXPECT_EQ(of_logits.ids, large.run(batch, DType::kBF16, with_logits).ids);
      EXPECT_NE(of_logits.ids, low.run(batch, DType::kBF16).ids);
      const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
      check(spec, w, batch, of_logits);
      // Rows of activations that overlap.
      for (int t = 1; t < tokens; ++t) {
        std::memcpy(batch.x.row(t), batch.x.row(0), static_cast<std::size_t>(spec.hidden) * 2);
      }
      const BatchResult expected = low.run(batch, DType::kBF16);
      low.load(batch, DType::kBF16);
      low.set_row_stride(0);
      low.poison();
      low.enqueue();
      EXPECT_TRUE(low.fetch().output == expected.output);
      // Places of experts that are not their own.
      ExpertPlacement placement;
      MoeWeights placed = w;
      placed.experts.clear();
      for (int p = 0; p < 44; ++p) {
        placement.expert_at.push_back((p * 7 + 5) % 40);
        placed.experts.push_back(w.experts[static_cast<std::size_t>(placement.expert_at.back())]);
      }
      DeviceLayer elsewhere = layer_of(spec, placed, 26, placement);
      batch = random_batch(spec, tokens, DType::kBF16, 8);
      const BatchResult there = elsewhere.run(batch, DType::kBF16);
      expect_same_routing(spec, w, batch, there);
      check(spec, w, batch, there);
      if (HasFailure()) return;
    }
    // Ids that the table of a hashed layer does not have.
    LayerSpec hashed = spec;
    hashed.routing.method = RoutingMethod::kHash;
    DeviceLayer layer = layer_of(hashed, make_weights(hashed, kMxfp4), 26);
    Batch batch = random_batch(hashed, 110, DType::kBF16, 4);
    batch.token_ids[7] = -5;
    EXPECT_ERROR(layer.run(batch, DType::kBF16), kInvalidArgument,
                 "token id -5 of token 7 is outside the routing table's vocabulary of ");
  }
}

TEST_F(GpuFourBits, LowPassesWithBiasesClampsAndWeightsOnInput) {
  for (const auto& [dtype, compute] :
       {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
    const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
    for (const bool on_input : {true, false}) {
      LayerSpec spec = without_shared({.num_experts = 24, .top_k = 4});
      spec.expert_bias = true;
      spec.weight_on_input = on_input;
      spec.activation.alpha = 1.702f;
      spec.activation.limit = 1;
      spec.activation.up_bias = 1;
      const MoeWeights w = make_weights(spec, dtype);
      DeviceLayer layer(spec, w, 130, {.compute = compute});
      for (const int tokens : {60, 130}) {
        const Batch batch = routed(spec, tokens, 0.6);
        check(spec, w, batch, layer.run(batch, DType::kBF16));
        // The same of weights that are bound anew.
        layer.layer().rebind(w);
        check(spec, w, batch, layer.run(batch, DType::kBF16));
      }
    }
  }
}

// It is of another type, so it is a layer of its own behind that of the routed experts.
TEST_F(GpuFourBits, ASharedExpertBesideThem) {
  LayerSpec spec = without_shared({.num_experts = 16, .top_k = 4});
  spec.shared_intermediate = 160;
  for (const auto& [dtype, compute] :
       {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
    const auto check = compute == kFp8 ? expect_accurate_in_fp8 : expect_accurate_in_bf16;
    for (const bool sigmoid : {false, true}) {
      spec.shared_sigmoid_gate = sigmoid;
      const MoeWeights w = make_weights(spec, dtype);
      DeviceLayer layer(spec, w, 400, {.compute = compute});
      EXPECT_EQ(layer.layer().spec(), spec);
      for (const int tokens : {1, 24, 400}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(dtype) << " in " << to_string(compute) << ", " << tokens
                     << " tokens" << (sigmoid ? ", gated" : ""));
        const Batch batch = routed(spec, tokens, 0.5);
        const BatchResult result = layer.run(batch, DType::kBF16);
        check(spec, w, batch, result);
        EXPECT_TRUE(layer.run(batch, DType::kBF16).output == result.output) << "repeated";
      }
    }
  }
}

// Layers of the same sizes have room, with few experts and with so many that low tiles are most.
TEST_F(GpuFourBits, LayersInAWorkspace) {
  for (const auto& [experts, top_k, tokens] : {std::tuple{8, 2, 32}, {128, 4, 512}, {16, 4, 400}}) {
    const LayerSpec spec = without_shared({.num_experts = experts, .top_k = top_k});
    for (const auto& [dtype, compute] :
         {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
      SCOPED_TRACE(::testing::Message()
                   << experts << " experts, " << to_string(dtype) << " in " << to_string(compute));
      const MoeWeights w = make_weights(spec, dtype);
      const Workspace workspace(
          DeviceLayer::world(), spec,
          {.backend = Backend::kCuda, .max_tokens = tokens, .compute = compute, .weights = dtype});
      DeviceLayer own(spec, w, tokens, {.compute = compute});
      DeviceLayer shared(spec, w, tokens, {.workspace = &workspace, .compute = compute});
      const Batch batch = routed(spec, tokens, 0.5);
      EXPECT_TRUE(shared.run(batch, DType::kBF16).output == own.run(batch, DType::kBF16).output);
    }
  }
}

// 2,000 passes of the same tokens, of few and of many.
TEST_F(GpuFourBits, TheSameBitsOnEveryRepetition) {
  const LayerSpec spec = without_shared({.num_experts = 16, .top_k = 4});
  for (const auto& [dtype, compute] :
       {std::pair{kMxfp4, DType::kBF16}, {kInt4, DType::kBF16}, {kMxfp4, kFp8}}) {
    const MoeWeights w = make_weights(spec, dtype);
    for (const int tokens : {3, 40, 60, 400}) {
      DeviceLayer layer(spec, w, tokens, {.compute = compute});
      const Batch batch = routed(spec, tokens, 0.5);
      const BatchResult first = layer.run(batch, DType::kBF16);
      for (int repetition = 0; repetition < 500; ++repetition) {
        ASSERT_TRUE(layer.run(batch, DType::kBF16).output == first.output)
            << to_string(dtype) << ", " << tokens << " tokens, repetition " << repetition;
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
