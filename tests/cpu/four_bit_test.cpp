// The CPU engine with four-bit experts against the fp64 reference, which decodes them with code of
// its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "model/errors.h"
#include "reference/decode.h"
#include "reference/reference.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "switchyard/operators.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kMxfp4 = DType::kF4E2M1;
constexpr DType kInt4 = DType::kU4;

LayerSpec whole_groups(LayerSpec spec) {
  spec.hidden = 288;
  spec.intermediate = 320;
  if (spec.shared_intermediate > 0) spec.shared_intermediate = 160;
  return spec;
}
LayerSpec small(int experts = 6, int top_k = 2) {
  return whole_groups({.num_experts = experts, .top_k = top_k});
}

class EveryModelInFourBits : public ::testing::TestWithParam<std::tuple<ModelEntry, DType>> {
 protected:
  LayerSpec spec_ = whole_groups(small_spec(std::get<0>(GetParam())));
  DType dtype_ = std::get<1>(GetParam());
  MoeWeights weights_ = make_weights(spec_, dtype_, 11, 1);
};

TEST_P(EveryModelInFourBits, Bf16IsAsGoodAsAStraightforwardProgram) {
  for (const int tokens : {1, 60}) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << ranks << " ranks");
      const Batch batch = random_batch(spec_, tokens, DType::kBF16, 200 + tokens);
      const BatchResult result =
          run_batch(spec_, weights_, batch, Shares::even(tokens, ranks), DType::kBF16);
      expect_same_routing(spec_, weights_, batch, result);
      expect_accurate(spec_, weights_, batch, result);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(EveryModelInFourBits, Fp32MatchesFp64) {
  const Batch batch = random_batch(spec_, 50, DType::kF32, 3);
  const BatchResult result =
      run_batch(spec_, weights_, batch, Shares::even(50, 2), DType::kF32, {.compute = DType::kF32});
  EXPECT_LE(output_error(spec_, weights_, batch, result), 1e-5);
}

TEST_P(EveryModelInFourBits, Fp8TokensTimesMxfp4) {
  if (dtype_ != kMxfp4) return;
  const Batch batch = random_batch(spec_, 70, DType::kBF16, 4);
  const BatchResult result =
      run_batch(spec_, weights_, batch, Shares::even(70, 2), DType::kBF16, {.compute = kFp8});
  expect_accurate_fp8(spec_, weights_, batch, result);
}

TEST_P(EveryModelInFourBits, SameBitsOnEveryRepetitionAndRankCount) {
  expect_same_bits(spec_, weights_, DType::kBF16, {103, {1, 2, 4}});
}

