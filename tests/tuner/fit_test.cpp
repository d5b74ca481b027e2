// The cost model: coefficients that are found again, the rule for the log term, what each form can
// and cannot tell apart, selection and tables.
#include <gmock/gmock.h>

#include <cmath>

#include "tuner/known_kernel.h"
#include "tuning/judgement.h"

namespace switchyard::tuner {
namespace {

using namespace test;
using ::testing::HasSubstr;

FitOptions options_of(Form form, bool relative = false) { return {form, relative, false}; }

double worst_error(const Profile& profile, const Fit& fit, bool held_out) {
  double worst = 0;
  for (const Point& point : profile.points) {
    if (point.held_out() != held_out) continue;
    for (std::size_t c = 0; c < point.times_us.size(); ++c) {
      const double predicted = predict_us(fit, point.model, c, point.counts);
      worst = std::max(worst, std::abs(predicted / point.times_us[c] - 1));
    }
  }
  return worst;
}

TEST(Fit, FindsTheCoefficientsOfAKnownCost) {
  const KnownKernel known;
  const Profile profile = measured(known, {kSmall, kLarge});
  for (const bool relative : {false, true}) {
    const Fit its = fit(profile, options_of(Form::kRoundedWaves, relative));
    for (std::size_t m = 0; m < 2; ++m) {
      for (std::size_t c = 0; c < 6; ++c) {
        const Configuration& configuration = profile.configurations[c];
        const double task = (1 + 0.05 * configuration.token_rows) * (profile.models[m].k / 1024.0) *
                            (configuration.weight_rows / 128.0);
        const Coefficients& k = its.coefficients[m][c];
        EXPECT_NEAR(k.a, 8, 0.01);
        EXPECT_NEAR(k.b, task, 0.01 * task);
        EXPECT_NEAR(k.c, 0.01 * task, 1e-3 * task);
        EXPECT_EQ(k.d, 0);
        EXPECT_EQ(k.points, 25);
        EXPECT_GT(k.r2, 0.999999);
      }
    }
    EXPECT_LT(worst_error(profile, its, true), 1e-3) << "held-out points follow the same law";
    EXPECT_GT(r_squared(profile, its, 0), 0.99999);
  }
}

TEST(Fit, RoundedWavesAreWhatMakesTheThirdTermMean) {
  const KnownKernel known;
  const Profile profile = measured(known, {kSmall, kLarge});
  // As printed, waves are tasks in other units: a third term adds nothing at all.
  const Fit tasks = fit(profile, options_of(Form::kTasks));
  const Fit waves = fit(profile, options_of(Form::kWaves));
  EXPECT_EQ(tasks.coefficients, waves.coefficients);
  EXPECT_GT(worst_error(profile, waves, false), 0.05) << "steps are no line";
  EXPECT_LT(worst_error(profile, fit(profile, options_of(Form::kRoundedWaves)), false), 1e-4);
}

// A kernel that reads the weights of every expert with rows once, and whose highest tile ends last.
TEST(Fit, TellsTheWeightsThatAreReadAndTheLongestTask) {
  KnownKernel known;
  known.kernel.time = [&](const Model& model, std::size_t c, std::span<const std::int64_t> counts) {
    const Configuration& its = known.kernel.configurations[c];
    const auto grid = static_cast<double>(grid_of(its, model.n, counts));
    double with_rows = 0, most = 0;
    for (const std::int64_t count : counts) {
      with_rows += count > 0 ? 1 : 0;
      most = std::max(most, static_cast<double>(count));
    }
    const double blocks = std::ceil(model.n / static_cast<double>(its.weight_rows));
    return Timing{7 + 2 * std::ceil(grid / kDevice.num_sms) + 0.1 * with_rows * blocks +
                  0.3 * std::min<double>(most, its.token_rows)};
  };
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall, kLarge}));
  measure(profile, known.kernel);
  const Fit its = fit(profile, options_of(Form::kExperts));
  EXPECT_LT(worst_error(profile, its, false), 1e-4);
  EXPECT_LT(worst_error(profile, its, true), 1e-4);
  EXPECT_GT(worst_error(profile, fit(profile, options_of(Form::kRoundedFull)), false), 0.02);
}

