#include "routing/route.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "model/errors.h"
#include "reference/reference.h"
#include "routing/families.h"
#include "support/identifier.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

using test::Family;
using test::routing_layer;
using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::int64_t num_nan = 0;
};

Routed run(const LayerSpec& spec, const std::vector<float>& logits,
           const std::vector<float>& bias = {}, const std::vector<std::int32_t>& hashed = {}) {
  const std::size_t num_slots = logits.size() / spec.num_experts * spec.top_k;
  Routed result{std::vector<std::int32_t>(num_slots, -7), std::vector<float>(num_slots, kNaN)};
  result.num_nan = route(spec, logits, bias, hashed, result.ids, result.weights);
  return result;
}

void expect_weights(const std::vector<float>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 5e-7 * std::max(1.0, expected[i])) << "slot " << i;
  }
}

// ---- Every family against fp64 ----

class AgainstReference : public ::testing::TestWithParam<Family> {};

TEST_P(AgainstReference, IdsAndWeightsAgree) {
  const LayerSpec& spec = GetParam().spec;
  constexpr int kTokens = 3000;
  std::mt19937 random(20240607);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(static_cast<std::size_t>(kTokens) * spec.num_experts);
  for (float& logit : logits) logit = normal(random);
  std::vector<float> bias;
  if (spec.routing.has_correction_bias) {
    for (int e = 0; e < spec.num_experts; ++e) bias.push_back(0.1f * normal(random));
  }
  std::vector<std::int32_t> hashed;
  if (spec.routing.method == RoutingMethod::kHash) {
    for (int i = 0; i < kTokens * spec.top_k; ++i) {
      hashed.push_back(static_cast<std::int32_t>(random() % spec.num_experts));
    }
  }

  const Routed actual = run(spec, logits, bias, hashed);
  const std::vector<double> exact_logits(logits.begin(), logits.end());
  const reference::Routing expected = reference::route(spec, exact_logits, bias, hashed);
  const std::vector<double> margins = reference::routing_margin(spec, exact_logits, bias);

  EXPECT_EQ(actual.num_nan, 0);
  int num_near_ties = 0;
  for (int t = 0; t < kTokens; ++t) {
    if (margins[t] < 1e-6) {
      ++num_near_ties;
      continue;
    }
    for (int k = 0; k < spec.top_k; ++k) {
      const std::size_t slot = static_cast<std::size_t>(t) * spec.top_k + k;
      ASSERT_EQ(actual.ids[slot], expected.ids[slot]) << "token " << t << ", slot " << k;
      ASSERT_NEAR(actual.weights[slot], expected.weights[slot], 1e-6 * spec.routing.scale)
          << "token " << t << ", slot " << k;
    }
  }
  // A margin that excuses everything would test nothing.
  EXPECT_LT(num_near_ties, kTokens / 100);
}

INSTANTIATE_TEST_SUITE_P(Families, AgainstReference, ::testing::ValuesIn(test::families()),
                         [](const ::testing::TestParamInfo<Family>& param_info) {
                           return testing::identifier(param_info.param.name);
                         });

// ---- Values worked out by hand (exp, log and sums in double precision outside this program) ----

TEST(Golden, SoftmaxOverAll) {
  // e^3 / (e + e^3 + e^2 + 1), e^2 / (e + e^3 + e^2 + 1)
  const Routed r = run(routing_layer(4, 2, {}), {1, 3, 2, 0});
  EXPECT_THAT(r.ids, ElementsAre(1, 2));
  expect_weights(r.weights, {0.6439142599, 0.2368828181});
}