// INT4 differs in the codes alone, so every fourth model has it, too.
std::vector<std::tuple<ModelEntry, DType>> models_in_four_bits() {
  std::vector<std::tuple<ModelEntry, DType>> cases;
  for (const ModelEntry& model : model_table()) {
    if (cases.size() % 5 == 0) cases.emplace_back(model, kInt4);
    cases.emplace_back(model, kMxfp4);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelInFourBits,
                         ::testing::ValuesIn(models_in_four_bits()), [](const auto& given) {
                           return identifier(std::get<0>(given.param).name) +
                                  (std::get<1>(given.param) == kMxfp4 ? "_mxfp4" : "_int4");
                         });

TEST(FourBits, EveryCodeIsItsValue) {
  std::vector<std::uint8_t> codes(16);
  for (int i = 0; i < 16; ++i)
    codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const std::uint8_t scale = 127;
  MatrixView view{codes.data(), kMxfp4, 1, 32, 32};
  view.scale = &scale;
  view.scale_rows = 1;
  view.scale_cols = 32;
  view.scale_dtype = DType::kF8E8M0;
  const double values[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
  double row[32];
  reference::decode_row(view, 0, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(row[2 * i], values[i]);
    EXPECT_EQ(row[2 * i + 1], values[15 - i]);
  }
  const float f32_scale = 0.25f;
  view.dtype = kInt4;
  view.scale = &f32_scale;
  view.scale_dtype = DType::kF32;
  reference::decode_row(view, 0, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(row[2 * i], (i - 8) * 0.25);
    EXPECT_EQ(row[2 * i + 1], (7 - i) * 0.25);
  }
  const std::uint8_t zero = 3;
  view.zero = &zero;
  reference::decode_row(view, 0, row);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(row[2 * i], (i - 3) * 0.25);
}

TEST(FourBits, SizesOfModels) {
  for (const DType dtype : {kMxfp4, kInt4}) {
    for (const auto& [hidden, intermediate] :
         {std::pair{2880, 64}, {64, 2880}, {2880, 320}, {32, 32}}) {
      SCOPED_TRACE(::testing::Message()
                   << to_string(dtype) << " " << hidden << " x " << intermediate);
      LayerSpec spec{.hidden = hidden, .intermediate = intermediate, .num_experts = 5, .top_k = 2};
      const MoeWeights weights = make_weights(spec, dtype);
      const Batch batch = random_batch(spec, 9, DType::kBF16, 5);
      const BatchResult result = run_batch(spec, weights, batch, Shares::even(9, 2), DType::kBF16);
      expect_accurate(spec, weights, batch, result);
    }
  }
}

TEST(FourBits, ExpertsWithoutTokens) {
  const LayerSpec spec = small(8);
  const MoeWeights weights = make_weights(spec, kMxfp4);
  Batch batch = random_batch(spec, 20, DType::kBF16, 5);
  batch.topk_ids.assign(40, -1);
  batch.topk_weights.assign(40, 0.5f);
  for (std::size_t t = 0; t < 20; ++t) batch.topk_ids[2 * t] = t % 2 == 0 ? 3 : 5;
  const BatchResult result = run_batch(spec, weights, batch, Shares::even(20, 3), DType::kBF16);
  expect_accurate(spec, weights, batch, result);
}

// Weights with scales, zero points and groups of the test's own.
class Regrouped {
 public:
  // scale_of(matrix, index) in the type.
  Regrouped(const LayerSpec& spec, DType dtype, std::int64_t group, DType scale_dtype, bool zeros,
            const std::function<float(float, std::size_t)>& scale_of)
      : weights_(make_weights(spec, dtype, 9)) {
    std::mt19937 random(3);
    for_each_four_bit_matrix(weights_, [&](MatrixView& m) {
      m.scale_cols = group;
      m.scale_stride = m.cols / group;
      m.scale_dtype = scale_dtype;
      const auto count = static_cast<std::size_t>(m.rows * m.scale_stride);
      const float typical = 1 / (4 * std::sqrt(static_cast<float>(m.cols)));
      std::vector<std::byte>& scales = bytes_.emplace_back(count * size_of(scale_dtype));
      std::vector<std::byte>& zero = bytes_.emplace_back(count);
      for (std::size_t i = 0; i < count; ++i) {
        const float scale = scale_of(typical, i);
        zero[i] = static_cast<std::byte>(random() % 16);
        if (scale_dtype == DType::kF32) std::memcpy(&scales[4 * i], &scale, 4);
        const std::uint16_t half =
            scale_dtype == DType::kF16 ? f32_to_f16(scale) : f32_to_bf16(scale);
        if (size_of(scale_dtype) == 2) std::memcpy(&scales[2 * i], &half, 2);
        if (scale_dtype == DType::kF8E8M0) {
          scales[i] = static_cast<std::byte>(127 + std::lround(std::log2(scale)));
        }
      }
      m.scale = scales.data();
      m.zero = zeros ? reinterpret_cast<const std::uint8_t*>(zero.data()) : nullptr;
    });
  }
  MoeWeights& get() { return weights_; }

 private:
  MoeWeights weights_;
  std::deque<std::vector<std::byte>> bytes_;
};

TEST(FourBits, GroupsScalesAndZeroPointsOfInt4) {
  LayerSpec spec = small();
  spec.hidden = 256;
  spec.intermediate = 384;
  for (const std::int64_t group : {32, 128}) {
    for (const DType scales : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool zeros : {false, true}) {
        SCOPED_TRACE(::testing::Message() << group << " " << to_string(scales) << " " << zeros);
        Regrouped weights(spec, kInt4, group, scales, zeros, [](float typical, std::size_t i) {
          return typical * (0.5f + 0.25f * static_cast<float>(i % 7));
        });
        const Batch batch = random_batch(spec, 33, DType::kBF16, 5);
        const BatchResult result =
            run_batch(spec, weights.get(), batch, Shares::even(33, 2), DType::kBF16);
        expect_accurate(spec, weights.get(), batch, result);
      }
    }
  }
}

TEST(FourBits, ScalesThatSpanManyOctaves) {
  const LayerSpec spec = small();
  for (const int octaves : {7, 20}) {
    Regrouped weights(spec, kMxfp4, 32, DType::kF8E8M0, false, [&](float typical, std::size_t i) {
      return std::ldexp(typical,
                        static_cast<int>(i * 7 % static_cast<std::size_t>(octaves)) - octaves);
    });
    for (const DType compute : {DType::kBF16, kFp8}) {
      SCOPED_TRACE(::testing::Message() << octaves << " " << to_string(compute));
      LayerSpec routed = spec;
      const Batch batch = routed_batch(routed, 33, DType::kBF16);
      const BatchResult result = run_batch(routed, weights.get(), batch, Shares::even(33, 2),
                                           DType::kBF16, {.compute = compute});
      double yardstick = 0;
      const double error =
          output_error(routed, weights.get(), batch, result, &yardstick, compute == kFp8);
      EXPECT_LE(error, 2 * yardstick);
    }
  }
}

// 2^-127 and 2^127 are numbers like others. Products that fp32 cannot hold are infinite.
TEST(FourBits, TheFirstAndTheLastScale) {
  LayerSpec spec = small(2, 1);
  spec.activation = {.kind = ActivationKind::kIdentity, .gated = false};
  for (const int code : {0, 127, 254}) {
    SCOPED_TRACE(code);
    MoeWeights weights = make_weights(spec, kMxfp4);
    std::deque<std::vector<std::uint8_t>> scales;
    for_each_four_bit_matrix(weights, [&](MatrixView& m) {
      const bool is_up = m.rows == spec.intermediate;
      // Down takes the magnitudes back to where fp32 has them.
      const int down = code == 0 ? 254 - 20 : code == 254 ? 0 : 120;
      m.scale =
          scales
              .emplace_back(static_cast<std::size_t>(m.rows * m.scale_stride), is_up ? code : down)
              .data();
      // Codes of 2^127 up to 1, so that products stay below infinity.
      std::vector<std::uint8_t>& codes =
          scales.emplace_back(static_cast<std::size_t>(m.rows * m.cols / 2));
      const auto* const old = static_cast<const std::uint8_t*>(m.data);
      for (std::size_t i = 0; i < codes.size(); ++i)
        codes[i] = static_cast<std::uint8_t>(old[i] & 0x99);
      m.data = codes.data();
    });
    Batch batch = random_batch(spec, 12, DType::kF32, 5);
    for (std::int64_t i = 0; i < 12 * spec.hidden; ++i)
      batch.x.set(i, batch.x.get(i) * (code == 254 ? 1e-3f : code == 0 ? 1e3f : 1.0f));
    const BatchResult result =
        run_batch(spec, weights, batch, Shares::even(12, 1), DType::kF32, {.compute = DType::kF32});
    EXPECT_LE(output_error(spec, weights, batch, result), 1e-5);
  }
}

TEST(FourBits, AScaleThatIsNanIsReportedWithItsPlace) {
  const LayerSpec spec = small();
  MoeWeights weights = make_weights(spec, kMxfp4);
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(spec.hidden) * 10, 120);
  scales[17 * 10 + 3] = 255;
  weights.experts[4].down.scale = scales.data();
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument,
                             [&] { MoeLayer(World::single(), spec, weights); }),
              HasSubstr("experts[4].down's scale of row 17, columns 96 to 127 is NaN (f8_e8m0)"));
  scales[17 * 10 + 3] = 120;
  MoeLayer layer(World::single(), spec, weights);
  scales[0] = 255;
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { layer.rebind(weights); }),
              HasSubstr("experts[4].down's scale of row 0, columns 0 to 31 is NaN"));
}

