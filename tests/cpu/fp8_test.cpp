// The CPU engine in FP8 against the fp64 reference of the quantised problem.
#include "support/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <random>

#include "model/errors.h"
#include "reference/reference.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

class EveryModelInFp8 : public ::testing::TestWithParam<ModelEntry> {
 protected:
  LayerSpec spec_ = grouped(small_spec(GetParam()));
  MoeWeights weights_ = fp8_weights(spec_);
};

TEST_P(EveryModelInFp8, IsAsGoodAsAStraightforwardProgram) {
  for (const int tokens : {1, 7, 64, 300}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    const Batch batch = random_batch(spec_, tokens, DType::kBF16, 200 + tokens);
    const BatchResult result =
        run_batch(spec_, weights_, batch, Shares::even(tokens, 2), DType::kBF16);
    expect_same_routing(spec_, weights_, batch, result);
    expect_accurate_fp8(spec_, weights_, batch, result);
    if (HasFatalFailure()) return;
  }
}

// The accuracy that is lost by computing in FP8 rather than in bf16, from the same weights.
TEST_P(EveryModelInFp8, CostsSomePercentOfTheBf16Layer) {
  const Batch batch = random_batch(spec_, 300, DType::kBF16, 500);
  const auto run = [&](DType compute) {
    return run_batch(spec_, weights_, batch, Shares::even(300, 1), DType::kF32,
                     {.compute = compute});
  };
  const std::vector<float> wide = run(DType::kBF16).output.floats();
  const double loss = reference::relative_error(run(kFp8).output.floats(),
                                                std::vector<double>(wide.begin(), wide.end()));
  RecordProperty("loss", std::to_string(loss));
  // E4M3 has 3 bits of mantissa: an error of up to 2^-4 of a value, in x and in h.
  EXPECT_GT(loss, 0.01);
  EXPECT_LT(loss, 0.06);
}

TEST_P(EveryModelInFp8, SameBitsOnEveryRepetitionAndRankCount) {
  expect_same_bits(spec_, weights_, DType::kBF16, {103, {1, 2, 3}});
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelInFp8, ::testing::ValuesIn(model_table()),
                         name_of_model);

TEST(Fp8Scales, OfEveryForm) {
  LayerSpec spec = plain_spec();
  spec.shared_intermediate = 200;
  for (const ScaleForm& form : kScaleForms) {
    for (const int spread : {1, 20}) {
      SCOPED_TRACE(::testing::Message() << form.name << ", 2^+-" << spread);
      const Rescaled weights(fp8_weights(spec), form.rows, form.cols, spread);
      const Batch batch = routed_batch(spec, 70, DType::kBF16);
      const BatchResult alone =
          run_batch(spec, weights.get(), batch, Shares::even(70, 1), DType::kF32);
      expect_accurate_fp8(spec, weights.get(), batch, alone);
      EXPECT_TRUE(run_batch(spec, weights.get(), batch, Shares::even(70, 3), DType::kF32).output ==
                  alone.output);
    }
  }
}

TEST(Fp8Scales, OtherBlocksComputeInBf16OrNotAtAll) {
  const LayerSpec spec = plain_spec();
  const Rescaled weights(fp8_weights(spec), 64, 32, 0);
  LayerOptions options{.max_tokens = 4, .cpu = {.num_threads = 1}};
  EXPECT_EQ(MoeLayer(World::single(), spec, weights.get(), options).compute(), DType::kBF16);
  options.compute = kFp8;
  EXPECT_ERROR(MoeLayer(World::single(), spec, weights.get(), options), kUnsupported,
               "experts[0].gate", "64 x 32", "compute in bf16");
}

