// Regret and baselines, on times that a test made up.
#include <gmock/gmock.h>

#include <cmath>

#include "tuner/known_kernel.h"
#include "tuning/judgement.h"

namespace switchyard::tuner {
namespace {

using namespace test;

TEST(Evaluate, AKnownCostHasNoRegret) {
  const KnownKernel known;
  const Profile profile = measured(known, {kSmall, kLarge});
  const Fit its = fit(profile, {Form::kRoundedWaves, true, false});
  const std::vector<Outcome> outcomes = evaluate(profile, its);
  ASSERT_EQ(outcomes.size(), 48u);
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(profile.points[outcome.point].test);
    EXPECT_NEAR(outcome.predicted_us, outcome.chosen_us, 1e-3 * outcome.chosen_us);
    EXPECT_GE(*outcome.static_us, outcome.exhaustive_us);
    EXPECT_FALSE(outcome.rule_us);
  }
  EXPECT_LT(regret_of(outcomes).max, 1e-4);
  EXPECT_GT(*speed_up(outcomes, &Outcome::static_us), 1.005);
  EXPECT_FALSE(speed_up(outcomes, &Outcome::rule_us));
}

// Noise of 5 % hides which configuration is the best, and a choice by averages loses less.
TEST(Evaluate, NoiseCostsLittleAndNeverHelps) {
  const KnownKernel known(0.05);
  const Profile profile = measured(known, {kSmall, kLarge});
  const Regret regret =
      regret_of(evaluate(profile, fit(profile, {Form::kRoundedWaves, true, false})));
  EXPECT_EQ(regret.points, 48u);
  EXPECT_GT(regret.max, 0);
  EXPECT_LT(regret.mean, 0.05);
  EXPECT_GT(regret.standard_error, 0);
}

// A form that lacks the staircase loses where the staircase decides.
TEST(Evaluate, AblationTellsFormsApart) {
  KnownKernel known;
  // Waves alone: two configurations of one law whose steps are in other places.
  known.kernel.time = [&](const Model& model, std::size_t c, std::span<const std::int64_t> counts) {
    const Configuration& configuration = known.kernel.configurations[c];
    const auto grid = static_cast<double>(grid_of(configuration, model.n, counts));
    return Timing{5 + (1 + 0.1 * configuration.token_rows) * configuration.weight_rows / 128.0 *
                          std::ceil(grid / kDevice.num_sms)};
  };
  const Profile profile = measured(known, {kSmall, kLarge});
  const auto mean_of = [&](Form form) {
    return regret_of(evaluate(profile, fit(profile, {form, false, false}))).mean;
  };
  EXPECT_GT(mean_of(Form::kTasks), 0.005);
  EXPECT_DOUBLE_EQ(mean_of(Form::kWaves), mean_of(Form::kTasks));
  EXPECT_LT(mean_of(Form::kRoundedWaves), 1e-3);
}

// Two configurations: the first is the best at beta 1, the second anywhere else.
Profile two_sided(std::vector<double> test_betas, bool with_rule) {
  Kernel kernel;
  kernel.name = "two-sided";
  for (const char* name : {"balanced", "skewed", "rule"}) {
    Configuration c;
    c.name = name;
    c.is_rule = std::string(name) == "rule";
    if (!c.is_rule || with_rule) kernel.configurations.push_back(c);
  }
  kernel.time = [](const Model&, std::size_t c, std::span<const std::int64_t> counts) {
    const bool balanced = *std::min_element(counts.begin(), counts.end()) > 0;
    return Timing{c == 2 ? 15.0 : (c == 0) == balanced ? 10.0 : 20.0};
  };
  Plan plan = plan_of({{"m", 4, 1, 128, 128}});
  plan.tokens = {32, 64, 128};
  plan.betas = {0.1, 1};
  plan.test_tokens = {32, 128};
  plan.test_betas = std::move(test_betas);
  Profile profile = new_profile(kernel, kDevice, plan);
  measure(profile, kernel);
  return profile;
}

TEST(Evaluate, StaticIsTheBestOfBalancedRouting) {
  const Profile profile = two_sided({0.1, 1}, true);
  Fit its = fit(profile, {Form::kTasks, false, false});
  const std::vector<Outcome> outcomes = evaluate(profile, its);
  ASSERT_EQ(outcomes.size(), 4u);
  for (const Outcome& outcome : outcomes) {
    const bool balanced = profile.points[outcome.point].beta == 1;
    EXPECT_EQ(outcome.best, balanced ? 0u : 1u);
    EXPECT_EQ(outcome.exhaustive_us, 10);
    EXPECT_EQ(outcome.static_us, balanced ? 10 : 20);
    EXPECT_EQ(outcome.coarse_static_us, balanced ? 10 : 20);
    EXPECT_EQ(outcome.rule_us, 15);
  }
}

TEST(Evaluate, LeavesOutWhatIsNotTimed) {
  Profile profile = two_sided({0.1, 1}, false);
  const Fit its = fit(profile, {Form::kTasks, false, false});
  for (Point& point : profile.points) {
    if (point.tokens == 128) point.times_us[1] = kNotTimed;
  }
  EXPECT_EQ(evaluate(profile, its).size(), 2u);
}

// A configuration that cannot run a point is no choice there, even where its predicted time is the
// least.
TEST(Evaluate, ChoosesAmongWhatCanRun) {
  Profile profile = two_sided({0.1, 1}, false);
  const Fit its = fit(profile, {Form::kTasks, false, false});
  std::vector<std::size_t> before;
  for (const Outcome& outcome : evaluate(profile, its)) before.push_back(outcome.chosen);
  for (std::size_t i = 0; i < before.size(); ++i) {
    Profile without = profile;
    const std::size_t at = evaluate(profile, its)[i].point;
    without.points[at].times_us[before[i]] = kUnsupported;
    const std::vector<Outcome> outcomes = evaluate(without, its);
    ASSERT_EQ(outcomes.size(), before.size());
    EXPECT_EQ(outcomes[i].chosen, 1 - before[i]);
    EXPECT_GT(outcomes[i].chosen_us, 0);
  }
}

TEST(Evaluate, HasNoStaticWithoutBalancedRouting) {
  Profile profile = two_sided({0.1}, false);
  const Fit its = fit(profile, {Form::kTasks, false, false});
  std::erase_if(profile.points, [](const Point& p) { return p.beta == 1; });
  const std::vector<Outcome> outcomes = evaluate(profile, its);
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_FALSE(outcomes[0].static_us);
  EXPECT_FALSE(speed_up(outcomes, &Outcome::static_us));
}

TEST(Regret, IsMeanErrorAndMaximum) {
  std::vector<Outcome> outcomes(3);
  const double chosen[] = {10, 11, 12};
  for (std::size_t i = 0; i < 3; ++i) {
    outcomes[i].exhaustive_us = 10;
    outcomes[i].chosen_us = chosen[i];
    outcomes[i].static_us = 2 * chosen[i];
  }
  const Regret regret = regret_of(outcomes);
  EXPECT_NEAR(regret.mean, 0.1, 1e-12);
  EXPECT_NEAR(regret.max, 0.2, 1e-12);
  EXPECT_NEAR(regret.standard_error, 0.1 / std::sqrt(3), 1e-12);
  EXPECT_NEAR(*speed_up(outcomes, &Outcome::static_us), 2, 1e-12);
  EXPECT_EQ(regret_of({}).points, 0u);
}

}  // namespace
}  // namespace switchyard::tuner