TEST(FourBits, ANanOfOneRankIsToldByAllRanks) {
  const LayerSpec spec = small();
  MoeWeights weights = make_weights(spec, kMxfp4);
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(spec.hidden) * 10, 120);
  scales[3] = 255;
  weights.experts[4].down.scale = scales.data();  // rank 1 has experts 3 to 5
  expect_thrown(run_ranks(World::threads(2),
                          [&](const World& world) {
                            MoeLayer(world, spec, weights_of_rank(weights, world.rank(), 2));
                          }),
                ErrorCode::kInvalidArgument,
                "experts[4].down's scale of row 0, columns 96 to 127 is NaN");
}

// A layer on a GPU has a kernel for one form, and would read another one's bytes as its own.
TEST(FourBits, ALayerGetsOnlyWeightsOfItsFormAnew) {
  LayerSpec spec = small();
  spec.shared_intermediate = 160;
  const MoeWeights weights = make_weights(spec, kInt4);
  MoeLayer layer(World::single(), spec, weights);
  const auto expect_refused = [&](const MoeWeights& other, const char* words) {
    EXPECT_THAT(test::error_of(ErrorCode::kDTypeMismatch, [&] { layer.rebind(other); }),
                HasSubstr(words));
  };
  const char* const was = ", and were u4 with a scale of bf16 per 32 columns";
  MoeWeights other = weights;
  const MoeWeights mxfp4 = make_weights(spec, kMxfp4);
  other.experts = mxfp4.experts;
  expect_refused(other, (std::string("the routed experts' weights are f4_e2m1 with a scale of "
                                     "f8_e8m0 per 32 columns") +
                         was)
                            .c_str());
  const MoeWeights bf16 = make_weights(spec, DType::kBF16);
  other.experts = bf16.experts;
  expect_refused(other, (std::string("the routed experts' weights are bf16") + was).c_str());
  const std::vector<std::uint8_t> zeros(std::size_t{320} * 10, 8);
  other.experts = weights.experts;
  for (FfnWeights& expert : other.experts)
    for (MatrixView* const m : {&expert.gate, &expert.up, &expert.down}) m->zero = zeros.data();
  expect_refused(other, (std::string("32 columns and zero points") + was).c_str());
  other = weights;
  other.shared = mxfp4.experts[0];
  for (MatrixView* const m : {&other.shared.gate, &other.shared.up}) m->rows = 160;
  other.shared.down.cols = 160;
  expect_refused(other, "the shared expert's weights are f4_e2m1");
  layer.rebind(make_weights(spec, kInt4, 3));
}