// The experts' outputs must all be seen, so none may be a shared one that hides them.
TEST(Fp8Values, BlocksOfZeros) {
  const LayerSpec spec = plain_spec();
  MoeWeights weights = fp8_weights(spec);
  std::deque<std::vector<std::uint8_t>> copies;
  for_each_matrix(weights, [&](MatrixView& m) {
    const auto* codes = static_cast<const std::uint8_t*>(m.data);
    std::vector<std::uint8_t>& copy = copies.emplace_back(codes, codes + m.rows * m.cols);
    for (std::int64_t r = 128; r < 256; ++r) {
      for (std::int64_t c = 128; c < 256; ++c) copy[static_cast<std::size_t>(r * m.cols + c)] = 0;
    }
    m.data = copy.data();
  });
  Batch batch = routed_batch(spec, 64, DType::kBF16);
  const auto zero = [&](std::int64_t token, std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c) batch.x.set(token * spec.hidden + c, 0);
  };
  for (std::int64_t t = 0; t < 20; ++t) zero(t, 0, 128);
  zero(20, 256, 320);
  zero(21, 0, 320);
  const BatchResult result = run_batch(spec, weights, batch, Shares::even(64, 2), DType::kF32);
  expect_accurate_fp8(spec, weights, batch, result);
  for (std::int64_t c = 0; c < spec.hidden; ++c) {
    ASSERT_EQ(result.output.get(21 * spec.hidden + c), 0);
  }
}

TEST(Fp8Values, FarFromOne) {
  const LayerSpec spec = plain_spec();
  const MoeWeights weights = fp8_weights(spec);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    SCOPED_TRACE(to_string(dtype));
    Batch batch = routed_batch(spec, 64, dtype);
    for (std::int64_t t = 0; t < 64; ++t) {
      // From one group to the next, too; and single values that dwarf their group.
      for (std::int64_t c = 0; c < spec.hidden; ++c) {
        const std::int64_t i = t * spec.hidden + c;
        batch.x.set(i, std::ldexp(batch.x.get(i), static_cast<int>((t + c / 128) % 24) - 12));
      }
      if (t % 3 == 0) batch.x.set(t * spec.hidden + 77, 60000);
    }
    expect_accurate_fp8(spec, weights, batch,
                        run_batch(spec, weights, batch, Shares::even(64, 2), DType::kF32));
  }
}

TEST(Fp8Values, NanAndInfinityStayWithTheirTokens) {
  expect_poison_stays(40, 39,
                      [](const LayerSpec& spec, const MoeWeights& weights, const Batch& batch) {
                        return run_batch(spec, weights, batch, Shares::even(40, 2), DType::kBF16);
                      });
}

TEST(Fp8Activations, QuantisedBeforehandGiveTheSameBits) {
  LayerSpec spec = plain_spec();
  spec.shared_intermediate = 200;
  for (const bool weight_on_input : {false, true}) {
    spec.weight_on_input = weight_on_input;
    const MoeWeights weights = fp8_weights(spec);
    Batch batch = routed_batch(spec, 131, DType::kBF16);
    batch.x.set(9 * spec.hidden + 7, INFINITY);
    const BatchResult wide = run_batch(spec, weights, batch, Shares::even(131, 1), DType::kBF16);
    Batch narrow = batch;
    narrow.x = Matrix::quantised(batch.x);
    for (const int ranks : {1, 2, 3}) {
      const BatchResult result =
          run_batch(spec, weights, narrow, Shares::even(131, ranks), DType::kBF16);
      EXPECT_TRUE(result.output == wide.output) << ranks << " ranks";
    }
  }
}