TEST(Golden, SoftmaxRenormalized) {
  RoutingSpec routing{.renormalize = true};
  // 1 / (1 + e^-1), e^-1 / (1 + e^-1)
  const Routed r = run(routing_layer(4, 2, routing), {1, 3, 2, 0});
  EXPECT_THAT(r.ids, ElementsAre(1, 2));
  expect_weights(r.weights, {0.7310585786, 0.2689414214});

  // With p = (0.6439142599, 0.2368828181): p / (sum p + 0.5).
  routing.renormalize_epsilon = 0.5f;
  expect_weights(run(routing_layer(4, 2, routing), {1, 3, 2, 0}).weights,
                 {0.6439142599 / 1.380797078, 0.2368828181 / 1.380797078});
}

TEST(Golden, DeepSeekV3ChoosesWithBiasAmongTheBestGroupsAndWeighsWithout) {
  const RoutingSpec routing{.score = ScoreFunction::kSigmoid,
                            .renormalize = true,
                            .renormalize_epsilon = 1e-20f,
                            .has_correction_bias = true,
                            .num_groups = 4,
                            .top_k_groups = 2,
                            .scale = 2.5f};
  // s = sigmoid(logits); s + bias = .550 .701 | .218 .219 | .761 .640 | .769 .325; sums of two:
  // 1.251, .437, 1.401, 1.094: groups 2 and 0 compete. The best expert of all, 6, does not.
  // weights = 2.5 (s4, s1, s5) / (s4 + s1 + s5) = 2.5 (.710950, .401312, .689974) / 1.802237
  const Routed r =
      run(routing_layer(8, 3, routing), {0.2f, -0.4f, 1.5f, -2.0f, 0.9f, 0.8f, -1.0f, 0.1f},
          {0.0f, 0.3f, -0.6f, 0.1f, 0.05f, -0.05f, 0.5f, -0.2f});
  EXPECT_THAT(r.ids, ElementsAre(4, 1, 5));
  expect_weights(r.weights, {0.9862046022, 0.5566866213, 0.9571087766});
}

TEST(Golden, DeepSeekV2GroupsByTheirBestExpert) {
  // Group 1 has the largest sum, but its best, 1.2, is below 2.0 and 1.9. The weights are 16 times
  // the softmax over all nine.
  const Routed r = run(
      routing_layer(
          9, 3,
          {.num_groups = 3, .top_k_groups = 2, .group_score = GroupScore::kMax, .scale = 16.0f}),
      {2, 0, 0.1f, 1, 1.1f, 1.2f, -1, 1.9f, -1});
  EXPECT_THAT(r.ids, ElementsAre(0, 7, 2));
  expect_weights(r.weights, {4.5543905673, 4.1209830017, 0.6811939086});
}

TEST(Golden, GptOssSoftmaxOverTheChosen) {
  // e^l / (e^2 + e^1 + e^.75 + e^.5)
  const Routed r = run(routing_layer(6, 4, {.top_k_before_score = true}),
                       {0.5f, -1.25f, 2.0f, 0.75f, 1.0f, -3.0f});
  EXPECT_THAT(r.ids, ElementsAre(2, 4, 3, 0));
  expect_weights(r.weights, {0.5326190846, 0.1959396112, 0.1525979226, 0.1188433816});
}

TEST(Golden, Llama4SigmoidOfTheBest) {
  const Routed r =
      run(routing_layer(5, 1, {.score = ScoreFunction::kSigmoid, .top_k_before_score = true}),
          {0.5f, -1.25f, -2.0f, 0.75f, 0.7f});
  EXPECT_THAT(r.ids, ElementsAre(3));
  expect_weights(r.weights, {0.6791786992});  // 1 / (1 + e^-.75)
}