TEST(FourBits, SharedExpertsOfFourBitsAreForCpus) {
  LayerSpec spec = small();
  spec.shared_intermediate = spec.intermediate;
  MoeWeights weights = make_weights(spec, DType::kBF16);
  const MoeWeights four_bits = make_weights(spec, kMxfp4);
  weights.shared = four_bits.experts[0];
  const Batch batch = random_batch(spec, 20, DType::kBF16, 5);
  expect_accurate(spec, weights, batch,
                  run_batch(spec, weights, batch, Shares::even(20, 2), DType::kBF16));
  EXPECT_THAT(test::error_of(
                  ErrorCode::kUnsupported,
                  [&] { MoeLayer(World::single(), spec, weights, {.backend = Backend::kCuda}); }),
              HasSubstr("shared.gate is f4_e2m1, and the backend is cuda"));
}

TEST(FourBits, ScalesOfActivationsAreFloats) {
  const LayerSpec spec = small();
  MoeLayer layer(World::single(), spec, make_weights(spec, kMxfp4), {.compute = kFp8});
  const std::vector<std::uint8_t> codes(288, 0x38), scales(3, 127);
  const std::vector<std::int64_t> ids = {0, 1};
  const std::vector<float> factors = {0.5f, 0.5f};
  std::vector<float> y(288);
  ForwardInput input;
  input.activations = {codes.data(), kFp8, 1, 288, 288, 1, scales.data(), 1, 128, 3};
  input.activations.scale_dtype = DType::kF8E8M0;
  input.topk_ids = ids;
  input.topk_weights = factors;
  ForwardOutput output;
  output.data = y.data();
  output.dtype = DType::kF32;
  EXPECT_THAT(test::error_of(ErrorCode::kDTypeMismatch, [&] { layer.forward(input, output); }),
              HasSubstr("activations are f8_e4m3 with scales of f8_e8m0; convert them to f32"));
}

TEST(FourBits, GateAndUpInTurn) {
  const LayerSpec spec = small();
  const MoeWeights weights = make_weights(spec, kMxfp4);
  MoeWeights in_turn = weights;
  std::deque<std::vector<std::uint8_t>> memory;
  for (FfnWeights& expert : in_turn.experts) {
    std::vector<std::uint8_t>& codes =
        memory.emplace_back(static_cast<std::size_t>(spec.intermediate * spec.hidden));
    std::vector<std::uint8_t>& scales =
        memory.emplace_back(static_cast<std::size_t>(2 * spec.intermediate * 9));
    for (const bool is_up : {false, true}) {
      MatrixView& m = is_up ? expert.up : expert.gate;
      for (std::int64_t r = 0; r < m.rows; ++r) {
        std::memcpy(&codes[static_cast<std::size_t>((2 * r + is_up) * m.cols / 2)], m.row(r),
                    static_cast<std::size_t>(m.cols / 2));
        std::memcpy(&scales[static_cast<std::size_t>((2 * r + is_up) * 9)], m.row_scale(r), 9);
      }
      m.data = &codes[static_cast<std::size_t>(is_up * m.cols / 2)];
      m.row_stride = 2 * m.cols;
      m.scale = &scales[is_up ? 9 : 0];
      m.scale_stride = 18;
    }
  }
  const Batch batch = random_batch(spec, 40, DType::kBF16, 5);
  EXPECT_TRUE(run_batch(spec, in_turn, batch, Shares::even(40, 2), DType::kBF16).output ==
              run_batch(spec, weights, batch, Shares::even(40, 2), DType::kBF16).output);
}

