#include "routing/score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace switchyard::routing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(OrderKey, OrdersAsTheValuesDo) {
  const std::vector<float> ascending = {-kInfinity, -3e38f, -1.0f, -1e-40f,  0.0f,
                                        1e-40f,     1.0f,   3e38f, kInfinity};
  EXPECT_GT(order_key(ascending[0]), order_key(kNaN));
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    EXPECT_GT(order_key(ascending[i]), order_key(ascending[i - 1])) << ascending[i];
  }
  for (float value : ascending) EXPECT_EQ(value_of(order_key(value)), value);
}

TEST(OrderKey, ZerosAreEqualAndEveryNanIsNeverChosen) {
  EXPECT_EQ(order_key(-0.0f), order_key(0.0f));
  EXPECT_EQ(order_key(kNaN), kNeverChosen);
  EXPECT_EQ(order_key(-kNaN), kNeverChosen);
  EXPECT_EQ(order_key(float_of(0x7f800001u)), kNeverChosen);
}

// The largest relative error against fp64 over [low, high], in units of 2^-24.
template <typename Function, typename Exact>
double worst_error(float low, float high, Function function, Exact exact) {
  double worst = 0;
  constexpr int kSteps = 400'000;
  for (int i = 0; i <= kSteps; ++i) {
    const float x = low + (high - low) * (static_cast<float>(i) / kSteps);
    const double expected = exact(static_cast<double>(x));
    worst = std::max(worst, std::fabs(function(x) - expected) / expected);
  }
  return worst * 0x1p24;
}

TEST(Score, FunctionsAreAccurateToAFewRoundings) {
  // 1.5: one rounding of the result, and less than one for the polynomial. The others add a
  // division and a sum, or a logarithm and a root.
  EXPECT_LT(worst_error(-87.0f, 0.0f, exp_nonpositive, [](double x) { return std::exp(x); }), 1.5);
  EXPECT_LT(worst_error(-80.0f, 80.0f, sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }),
            3.5);
  EXPECT_LT(worst_error(-80.0f, 80.0f, sqrt_softplus,
                        [](double x) {
                          return std::sqrt(x > 0 ? x + std::log1p(std::exp(-x))
                                                 : std::log1p(std::exp(x)));
                        }),
            3.0);
}

TEST(Score, LimitsAreExact) {
  EXPECT_EQ(exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-kInfinity), 0.0f);
  EXPECT_EQ(exp_nonpositive(-1e30f), 0.0f);
  EXPECT_EQ(sigmoid(kInfinity), 1.0f);
  EXPECT_EQ(sigmoid(-kInfinity), 0.0f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
  EXPECT_EQ(sqrt_softplus(kInfinity), kInfinity);
  EXPECT_EQ(sqrt_softplus(-kInfinity), 0.0f);
  EXPECT_EQ(softmax_term(kInfinity, kInfinity), 1.0f);
  EXPECT_EQ(softmax_term(-kInfinity, 3.0f), 0.0f);
  EXPECT_EQ(softmax_term(kNaN, 3.0f), 0.0f);
}

TEST(SparseMixer, ClampsTheMagnitudeAgainstTheBestItself) {
  EXPECT_FALSE(sparse_mixer_drops(0.5f, 1.0f, 0.6f));    // 0.5 / max(0.5, 1), not 0.5 / 0.5
  EXPECT_FALSE(sparse_mixer_drops(-2.0f, -1.0f, 0.6f));  // 1 / max(2, -1)
  EXPECT_TRUE(sparse_mixer_drops(-1.0f, 0.0f, 0.6f));
  EXPECT_FALSE(sparse_mixer_drops(0.0f, 0.0f, 0.6f));  // 0 / 0
}

}  // namespace
}  // namespace switchyard::routing