TEST(Golden, SparseMixer) {
  RoutingSpec routing{.method = RoutingMethod::kSparseMixer, .jitter_eps = 0.01f};
  // Threshold 0.02: 0.5 is dropped. 1 / (1 + e^-.01 + e^-.015), then 1 / (1 + e^-.005).
  Routed r = run(routing_layer(4, 2, routing), {1.0f, 0.99f, 0.5f, 0.985f});
  EXPECT_THAT(r.ids, ElementsAre(0, 1));
  expect_weights(r.weights, {0.3361161766, 0.5012499974});

  // The same distances from a negative best: the factor is |score|.
  r = run(routing_layer(4, 2, routing), {-2.0f, -1.0f, -1.01f, -1.015f});
  EXPECT_THAT(r.ids, ElementsAre(1, 2));
  expect_weights(r.weights, {0.3361161766, 0.5012499974});

  // A best of 0 keeps its equals, whose distance is 0 / 0, and drops all else.
  r = run(routing_layer(4, 2, routing), {0.0f, -1.0f, 0.0f, -0.5f});
  EXPECT_THAT(r.ids, ElementsAre(0, 2));
  expect_weights(r.weights, {0.5, 1.0});

  // Threshold 0.6. (1 - .5) / max(.5, 1) keeps .5; (1 - .3) / 1 drops .3; then (.5 - .3) / .5 keeps
  // it: 1 / (1 + e^-.5), 1 / (1 + e^-.2).
  routing.jitter_eps = 0.3f;
  r = run(routing_layer(4, 2, routing), {1.0f, 0.5f, 0.3f, -4.0f});
  EXPECT_THAT(r.ids, ElementsAre(0, 1));
  expect_weights(r.weights, {0.6224593312, 0.5498339973});

  // (-1 + 2) / max(2, -1) = .5 keeps -2 and (-1 + 3) / 3 drops -3; then 1 / 3 keeps -3, and
  // (-2 + 9) / 9 drops -9: 1 / (1 + e^-1) twice.
  r = run(routing_layer(4, 2, routing), {-2.0f, -1.0f, -3.0f, -9.0f});
  EXPECT_THAT(r.ids, ElementsAre(1, 0));
  expect_weights(r.weights, {0.7310585786, 0.7310585786});
}

TEST(Golden, DeepSeekV4SqrtSoftplusAndHash) {
  RoutingSpec routing{.score = ScoreFunction::kSqrtSoftplus, .renormalize = true, .scale = 1.5f};
  const std::vector<float> logits = {0.3f, -1.0f, 2.0f, 0.0f, 1.0f};
  // 1.5 r / sum(r) with r = sqrt(ln(1 + e^l)): (1.458399, 1.145976) and (.832555, .559698).
  Routed r = run(routing_layer(5, 2, routing), logits);
  EXPECT_THAT(r.ids, ElementsAre(2, 4));
  expect_weights(r.weights, {0.8399705605, 0.6600294395});

  routing.method = RoutingMethod::kHash;
  r = run(routing_layer(5, 2, routing), logits, {}, {3, 1});
  EXPECT_THAT(r.ids, ElementsAre(3, 1));
  expect_weights(r.weights, {0.8969866804, 0.6030133196});
}

// ---- Ties ----

TEST(Ties, GoToTheLowerIndex) {
  for (const Family& family : test::families()) {
    const LayerSpec& spec = family.spec;
    if (spec.routing.method == RoutingMethod::kHash) continue;
    const std::vector<float> logits(spec.num_experts, 0.25f);
    const std::vector<float> bias(spec.routing.has_correction_bias ? spec.num_experts : 0, 0.5f);
    const Routed r = run(spec, logits, bias);
    for (int k = 0; k < spec.top_k; ++k) EXPECT_EQ(r.ids[k], k) << family.name;
  }
}

TEST(Ties, AmongSomeAndAcrossBlocks) {
  std::vector<float> logits(70, -1.0f);
  logits[69] = logits[3] = logits[17] = logits[16] = 2.0f;
  logits[40] = 3.0f;
  EXPECT_THAT(run(routing_layer(70, 6, {}), logits).ids, ElementsAre(40, 3, 16, 17, 69, 0));
}

TEST(Ties, ZerosOfEitherSignAreEqual) {
  EXPECT_THAT(run(routing_layer(4, 3, {}), {-0.0f, 0.0f, -0.0f, 0.0f}).ids, ElementsAre(0, 1, 2));
}