TEST(Fit, LogTermOnlyWhereTheMedianGridIsBelowAWave) {
  const KnownKernel known(0, 3);
  const Profile profile = measured(known, {kTiny, kLarge});
  const Fit its = fit(profile, options_of(Form::kRoundedFull));
  int with = 0, without = 0;
  for (std::size_t m = 0; m < 2; ++m) {
    for (std::size_t c = 0; c < 6; ++c) {
      std::vector<std::int64_t> grids;
      for (const Point& point : profile.points) {
        if (point.fit && point.model == m) {
          grids.push_back(grid_of(profile.configurations[c], profile.models[m].n, point.counts));
        }
      }
      std::sort(grids.begin(), grids.end());
      const bool below = grids[grids.size() / 2] < kDevice.num_sms;
      EXPECT_EQ(its.coefficients[m][c].d != 0, below) << grids[grids.size() / 2];
      if (below) {
        EXPECT_NEAR(its.coefficients[m][c].d, 3, 0.05);
      }
      below ? ++with : ++without;
    }
  }
  EXPECT_GT(with, 0);
  EXPECT_GT(without, 0);
  for (const Form form : {Form::kTasks, Form::kWaves, Form::kRoundedWaves}) {
    for (const auto& of_model : fit(profile, options_of(form)).coefficients) {
      for (const Coefficients& k : of_model) EXPECT_EQ(k.d, 0);
    }
  }
}

TEST(Fit, RelativeErrorsSpareSmallTimes) {
  // A cost that no form has: squares. Small times matter only to the relative fit.
  KnownKernel known;
  known.kernel.time = [&](const Model& model, std::size_t c, std::span<const std::int64_t> counts) {
    const auto grid = static_cast<double>(grid_of(known.kernel.configurations[c], model.n, counts));
    return Timing{10 + 0.05 * grid + 1e-4 * grid * grid};
  };
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kLarge}));
  measure(profile, known.kernel);
  const auto worst_below = [&](const Fit& its) {
    double worst = 0;
    for (const Point& point : profile.points) {
      if (point.tokens != 8) continue;
      for (std::size_t c = 0; c < 6; ++c) {
        worst =
            std::max(worst, std::abs(predict_us(its, 0, c, point.counts) / point.times_us[c] - 1));
      }
    }
    return worst;
  };
  EXPECT_LT(worst_below(fit(profile, options_of(Form::kTasks, true))),
            worst_below(fit(profile, options_of(Form::kTasks, false))) / 2);
}

TEST(Fit, CoversModelsThatWereNeverTimed) {
  // Times grow with K alone, so other models tell a model's.
  KnownKernel known;
  const Model deep{"deep", 16, 2, 2048, 8192};
  known.kernel.time = [&](const Model& model, std::size_t c, std::span<const std::int64_t> counts) {
    const Configuration& configuration = known.kernel.configurations[c];
    const auto grid = static_cast<double>(grid_of(configuration, model.n, counts));
    return Timing{5 + model.k * 1e-3 * configuration.token_rows *
                          (std::ceil(grid / 100) + 0.001 * grid)};
  };
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall, kLarge, deep}));
  measure(profile, known.kernel);
  FitOptions options = options_of(Form::kRoundedWaves, true);
  options.from_other_models = true;
  const Fit its = fit(profile, options);
  EXPECT_LT(worst_error(profile, its, false), 0.01);
  Profile alone = measured(known, {kSmall});
  EXPECT_THROW(fit(alone, options), Error);
}

TEST(Fit, NeedsAsManyPointsAsCoefficients) {
  KnownKernel known;
  Plan plan = plan_of({kSmall});
  plan.tokens = {8, 64};
  plan.betas = {1};
  Profile profile = new_profile(known.kernel, kDevice, plan);
  measure(profile, known.kernel);
  EXPECT_NO_THROW(fit(profile, options_of(Form::kTasks)));
  try {
    fit(profile, options_of(Form::kRoundedFull));
    FAIL() << "four coefficients of two points";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("small has at most 2 points"));
  }
}