// Scales that no quantisation would have chosen are used as they are.
TEST(Fp8Activations, ScalesOfTheCaller) {
  const LayerSpec spec = plain_spec();
  const MoeWeights weights = fp8_weights(spec);
  const Batch batch = routed_batch(spec, 20, DType::kBF16);
  const Matrix quantised = Matrix::quantised(batch.x);
  // Rows and scales further apart than they need be.
  constexpr std::int64_t kStride = 400, kScales = 5;
  std::vector<std::uint8_t> codes(20 * kStride, 0x7f);
  std::vector<float> scales(20 * kScales, NAN);
  for (std::int64_t t = 0; t < 20; ++t) {
    std::memcpy(&codes[static_cast<std::size_t>(t * kStride)], quantised.view().row(t), 320);
    for (std::int64_t g = 0; g < 3; ++g) {
      scales[static_cast<std::size_t>(t * kScales + g)] =
          quantised.view().f32_scale()[t * 3 + g] * static_cast<float>(t + g + 1);
    }
  }
  ForwardInput input;
  input.activations = {codes.data(), kFp8, 20, 320, kStride, 1, scales.data(), 1, 128, kScales};
  input.topk_ids = batch.topk_ids;
  input.topk_weights = batch.topk_weights;
  BatchResult result = empty_result(spec, batch, 1, DType::kF32);
  result.ids = batch.topk_ids;
  result.weights = batch.topk_weights;
  ForwardOutput output;
  output.data = result.output.row(0);
  output.dtype = DType::kF32;
  MoeLayer(World::single(), spec, weights, {.max_tokens = 20}).forward(input, output);

  const reference::ReferenceInput problem{.activations = input.activations,
                                          .topk_ids = batch.topk_ids,
                                          .topk_weights = batch.topk_weights,
                                          .quantised = true};
  const auto expected = reference::forward(spec, weights, problem);
  const double yardstick = reference::relative_error(
      reference::straightforward_fp8(spec, weights, problem), expected.output);
  EXPECT_LE(reference::relative_error(result.output.floats(), expected.output), 2 * yardstick);
  EXPECT_LT(yardstick, 0.1);
}

TEST(Fp8Activations, AreRefusedWhereAGateNeedsMore) {
  LayerSpec spec = plain_spec();
  const Batch batch = routed_batch(spec, 8, DType::kBF16);
  Batch narrow = batch;
  narrow.x = Matrix::quantised(batch.x);
  Batch gated = narrow;
  gated.topk_ids.clear();
  gated.topk_weights.clear();
  const auto run = [&](const Batch& b, LayerOptions options = {}) {
    run_batch(spec, fp8_weights(spec), b, Shares::even(8, 1), DType::kBF16, options);
  };
  EXPECT_ERROR(run(gated), kInvalidArgument, "gate", "topk_ids");
  EXPECT_ERROR(run(narrow, {.compute = DType::kBF16}), kInvalidArgument, "computes in bf16",
               "make a layer that computes in f8_e4m3");
  spec.shared_intermediate = 64;
  spec.shared_sigmoid_gate = true;
  EXPECT_ERROR(run(narrow), kInvalidArgument, "shared expert's gate");
}

TEST(Fp8Stats, TokensTravelAsCodesAndScales) {
  const LayerSpec spec = plain_spec();
  const Batch batch = routed_batch(spec, 100, DType::kBF16);
  const BatchResult result =
      run_batch(spec, fp8_weights(spec), batch, Shares::even(100, 2), DType::kBF16);
  const std::uint64_t token = 320 + 16;  // three scales, padded
  for (int r = 0; r < 2; ++r) {
    std::uint64_t sent = 0, returned = 0;
    for (std::int64_t t = 0; t < 100; ++t) {
      const bool own = t / 50 == r;
      std::uint64_t elsewhere = 0;
      for (std::size_t k = 0; k < 2; ++k) {
        elsewhere += batch.topk_ids[static_cast<std::size_t>(t) * 2 + k] / 4 != t / 50 ? 1 : 0;
      }
      if (own && elsewhere > 0) sent += token + 4 * elsewhere;
      if (!own) returned += elsewhere * 320 * 2;
    }
    EXPECT_EQ(result.stats[static_cast<std::size_t>(r)].dispatch_bytes, sent);
    EXPECT_EQ(result.stats[static_cast<std::size_t>(r)].combine_bytes, returned);
  }
}

}  // namespace
}  // namespace switchyard::testing