TEST(Ties, RoundingOfScoresMakesNone) {
  // All of these have the fp32 sigmoid 1.
  EXPECT_THAT(run(routing_layer(4, 2, {.score = ScoreFunction::kSigmoid}), {18, 20, 19, 21}).ids,
              ElementsAre(3, 1));
}

TEST(Ties, BetweenGroups) {
  EXPECT_THAT(run(routing_layer(
                      6, 2, {.score = ScoreFunction::kSigmoid, .num_groups = 3, .top_k_groups = 1}),
                  {0, 0, 1, 2, 2, 1})
                  .ids,
              ElementsAre(3, 2));
}

// ---- Groups ----

TEST(Groups, ExpertsOutsideAreNoCandidatesEvenIfSlotsStayEmpty) {
  const Routed r =
      run(routing_layer(8, 3, {.renormalize = true, .num_groups = 4, .top_k_groups = 1}),
          {0, 0, 5, 5, 1, 1, 2, 2});
  EXPECT_THAT(r.ids, ElementsAre(2, 3, kNoExpert));
  expect_weights(r.weights, {0.5, 0.5, 0});
}

TEST(Groups, OfOneExpertScoreAsThatExpert) {
  EXPECT_THAT(run(routing_layer(4, 2, {.num_groups = 4, .top_k_groups = 2}), {0, 3, 1, 2}).ids,
              ElementsAre(1, 3));
}

TEST(Groups, AllOfThemChangeNothing) {
  EXPECT_THAT(
      run(routing_layer(6, 3, {.num_groups = 2, .top_k_groups = 2}), {0, 3, 1, 2, 4, -1}).ids,
      ElementsAre(4, 1, 3));
}

TEST(Groups, WithoutANumberAreNeverChosen) {
  const RoutingSpec routing{.num_groups = 3, .top_k_groups = 2};
  // Group 0 has one number only, and scores as that; group 1 has none.
  const Routed r = run(routing_layer(6, 3, routing), {kNaN, 1, kNaN, kNaN, 0, 0.5f});
  EXPECT_THAT(r.ids, ElementsAre(1, 5, 4));
  EXPECT_EQ(r.num_nan, 3);
}

// ---- NaN and infinity ----

TEST(NaN, IsNeverChosenAndDoesNotSpread) {
  for (const Family& family : test::families()) {
    const LayerSpec& spec = family.spec;
    if (spec.routing.method == RoutingMethod::kHash || spec.num_experts < 2) continue;
    std::vector<float> logits(spec.num_experts);
    for (int e = 0; e < spec.num_experts; ++e)
      logits[e] = e % 2 ? 0.125f * static_cast<float>(e % 7) : kNaN;
    const std::vector<float> bias(spec.routing.has_correction_bias ? spec.num_experts : 0, 0.5f);
    const Routed r = run(spec, logits, bias);
    const reference::Routing expected =
        reference::route(spec, std::vector<double>(logits.begin(), logits.end()), bias, {});
    EXPECT_EQ(r.num_nan, (spec.num_experts + 1) / 2) << family.name;
    EXPECT_EQ(r.ids, expected.ids) << family.name;
    for (int k = 0; k < spec.top_k; ++k) {
      EXPECT_TRUE(r.ids[k] == kNoExpert ? r.weights[k] == 0.0f : r.ids[k] % 2 == 1) << family.name;
      EXPECT_NEAR(r.weights[k], expected.weights[k], 1e-6 * spec.routing.scale) << family.name;
    }
  }
}

TEST(NaN, EverywhereLeavesNoExperts) {
  for (const Family& family : test::families()) {
    const LayerSpec& spec = family.spec;
    const std::vector<float> bias(spec.routing.has_correction_bias ? spec.num_experts : 0, 0.5f);
    const std::vector<std::int32_t> hashed(
        spec.routing.method == RoutingMethod::kHash ? spec.top_k : 0, 0);
    const Routed r = run(spec, std::vector<float>(spec.num_experts, kNaN), bias, hashed);
    EXPECT_THAT(r.ids, Each(kNoExpert)) << family.name;
    EXPECT_THAT(r.weights, Each(0.0f)) << family.name;
    EXPECT_EQ(r.num_nan, spec.num_experts) << family.name;
  }
}

