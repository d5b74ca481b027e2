#include "reference/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "model/errors.h"
#include "reference/decode.h"
#include "reference/multiply.h"
#include "support/specs.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::reference {
namespace {

using ::testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double silu(double x) { return x / (1 + std::exp(-x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Keeps the numbers that views point to.
class Store {
 public:
  MatrixView matrix(std::int64_t rows, std::int64_t cols, std::vector<float> values) {
    EXPECT_EQ(values.size(), static_cast<std::size_t>(rows * cols));
    values_.push_back(std::move(values));
    return {values_.back().data(), DType::kF32, rows, cols, cols};
  }
  VectorView vector(std::vector<float> values) {
    values_.push_back(std::move(values));
    return {values_.back().data(), DType::kF32, static_cast<std::int64_t>(values_.back().size())};
  }

 private:
  std::deque<std::vector<float>> values_;
};

void expect_values(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12) << i;
}

// ---- Decoders ----

TEST(Decode, KnownBitPatterns) {
  EXPECT_EQ(bf16_to_double(0x3f80), 1.0);
  EXPECT_EQ(bf16_to_double(0xc049), -3.140625);
  EXPECT_EQ(f16_to_double(0x3c00), 1.0);
  EXPECT_EQ(f16_to_double(0xc248), -3.140625);
  EXPECT_EQ(f16_to_double(0x0001), 0x1p-24);
  EXPECT_EQ(f16_to_double(0x7bff), 65504.0);
  EXPECT_EQ(f16_to_double(0xfc00), -kInfinity);
  EXPECT_TRUE(std::isnan(f16_to_double(0x7c01)));
  EXPECT_EQ(f8e4m3_to_double(0x38), 1.0);
  EXPECT_EQ(f8e4m3_to_double(0x01), 0x1p-9);
  EXPECT_EQ(f8e4m3_to_double(0x08), 0x1p-6);
  EXPECT_EQ(f8e4m3_to_double(0x7e), 448.0);
  EXPECT_EQ(f8e4m3_to_double(0xc4), -3.0);
  EXPECT_TRUE(std::isnan(f8e4m3_to_double(0x7f)));
  EXPECT_TRUE(std::isnan(f8e4m3_to_double(0xff)));
}

TEST(Decode, RoundsToTheNearestBf16TiesToEven) {
  EXPECT_EQ(round_to_bf16(1.0f + 0x1p-8f), 1.0f);                       // tie, down to even
  EXPECT_EQ(round_to_bf16(1.0f + 0x3p-8f), 1.0f + 0x1p-6f);             // tie, up to even
  EXPECT_EQ(round_to_bf16(1.0f + 0x1p-8f + 0x1p-20f), 1.0f + 0x1p-7f);  // above the tie
  EXPECT_EQ(round_to_bf16(-(1.0f + 0x1p-8f + 0x1p-20f)), -1.0f - 0x1p-7f);
  EXPECT_TRUE(std::isnan(round_to_bf16(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Decode, NearestF8E4M3InvertsDecodingAndRoundsTiesToEven) {
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    EXPECT_EQ(nearest_f8e4m3(f8e4m3_to_double(bits)), bits);
    if ((code & 0x7f) >= 0x7e) continue;
    const double here = f8e4m3_to_double(bits);
    const double next = f8e4m3_to_double(static_cast<std::uint8_t>(code + 1));
    const double middle = (here + next) / 2;
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(nearest_f8e4m3(middle), even) << code;
    EXPECT_EQ(nearest_f8e4m3(std::nextafter(middle, here)), code);
    EXPECT_EQ(nearest_f8e4m3(std::nextafter(middle, next)), code + 1);
  }
  EXPECT_EQ(nearest_f8e4m3(449), 0x7e);
  EXPECT_EQ(nearest_f8e4m3(-kInfinity), 0xfe);
}

TEST(Decode, BlockScalesStridesAndTransposes) {
  const std::uint8_t fp8[] = {0x38, 0x40, 0x44, 0x48, 0x38, 0x40};  // 1 2 3 / 4 1 2
  const float scales[] = {10, 100, 1000, 10000};
  MatrixView view{fp8, DType::kF8E4M3, 2, 3, 3};
  view.scale = scales;
  view.scale_rows = 1;
  view.scale_cols = 2;
  view.scale_stride = 2;
  std::vector<double> row(3);
  decode_row(view, 0, row.data());
  EXPECT_THAT(row, ElementsAre(10, 20, 300));
  decode_row(view, 1, row.data());
  EXPECT_THAT(row, ElementsAre(4000, 1000, 20000));

  const std::uint16_t bf16[] = {0x3f80, 0x4000, 0x4040, 0x4080};  // 1 2 3 4
  decode_row({bf16, DType::kBF16, 2, 2, 1, 2}, 1, row.data());    // transposed
  EXPECT_EQ(row[0], 2);
  EXPECT_EQ(row[1], 4);

  EXPECT_THROW(decode_row({bf16, DType::kI32, 1, 1, 1}, 0, row.data()), Error);
}

TEST(Multiply, EveryRemainderOfTheBlocking) {
  // Small integers, so that any order of the sum is exact.
  std::mt19937 random(3);
  for (int num_tokens : {1, 2, 3, 4, 5, 9}) {
    for (int num_rows : {1, 3, 4, 6, 16}) {
      for (int length : {1, 7, 8, 31, 64}) {
        std::vector<double> x(num_tokens * length), w(num_rows * length);
        for (double& value : x) value = static_cast<double>(random() % 17) - 8;
        for (double& value : w) value = static_cast<double>(random() % 17) - 8;
        std::vector<double> out(num_tokens * 20, -1);
        multiply(x.data(), num_tokens, w.data(), num_rows, length, out.data(), 20);
        for (int t = 0; t < num_tokens; ++t) {
          for (int r = 0; r < 20; ++r) {
            double expected = r < num_rows ? 0 : -1;
            for (int c = 0; r < num_rows && c < length; ++c) {
              expected += x[t * length + c] * w[r * length + c];
            }
            ASSERT_EQ(out[t * 20 + r], expected) << num_tokens << num_rows << length;
          }
        }
      }
    }
  }
}

// ---- One expert, H = I = 1: out = w * (down * h(gate x, up x)) ----

double one_by_one(const Activation& activation, double gate, double up) {
  Store store;
  LayerSpec spec = testing::spec_of(1, 1, 1, 1);
  spec.activation = activation;
  MoeWeights weights;
  weights.experts.resize(1);
  if (activation.gated) weights.experts[0].gate = store.matrix(1, 1, {static_cast<float>(gate)});
  weights.experts[0].up = store.matrix(1, 1, {static_cast<float>(up)});
  weights.experts[0].down = store.matrix(1, 1, {1});
  const std::vector<std::int32_t> ids = {0};
  const std::vector<float> ones = {1};
  ReferenceInput input;
  input.activations = store.matrix(1, 1, {1});
  input.topk_ids = ids;
  input.topk_weights = ones;
  return forward(spec, weights, input).output.at(0);
}

TEST(Activations, Gated) {
  Activation a;
  EXPECT_NEAR(one_by_one(a, 2, -3), silu(2) * -3, 1e-12);
  a.kind = ActivationKind::kGelu;
  EXPECT_NEAR(one_by_one(a, 1, 1), 0.8413447460685429, 1e-12);    // the normal distribution at 1
  EXPECT_NEAR(one_by_one(a, -1, 2), -0.3173105078629141, 1e-12);  // -2 (1 - that)
  a.kind = ActivationKind::kGeluTanh;
  EXPECT_NEAR(one_by_one(a, 1, 1),
              0.5 * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * 1.044715)), 1e-12);
  a.kind = ActivationKind::kRelu;
  EXPECT_EQ(one_by_one(a, 2, 3), 6);
  EXPECT_EQ(one_by_one(a, -2, 3), 0);
  a.kind = ActivationKind::kRelu2;
  EXPECT_EQ(one_by_one(a, 2, 3), 12);
  EXPECT_EQ(one_by_one(a, -2, 3), 0);
  a.kind = ActivationKind::kIdentity;
  EXPECT_EQ(one_by_one(a, -2, 3), -6);
}

TEST(Activations, Plain) {
  Activation a{.gated = false};
  EXPECT_NEAR(one_by_one(a, 0, 2), silu(2), 1e-12);
  a.kind = ActivationKind::kRelu2;
  EXPECT_EQ(one_by_one(a, 0, 3), 9);
  EXPECT_EQ(one_by_one(a, 0, -3), 0);
}

TEST(Activations, ClampedSwiGlu) {
  Activation a;  // GPT-OSS
  a.alpha = 1.702f;
  a.limit = 7;
  a.up_bias = 1;
  const double alpha = a.alpha;
  EXPECT_NEAR(one_by_one(a, 2, 3), 2 * sigmoid(2 * alpha) * 4, 1e-12);
  EXPECT_NEAR(one_by_one(a, 9, 3), 7 * sigmoid(7 * alpha) * 4, 1e-12);
  EXPECT_NEAR(one_by_one(a, 2, 9), 2 * sigmoid(2 * alpha) * 8, 1e-12);
  EXPECT_NEAR(one_by_one(a, 2, -9), 2 * sigmoid(2 * alpha) * -6, 1e-12);
  // The gate has no lower bound.
  EXPECT_NEAR(one_by_one(a, -9, 3), -9 * sigmoid(-9 * alpha) * 4, 1e-12);
}

TEST(Activations, Situ) {
  Activation a;  // Kimi-K3
  a.kind = ActivationKind::kSitu;
  a.alpha = 4;
  EXPECT_NEAR(one_by_one(a, 2, 30), 4 * std::tanh(0.5) * sigmoid(2) * 30, 1e-12);
  a.limit = 25;
  EXPECT_NEAR(one_by_one(a, 2, 30), 4 * std::tanh(0.5) * sigmoid(2) * 25 * std::tanh(1.2), 1e-12);
  EXPECT_NEAR(one_by_one(a, -300, 3), 0, 1e-12);
  EXPECT_NEAR(one_by_one(a, 300, -1e9), 4 * -25.0, 1e-12);
}

// ---- Two experts, identity activation, so that whole layers can be done by hand ----
//
// Plain FFN without gate, H = 2, I = 1: y_0(x) = (1, 2) (x0 + x1), y_1(x) = (10, -1) (x0 - x1).

class TwoExperts : public ::testing::Test {
 protected:
  TwoExperts() {
    spec = testing::spec_of(2, 1, 2, 2);
    spec.activation.kind = ActivationKind::kIdentity;
    spec.activation.gated = false;
    weights.experts.resize(2);
    weights.experts[0].up = store.matrix(1, 2, {1, 1});
    weights.experts[0].down = store.matrix(2, 1, {1, 2});
    weights.experts[1].up = store.matrix(1, 2, {1, -1});
    weights.experts[1].down = store.matrix(2, 1, {10, -1});
    input.activations = store.matrix(2, 2, {3, 1, 5, 2});
    input.topk_ids = ids;
    input.topk_weights = routing_weights;
  }

  Store store;
  LayerSpec spec;
  MoeWeights weights;
  ReferenceInput input;
  std::vector<std::int32_t> ids = {1, 0, 0, kNoExpert};
  std::vector<float> routing_weights = {0.5f, 2.0f, 0.25f, 100.0f};
};

TEST_F(TwoExperts, WeightedSum) {
  // Token 0: .5 (10, -1) 2 + 2 (1, 2) 4; token 1: .25 (1, 2) 7.
  const ReferenceOutput result = forward(spec, weights, input);
  expect_values(result.output, {18, 15, 1.75, 3.5});
  EXPECT_EQ(result.ids, ids);
  EXPECT_EQ(result.num_dropped, 0);
}

TEST_F(TwoExperts, Biases) {
  spec.expert_bias = true;
  weights.experts[0].up_bias = store.vector({1});
  weights.experts[0].down_bias = store.vector({0.5f, -0.5f});
  // Expert 0: (1, 2) (x0 + x1 + 1) + (.5, -.5); expert 1 as before.
  expect_values(forward(spec, weights, input).output,
                {10 + 2 * 5.5, -1 + 2 * 9.5, 0.25 * 8.5, 0.25 * 15.5});
}

TEST_F(TwoExperts, WeightOnInput) {
  spec.weight_on_input = true;
  spec.activation.kind = ActivationKind::kRelu2;
  // Token 0: (10, -1) (.5 * 2)^2 + (1, 2) (2 * 4)^2; token 1: (1, 2) (.25 * 7)^2.
  expect_values(forward(spec, weights, input).output, {74, 127, 3.0625, 6.125});
}

TEST_F(TwoExperts, SharedExpert) {
  spec.shared_intermediate = 2;
  weights.shared.up = store.matrix(2, 2, {1, 0, 0, 1});
  weights.shared.down = store.matrix(2, 2, {1, 0, 0, 1});
  expect_values(forward(spec, weights, input).output, {18 + 3, 15 + 1, 1.75 + 5, 3.5 + 2});

  spec.shared_sigmoid_gate = true;
  weights.shared_gate = store.vector({0.5f, -1});  // sigmoid(.5), sigmoid(.5)
  const double s = sigmoid(0.5);
  expect_values(forward(spec, weights, input).output,
                {18 + 3 * s, 15 + s, 1.75 + 5 * s, 3.5 + 2 * s});

  // The routing weight never reaches the shared expert's input.
  spec.weight_on_input = true;
  expect_values(forward(spec, weights, input).output,
                {18 + 3 * s, 15 + s, 1.75 + 5 * s, 3.5 + 2 * s});
}

TEST_F(TwoExperts, CapacityDropsInTokenOrderPerRank) {
  input.activations = store.matrix(4, 2, {1, 0, 2, 0, 3, 0, 4, 0});
  ids = {0, 1, 0, 1, 0, 1, 0, kNoExpert};
  routing_weights = {1, 0, 1, 0, 1, 0, 1, 0};
  input.topk_ids = ids;
  input.topk_weights = routing_weights;
  // ceil(.5 * 2 * 4 / 2) = 2 slots of each expert: tokens 2 and 3 lose expert 0, token 2 expert 1.
  spec.capacity_factor = 0.5f;
  ReferenceOutput result = forward(spec, weights, input);
  expect_values(result.output, {1, 2, 2, 4, 0, 0, 0, 0});
  EXPECT_EQ(result.num_dropped, 3);
  EXPECT_EQ(result.ids, ids);

  // Two ranks: ceil(.5 * 2 * 1 / 2) = 1 slot of the first's one token, ceil(.5 * 2 * 3 / 2) = 2 of
  // the second's three.
  const std::vector<std::int64_t> tokens_per_rank = {1, 3};
  input.tokens_per_rank = tokens_per_rank;
  result = forward(spec, weights, input);
  expect_values(result.output, {1, 2, 2, 4, 3, 6, 0, 0});
  EXPECT_EQ(result.num_dropped, 1);

  // By tokens: ceil(.5 * 1 / 2) = 1 slot, ceil(.5 * 3 / 2) = 1.
  spec.capacity_rule = CapacityRule::kTokens;
  result = forward(spec, weights, input);
  expect_values(result.output, {1, 2, 2, 4, 0, 0, 0, 0});
  EXPECT_EQ(result.num_dropped, 3);

  const std::vector<std::int64_t> too_many = {1, 4};
  input.tokens_per_rank = too_many;
  EXPECT_THROW(forward(spec, weights, input), Error);
}

TEST_F(TwoExperts, GateWithBias) {
  input.topk_ids = {};
  input.topk_weights = {};
  spec.top_k = 1;
  spec.router_bias = true;
  spec.routing.renormalize = true;
  weights.router = store.matrix(2, 2, {1, 0, 0, 1});
  weights.router_bias = store.vector({0, 2.5f});  // logits (3, 3.5), (5, 4.5)
  expect_values(router_logits(spec, weights, input.activations), {3, 3.5, 5, 4.5});
  const ReferenceOutput result = forward(spec, weights, input);
  EXPECT_THAT(result.ids, ElementsAre(1, 0));
  expect_values(result.output, {20, -2, 7, 14});
}

TEST_F(TwoExperts, HashTable) {
  input.topk_ids = {};
  input.topk_weights = {};
  spec.top_k = 1;
  spec.routing.method = RoutingMethod::kHash;
  spec.routing.renormalize = true;
  weights.router = store.matrix(2, 2, {1, 0, 0, 1});
  const std::int64_t table[] = {1, 0, 0, 1};
  weights.hash_table = {table, DType::kI64, 4, 1, 1};
  const std::vector<std::int32_t> token_ids = {3, 1};
  input.token_ids = token_ids;
  const ReferenceOutput result = forward(spec, weights, input);
  EXPECT_THAT(result.ids, ElementsAre(1, 0));
  expect_values(result.output, {20, -2, 7, 14});

  const std::vector<std::int32_t> outside = {3, 4};
  input.token_ids = outside;
  EXPECT_THROW(forward(spec, weights, input), Error);

  const std::int64_t damaged[] = {1, 0, 0, std::int64_t{1} << 40};
  weights.hash_table.data = damaged;
  input.token_ids = token_ids;
  EXPECT_ERROR(forward(spec, weights, input), kInvalidArgument,
               "expert 1099511627776 for token id 3");
}

TEST_F(TwoExperts, RejectsWhatDoesNotFit) {
  ids[2] = 2;
  EXPECT_THROW(forward(spec, weights, input), Error);
  ids[2] = 0;
  weights.experts[1].down = store.matrix(1, 2, {1, 1});
  EXPECT_THROW(forward(spec, weights, input), Error);
  weights.experts.pop_back();
  EXPECT_THROW(forward(spec, weights, input), Error);
}

TEST_F(TwoExperts, NoTokens) {
  input.activations.rows = 0;
  input.topk_ids = {};
  input.topk_weights = {};
  EXPECT_TRUE(forward(spec, weights, input).output.empty());
}

// ---- Larger layers ----

class RandomLayer : public ::testing::Test {
 protected:
  static constexpr int kTokens = 70;

  RandomLayer() {
    spec = testing::spec_of(96, 40, 6, 3);
    spec.shared_intermediate = 56;
    std::mt19937 random(11);
    const auto draw = [&](std::int64_t rows, std::int64_t cols) {
      std::vector<float> values(rows * cols);
      std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(cols)));
      for (float& value : values) value = round_to_bf16(normal(random));
      return store.matrix(rows, cols, std::move(values));
    };
    for (int e = 0; e < spec.num_experts; ++e) {
      weights.experts.push_back({draw(40, 96), draw(40, 96), draw(96, 40), {}, {}, {}});
    }
    weights.shared = {draw(56, 96), draw(56, 96), draw(96, 56), {}, {}, {}};
    weights.router = draw(6, 96);
    input.activations = draw(kTokens, 96);
  }

  Store store;
  LayerSpec spec;
  MoeWeights weights;
  ReferenceInput input;
};

double element(const MatrixView& matrix, std::int64_t r, std::int64_t c) {
  return static_cast<const float*>(matrix.row(r))[c];
}

std::vector<double> naive_ffn(const FfnWeights& ffn, const MatrixView& x, std::int64_t t) {
  std::vector<double> y(ffn.down.rows, 0.0);
  for (std::int64_t i = 0; i < ffn.up.rows; ++i) {
    double gate = 0, up = 0;
    for (std::int64_t c = 0; c < x.cols; ++c) {
      gate += element(ffn.gate, i, c) * element(x, t, c);
      up += element(ffn.up, i, c) * element(x, t, c);
    }
    for (std::int64_t r = 0; r < ffn.down.rows; ++r) {
      y[r] += element(ffn.down, r, i) * silu(gate) * up;
    }
  }
  return y;
}

TEST_F(RandomLayer, AgreesWithTheNaiveLoops) {
  const ReferenceOutput result = forward(spec, weights, input);
  for (int t = 0; t < kTokens; ++t) {
    std::vector<double> expected = naive_ffn(weights.shared, input.activations, t);
    for (int k = 0; k < spec.top_k; ++k) {
      const auto y = naive_ffn(weights.experts[result.ids[t * 3 + k]], input.activations, t);
      for (std::size_t r = 0; r < y.size(); ++r) expected[r] += result.weights[t * 3 + k] * y[r];
    }
    for (std::size_t r = 0; r < expected.size(); ++r) {
      ASSERT_NEAR(result.output[t * 96 + r], expected[r], 1e-12) << "token " << t;
    }
  }
}

TEST_F(RandomLayer, GivenTheGatesOwnRoutingGivesTheSameOutput) {
  const ReferenceOutput gated = forward(spec, weights, input);
  const std::vector<float> as_floats(gated.weights.begin(), gated.weights.end());
  input.topk_ids = gated.ids;
  input.topk_weights = as_floats;
  EXPECT_LT(relative_error(forward(spec, weights, input).output, gated.output), 1e-7);
}

TEST_F(RandomLayer, Bf16ErrorIsOfTheSizeOfBf16Rounding) {
  const std::vector<double> exact = forward(spec, weights, input).output;
  const std::vector<float> rounded = straightforward_bf16(spec, weights, input);
  for (float value : rounded) ASSERT_EQ(value, round_to_bf16(value));
  // Rounding h, y and the output costs up to 2^-9 each; inputs are bf16 already.
  const double error = relative_error(rounded, exact);
  EXPECT_GT(error, 0x1p-11);
  EXPECT_LT(error, 3 * 0x1p-9);
}

// Values of one group as they are after quantisation, by trying all codes. Of bf16 values one in
// two hundred is in the middle of two codes (3/4 of the largest, say), so it matters in what
// precision they are scaled: activations in fp32, h in fp64.
template <typename Real>
std::vector<double> naive_quantised(const std::vector<double>& values) {
  double amax = 0;
  for (double value : values) amax = std::max(amax, std::abs(value));
  const Real inverse = 448 / static_cast<Real>(amax);
  std::vector<double> result;
  for (double value : values) {
    const double scaled = static_cast<Real>(value) * inverse;
    double nearest = kInfinity;
    for (int code = 0; code < 256; ++code) {
      const double candidate = f8e4m3_to_double(static_cast<std::uint8_t>(code));
      const double gain = std::abs(nearest - scaled) - std::abs(candidate - scaled);
      if (gain > 0 || (gain == 0 && code % 2 == 0)) nearest = candidate;
    }
    result.push_back(nearest * amax / 448);
  }
  return result;
}

// One group of activations and one of h: both are quantised, and nothing else is.
TEST_F(RandomLayer, QuantisedAgreesWithTheNaiveLoops) {
  spec.shared_intermediate = 0;
  input.quantised = true;
  const ReferenceOutput result = forward(spec, weights, input);
  std::vector<double> expected(result.output.size(), 0.0);
  for (int t = 0; t < kTokens; ++t) {
    std::vector<double> x(96);
    for (int c = 0; c < 96; ++c) x[c] = element(input.activations, t, c);
    x = naive_quantised<float>(x);
    for (int k = 0; k < spec.top_k; ++k) {
      const FfnWeights& ffn = weights.experts[result.ids[t * 3 + k]];
      std::vector<double> h(40);
      for (int i = 0; i < 40; ++i) {
        double gate = 0, up = 0;
        for (int c = 0; c < 96; ++c) {
          gate += element(ffn.gate, i, c) * x[c];
          up += element(ffn.up, i, c) * x[c];
        }
        h[i] = silu(gate) * up;
      }
      h = naive_quantised<double>(h);
      for (int r = 0; r < 96; ++r) {
        for (int i = 0; i < 40; ++i) {
          expected[t * 96 + r] += result.weights[t * 3 + k] * element(ffn.down, r, i) * h[i];
        }
      }
    }
  }
  EXPECT_LT(relative_error(result.output, expected), 1e-6);

  // Routed as without: the gate sees what the experts do not.
  input.quantised = false;
  const ReferenceOutput plain = forward(spec, weights, input);
  EXPECT_EQ(result.ids, plain.ids);
  const double loss = relative_error(result.output, plain.output);
  EXPECT_GT(loss, 0.01);
  EXPECT_LT(loss, 0.06);
}

TEST_F(RandomLayer, Fp8ErrorIsThatOfRoundingAndWhatItTurnsOver) {
  input.quantised = true;
  const std::vector<double> exact = forward(spec, weights, input).output;
  const std::vector<float> rounded = straightforward_fp8(spec, weights, input);
  for (float value : rounded) ASSERT_EQ(value, round_to_bf16(value));
  // Where h is near the middle of two codes, rounding it to bf16 decides for the wrong one.
  const double error = relative_error(rounded, exact);
  EXPECT_GT(error, 0x1p-10);
  EXPECT_LT(error, 0x1p-6);
}

TEST_F(RandomLayer, IsDeterministic) {
  EXPECT_EQ(forward(spec, weights, input).output, forward(spec, weights, input).output);
  EXPECT_EQ(straightforward_bf16(spec, weights, input), straightforward_bf16(spec, weights, input));
}

TEST(RoutingMargin, IsTheSmallestDecidingGap) {
  LayerSpec spec = testing::spec_of(1, 1, 4, 2);
  spec.routing.top_k_before_score = true;
  const auto margin = [&](std::vector<double> logits, std::vector<float> bias = {}) {
    return routing_margin(spec, logits, bias).at(0);
  };
  EXPECT_DOUBLE_EQ(margin({4, 2, 1, 0}), 0.5);      // first to second and second to third
  EXPECT_DOUBLE_EQ(margin({4, 3, 0, 0}), 0.25);     // order of the two chosen
  EXPECT_DOUBLE_EQ(margin({8, 4, 3.5, 0}), 0.125);  // last in to first out
  EXPECT_EQ(margin({8, 4, 4, 0}), 0);

  // 1 + 3 against 7 - 3: the gap counts against |1| + |3| and |7| + |3|.
  spec.top_k = 1;
  spec.routing.has_correction_bias = true;
  EXPECT_DOUBLE_EQ(margin({1, 6, -9, -9}, {3, -3, 0, 0}), 1.0 / 9);

  spec.routing.num_groups = 2;
  spec.routing.top_k_groups = 1;
  // Groups: 8 + 1 against 4 + 4.5; winners 8 against 1.
  EXPECT_DOUBLE_EQ(margin({8, 1, 4, 4.5}, {0, 0, 0, 0}), 0.5 / 9);

  spec.routing = {};
  spec.routing.method = RoutingMethod::kSparseMixer;
  spec.routing.jitter_eps = 0.25f;
  // (4 - 1.5) / 4 = .625 is .125 from the threshold of .5; all else is further.
  EXPECT_DOUBLE_EQ(margin({4, 1.5, 1, 0}), 0.125);

  spec.num_experts = 1;
  EXPECT_EQ(routing_margin(spec, std::vector<double>{3}, {}).at(0), 0.5);
}

TEST(RelativeError, Frobenius) {
  const std::vector<double> expected = {3, 4}, zero = {0, 0};
  EXPECT_DOUBLE_EQ(relative_error(std::vector<float>{3, 4.5f}, expected), 0.1);
  EXPECT_EQ(relative_error(expected, expected), 0);
  EXPECT_EQ(relative_error(zero, zero), 0);
  EXPECT_EQ(relative_error(expected, zero), kInfinity);
  EXPECT_TRUE(std::isnan(relative_error(std::vector<float>{NAN, 4}, expected)));
  EXPECT_THROW(relative_error(std::vector<float>{1}, expected), Error);
}

}  // namespace
}  // namespace switchyard::reference