TEST(Fit, PointsOfOneGridAreNoReasonToFail) {
  KnownKernel known;
  Plan plan = plan_of({kSmall});
  plan.tokens = {1};  // every configuration has the same grid at every beta
  plan.test_tokens = {};
  Profile profile = new_profile(known.kernel, kDevice, plan);
  measure(profile, known.kernel);
  const Fit its = fit(profile, options_of(Form::kRoundedFull));
  EXPECT_LT(worst_error(profile, its, false), 1e-4);
}

TEST(Select, TakesTheLeastPrediction) {
  const KnownKernel known;
  const Profile profile = measured(known, {kSmall, kLarge});
  const Fit its = fit(profile, options_of(Form::kRoundedWaves));
  for (const Point& point : profile.points) {
    const std::size_t chosen = select(its, point.model, point.counts);
    for (std::size_t c = 0; c < 6; ++c) {
      EXPECT_GE(point.times_us[c], point.times_us[chosen] * (1 - 1e-4));
    }
  }
  // Few tokens on each expert: low tiles. Many on each: high ones.
  const auto rows_at = [&](std::int64_t each) {
    return its.configurations[select(its, 0, std::vector<std::int64_t>(32, each))].token_rows;
  };
  EXPECT_EQ(rows_at(2), 4);
  EXPECT_EQ(rows_at(512), 64);
}

TEST(Select, NeverTakesTheRule) {
  KnownKernel known;
  known.kernel.configurations[0].is_rule = true;
  known.kernel.time = [](const Model&, std::size_t c, std::span<const std::int64_t>) {
    return Timing{c == 0 ? 1.0 : 10.0};
  };
  const Profile profile = measured(known, {kSmall});
  const Fit its = fit(profile, options_of(Form::kTasks));
  for (const Point& point : profile.points) EXPECT_NE(select(its, 0, point.counts), 0u);
}

TEST(Select, RefusesAnotherModelsCounts) {
  const KnownKernel known;
  const Fit its = fit(measured(known, {kSmall}));
  EXPECT_THROW(select(its, 0, std::vector<std::int64_t>(31, 1)), Error);
  EXPECT_THROW(select(its, 1, std::vector<std::int64_t>(32, 1)), Error);
  EXPECT_EQ(model_index(its, "small"), 0u);
  try {
    model_index(its, "medium");
    FAIL() << "there is no such model";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'medium'; it has small"));
  }
}

TEST(Table, ChoosesAsTheFitDoes) {
  const KnownKernel known(0.02);
  const Profile profile = measured(known, {kSmall, kLarge});
  for (const Form form : kForms) {
    const Fit its = fit(profile, options_of(form, true));
    for (std::size_t m = 0; m < 2; ++m) {
      const Table table = make_table(its, m);
      EXPECT_LE(table.entries.size(), 6u);
      int others = 0, routings = 0;
      for (const double beta : {0.3, 0.55, 0.85}) {
        for (const int tokens : {1, 4, 16, 64, 256, 1024}) {
          const Model& model = profile.models[m];
          const auto counts =
              draw_counts(Generator::kRepeated, tokens, model.num_experts, model.top_k, beta, 77);
          const Configuration& mine = table.entries[select(table, counts)].configuration;
          const std::size_t chosen = select(its, m, counts);
          ++routings;
          if (mine == its.configurations[chosen]) continue;
          ++others;  // a configuration that no routing of make_table() chose, by little
          const auto index = static_cast<std::size_t>(
              std::find(its.configurations.begin(), its.configurations.end(), mine) -
              its.configurations.begin());
          EXPECT_LT(predict_us(its, m, index, counts), 1.03 * predict_us(its, m, chosen, counts));
        }
      }
      EXPECT_LE(others, routings / 6) << to_string(form);
    }
  }
}

}  // namespace
}  // namespace switchyard::tuner