TEST(NaN, InTheCorrectionBiasBarsTheExpertButIsNoNanLogit) {
  const Routed r =
      run(routing_layer(3, 2, {.score = ScoreFunction::kSigmoid, .has_correction_bias = true}),
          {1, 5, 2}, {0, kNaN, 0});
  EXPECT_THAT(r.ids, ElementsAre(2, 0));
  EXPECT_EQ(r.num_nan, 0);
}

TEST(NaN, InOneTokenLeavesTheOthersAlone) {
  const Routed r = run(routing_layer(2, 1, {}), {0, 1, kNaN, kNaN, 1, 0});
  EXPECT_THAT(r.ids, ElementsAre(1, kNoExpert, 0));
  EXPECT_EQ(r.num_nan, 2);
}

TEST(NaN, HashedExpertIsSkipped) {
  const Routed r = run(
      routing_layer(
          3, 2,
          {.method = RoutingMethod::kHash, .score = ScoreFunction::kSigmoid, .renormalize = true}),
      {kNaN, 0, 0}, {}, {0, 2});
  EXPECT_THAT(r.ids, ElementsAre(kNoExpert, 2));
  EXPECT_THAT(r.weights, ElementsAre(0.0f, 1.0f));
}

TEST(Infinity, PositiveTakesAllWeightAndSharesItWithItsEquals) {
  for (ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSqrtSoftplus}) {
    const Routed r = run(routing_layer(4, 3, {.score = score, .renormalize = true}),
                         {1, kInfinity, 0, kInfinity});
    EXPECT_THAT(r.ids, ElementsAre(1, 3, 0));
    EXPECT_THAT(r.weights, ElementsAre(0.5f, 0.5f, 0.0f));
  }
}

TEST(Infinity, NegativeIsChosenLastAndWeighsNothing) {
  const Routed r = run(routing_layer(3, 3, {}), {-kInfinity, 2, kNaN});
  EXPECT_THAT(r.ids, ElementsAre(1, 0, kNoExpert));
  EXPECT_THAT(r.weights, ElementsAre(1.0f, 0.0f, 0.0f));
}

TEST(Infinity, ExtremeFiniteLogitsGiveFiniteWeights) {
  for (const Family& family : test::families()) {
    const LayerSpec& spec = family.spec;
    if (spec.routing.method == RoutingMethod::kHash) continue;
    std::vector<float> logits(spec.num_experts);
    for (int e = 0; e < spec.num_experts; ++e)
      logits[e] = e % 3 == 0 ? 3e38f : e % 3 == 1 ? -3e38f : 0;
    const std::vector<float> bias(spec.routing.has_correction_bias ? spec.num_experts : 0, 0.5f);
    for (float weight : run(spec, logits, bias).weights) {
      EXPECT_TRUE(std::isfinite(weight)) << family.name;
    }
  }
}

TEST(Renormalize, LeavesZerosWhereTheSumIsZero) {
  EXPECT_THAT(run(routing_layer(2, 2, {.score = ScoreFunction::kSigmoid, .renormalize = true}),
                  {-200, -300})
                  .weights,
              ElementsAre(0.0f, 0.0f));
}

// ---- Shapes and errors ----