struct Refusal {
  const char* words;
  ErrorCode code;
  DType dtype;
  std::function<void(MatrixView&)> spoil;
  std::optional<DType> compute{};
};

TEST(FourBits, NonsenseIsRefused) {
  const LayerSpec spec = small();
  static const std::uint8_t zero[1 << 20] = {};
  const Refusal refusals[] = {
      {"experts[0].up is f4_e2m1 (MXFP4), without scales", ErrorCode::kMissingTensor, kMxfp4,
       [](MatrixView& m) { m.scale = nullptr; }},
      {"with scales of f32; they must be f8_e8m0", ErrorCode::kDTypeMismatch, kMxfp4,
       [](MatrixView& m) { m.scale_dtype = DType::kF32; }},
      {"with scales of f8_e8m0; they must be f32 or bf16 or f16", ErrorCode::kDTypeMismatch, kInt4,
       [](MatrixView& m) { m.scale_dtype = DType::kF8E8M0; }},
      {"a scale for 1 x 16 elements; groups are of 32 columns", ErrorCode::kUnsupported, kMxfp4,
       [](MatrixView& m) { m.scale_cols = 16; }},
      {"a scale for 1 x 64 elements; groups are of 32 or 128 columns", ErrorCode::kUnsupported,
       kInt4, [](MatrixView& m) { m.scale_cols = 64; }},
      {"a scale for 2 x 32 elements", ErrorCode::kUnsupported, kMxfp4,
       [](MatrixView& m) { m.scale_rows = 2; }},
      {"with 288 columns, which is no multiple of its groups of 128", ErrorCode::kShapeMismatch,
       kInt4, [](MatrixView& m) { m.scale_cols = 128; }},
      {"scales 8 apart from row to row, but a row of 288 columns has 9", ErrorCode::kShapeMismatch,
       kMxfp4, [](MatrixView& m) { m.scale_stride = 8; }},
      {"columns 2 elements apart", ErrorCode::kUnsupported, kMxfp4,
       [](MatrixView& m) { m.col_stride = 2; }},
      {"rows 289 elements apart; a row must begin at a whole byte", ErrorCode::kUnsupported, kInt4,
       [](MatrixView& m) { m.row_stride = 289; }},
      {"rows -288 elements apart, in reverse", ErrorCode::kUnsupported, kMxfp4,
       [](MatrixView& m) { m.row_stride = -288; }},
      {"scales at an address that is no multiple of 2 bytes", ErrorCode::kInvalidArgument, kInt4,
       [](MatrixView& m) { m.scale = static_cast<const std::byte*>(m.scale) + 1; }},
      {"with zero points, which only u4 has", ErrorCode::kInvalidArgument, kMxfp4,
       [](MatrixView& m) { m.zero = zero; }},
      {"compute type f8_e4m3, but experts[0].gate is u4", ErrorCode::kInvalidArgument, kInt4,
       [](MatrixView&) {}, kFp8},
      {"compute type f4_e2m1; use bf16, f32 or f8_e4m3", ErrorCode::kInvalidArgument, kMxfp4,
       [](MatrixView&) {}, kMxfp4},
      {"with a scale of bf16 per 32 columns where experts", ErrorCode::kDTypeMismatch, kInt4,
       [](MatrixView& m) { m.zero = zero; }},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.words);
    MoeWeights weights = make_weights(spec, refusal.dtype);
    refusal.spoil(weights.experts[0].up);
    EXPECT_THAT(
        test::error_of(
            refusal.code,
            [&] { MoeLayer(World::single(), spec, weights, {.compute = refusal.compute}); }),
        HasSubstr(refusal.words));
  }
  MoeWeights weights = make_weights(spec, kMxfp4);
  weights.router = weights.experts[0].up;
  weights.router.rows = spec.num_experts;
  EXPECT_THAT(
      test::error_of(ErrorCode::kDTypeMismatch, [&] { MoeLayer(World::single(), spec, weights); }),
      HasSubstr("router is f4_e2m1; only experts may be of four bits"));
  std::vector<std::uint8_t> zeros(static_cast<std::size_t>(spec.intermediate) * 9, 16);
  MoeWeights int4 = make_weights(spec, kInt4);
  for_each_four_bit_matrix(int4, [&](MatrixView& m) { m.zero = zero; });
  int4.experts[1].gate.zero = zeros.data();
  EXPECT_THAT(
      test::error_of(ErrorCode::kInvalidArgument, [&] { MoeLayer(World::single(), spec, int4); }),
      HasSubstr("experts[1].gate's zero point of row 0, columns 0 to 31 is 16"));
}

}  // namespace
}  // namespace switchyard::testing