TEST(Errors, NameTheSpanOfTheWrongSize) {
  LayerSpec spec = routing_layer(4, 2, {});
  std::vector<float> logits(8), weights(4), bias(4);
  std::vector<std::int32_t> ids(4), hashed(4);
  EXPECT_ERROR(route(spec, std::span(logits).first(7), {}, {}, ids, weights), kInvalidArgument,
               "logits has 7 elements");
  EXPECT_ERROR(route(spec, logits, bias, {}, ids, weights), kInvalidArgument,
               "correction_bias has 4 elements, expected 0");
  EXPECT_ERROR(route(spec, logits, {}, hashed, ids, weights), kInvalidArgument,
               "hashed_ids has 4 elements, expected 0");
  EXPECT_ERROR(route(spec, logits, {}, {}, std::span(ids).first(3), weights), kInvalidArgument,
               "ids has 3 elements, expected 4");
  EXPECT_ERROR(route(spec, logits, {}, {}, ids, std::span(weights).first(2)), kInvalidArgument,
               "weights has 2 elements, expected 4");
  spec.routing.has_correction_bias = true;
  EXPECT_ERROR(route(spec, logits, {}, {}, ids, weights), kInvalidArgument,
               "correction_bias has 0 elements, expected 4");
  spec.routing = {};
  spec.routing.method = RoutingMethod::kHash;
  EXPECT_ERROR(route(spec, logits, {}, {}, ids, weights), kInvalidArgument,
               "hashed_ids has 0 elements, expected 4");
}

TEST(Errors, NameTheHashedIdOutOfRange) {
  const LayerSpec spec = routing_layer(4, 2, {.method = RoutingMethod::kHash});
  EXPECT_ERROR(run(spec, {0, 0, 0, 0}, {}, {1, 4}), kInvalidArgument, "expert 4 in slot 1");
  EXPECT_ERROR(run(spec, {0, 0, 0, 0}, {}, {-1, 2}), kInvalidArgument, "expert -1 in slot 0");
}

TEST(HashedIds, AreRowsOfEitherTypeWithStrides) {
  std::vector<std::int64_t> wide = {3, 9, 1, 9, 0, 9, 1 << 30, 9, -5, 9, 2, 9};
  const MatrixView table{wide.data(), DType::kI64, 2, 3, 6, 2};
  std::vector<std::int32_t> ids = {7};
  routing::append_hashed_ids(table, 0, ids);
  routing::append_hashed_ids(table, 1, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{7, 3, 1, 0, 1 << 30, -5, 2}));
  for (const std::int64_t id : {std::int64_t{1} << 40, -(std::int64_t{1} << 31) - 1}) {
    wide[8] = id;
    EXPECT_ERROR(routing::append_hashed_ids(table, 1, ids), kInvalidArgument,
                 ("expert " + std::to_string(id) + " for token id 1").c_str());
  }
  const std::vector<std::int32_t> narrow = {4, 4, 5, 6};
  EXPECT_ERROR(routing::append_hashed_ids({narrow.data(), DType::kI32, 2, 2, 2}, 0, ids),
               kInvalidArgument, "names expert 4 twice for token id 0");
}

TEST(Errors, NameTheFieldThatCannotBeRouted) {
  EXPECT_ERROR(run(routing_layer(1025, 2, {}), std::vector<float>(1025)), kInvalidArgument,
               "num_experts is 1025");
  EXPECT_ERROR(run(routing_layer(4, 5, {}), std::vector<float>(4)), kInvalidArgument, "top_k is 5");
  EXPECT_ERROR(run(routing_layer(64, 33, {}), std::vector<float>(64)), kInvalidArgument,
               "top_k is 33");
  RoutingSpec routing{.num_groups = 3};
  EXPECT_ERROR(run(routing_layer(4, 2, routing), std::vector<float>(4)), kInvalidArgument,
               "num_groups is 3");
  routing.num_groups = 2;
  routing.top_k_groups = 3;
  EXPECT_ERROR(run(routing_layer(4, 2, routing), std::vector<float>(4)), kInvalidArgument,
               "top_k_groups is 3");
}

TEST(Route, NoTokensIsNoWork) { EXPECT_EQ(run(routing_layer(4, 2, {}), {}).num_nan, 0); }

}  // namespace
}  // namespace switchyard
