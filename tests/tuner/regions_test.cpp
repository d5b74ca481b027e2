// The regions of RaMP's eight models, and each prediction, positive and negative.
#include "tuning/regions.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

namespace switchyard::tuner {
namespace {

struct Known {
  Model model;
  double rho;
  int lambda;
  double kappa;
  char region;
  bool group_m, split_k;
};

// Tables II and III.
const std::vector<Known> kModels = {
    {{"olmoe", 64, 8, 2048, 2048}, 128, 8, 16, 'A', false, false},
    {{"qwen3", 128, 8, 1536, 2048}, 96, 6, 16, 'A', false, false},
    {{"dsv3-ep8", 32, 8, 512, 7168}, 112, 2, 56, 'A', false, true},
    {{"mixtral", 8, 2, 32768, 6144}, 6144, 128, 48, 'B', true, false},
    {{"dsv3-tp8", 256, 8, 512, 7168}, 112, 2, 56, 'A', false, true},
    {{"phi", 16, 2, 12800, 4096}, 1600, 50, 32, 'B', true, false},
    {{"jamba", 16, 2, 16384, 4096}, 2048, 64, 32, 'B', true, false},
    {{"dbrx", 16, 4, 21504, 6144}, 4032, 84, 48, 'B', true, false},
};

Configuration reference(int token_rows = 16) {
  Configuration c;
  c.token_rows = token_rows;
  c.weight_rows = kReferenceRows;
  return c;
}

// One token for each of so many experts.
std::vector<std::int64_t> one_each(int experts, int hit) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(experts));
  for (int e = 0; e < hit; ++e) counts[static_cast<std::size_t>(e)] = 1;
  return counts;
}

TEST(Regions, ThresholdsFollowFromTheDevice) {
  const Thresholds t = thresholds_of({});
  EXPECT_NEAR(t.rho, 24 / 0.130, 1e-9);  // about 186
  EXPECT_NEAR(t.rho, 186, 2);
  EXPECT_DOUBLE_EQ(t.lambda_kappa, 1440);  // 45 MiB of tiles of 32 KiB
  EXPECT_NEAR(t.kappa, 48, 1e-9);
  EXPECT_DOUBLE_EQ(t.split_omega, 0.2);
  // Another device has others.
  DeviceConstants other;
  other.block_start_us = 12;
  other.l2_bytes /= 2;
  other.split_us *= 2;
  const Thresholds u = thresholds_of(other);
  EXPECT_NEAR(u.rho, t.rho / 2, 1e-9);
  EXPECT_DOUBLE_EQ(u.lambda_kappa, 720);
  EXPECT_NEAR(u.kappa, 96, 1e-9);
  // Tiles of bf16 take twice the room; two parts save less, and need less room.
  EXPECT_DOUBLE_EQ(thresholds_of({}, 2).lambda_kappa, 720);
  EXPECT_NEAR(thresholds_of({}, 1, 2).kappa, 72, 1e-9);
  EXPECT_NEAR(thresholds_of({}, 1, 2).split_omega, 1.0 / 3, 1e-12);
}

TEST(Regions, RefusesConstantsThatWereNotMeasured) {
  DeviceConstants device;
  device.tile_us = 0;
  EXPECT_THROW(thresholds_of(device), Error);
  EXPECT_THROW(thresholds_of({}, 0), Error);
  EXPECT_THROW(thresholds_of({}, 1, 1), Error);
}

TEST(Regions, VariablesAreThoseOfTheTable) {
  for (const Known& known : kModels) {
    const RegionVariables v =
        region_variables(known.model, reference(), one_each(known.model.num_experts, 1), 132);
    EXPECT_DOUBLE_EQ(v.rho, known.rho) << known.model.name;
    EXPECT_EQ(v.lambda, known.lambda) << known.model.name;
    EXPECT_DOUBLE_EQ(v.kappa, known.kappa) << known.model.name;
    EXPECT_DOUBLE_EQ(v.omega, known.lambda / 132.0) << known.model.name;
    EXPECT_DOUBLE_EQ(v.rho, v.lambda * v.kappa) << known.model.name;
  }
}

TEST(Regions, SplitsAreNotWaves) {
  Configuration split = reference();
  split.splits = 4;
  const Model& model = kModels[2].model;
  EXPECT_DOUBLE_EQ(region_variables(model, split, one_each(32, 8), 132).omega,
                   region_variables(model, reference(), one_each(32, 8), 132).omega);
}

TEST(Regions, ModelsAreInTheirRows) {
  const Thresholds t = thresholds_of({});
  for (const Known& known : kModels) {
    RegionVariables v =
        region_variables(known.model, reference(), one_each(known.model.num_experts, 1), 132);
    const std::vector<std::pair<double, char>> columns = {
        {0.99, '1'}, {1, '2'}, {8, '2'}, {8.01, '3'}};
    for (const auto& [omega, column] : columns) {
      v.omega = omega;
      EXPECT_EQ(to_string(region_of(v, t)), (std::string{known.region, column}))
          << known.model.name;
    }
  }
}

TEST(Predictions, GroupMIsForWeightsThatTheCacheDoesNotHold) {
  const Thresholds t = thresholds_of({});
  for (const Known& known : kModels) {
    const RegionVariables v =
        region_variables(known.model, reference(), one_each(known.model.num_experts, 1), 132);
    EXPECT_EQ(group_m_helps(v, t), known.group_m) << known.model.name;
  }
  // With a cache four times as large, Phi's and Jamba's weights fit, and Mixtral's do not.
  DeviceConstants roomy;
  roomy.l2_bytes *= 4;
  const Thresholds u = thresholds_of(roomy);
  const auto variables = [](std::size_t i) {
    return region_variables(kModels[i].model, reference(),
                            one_each(kModels[i].model.num_experts, 1), 132);
  };
  EXPECT_TRUE(group_m_helps(variables(3), u));
  EXPECT_FALSE(group_m_helps(variables(5), u));
  EXPECT_FALSE(group_m_helps(variables(6), u));
}

TEST(Predictions, SplitKIsForFewDeepTasks) {
  const Thresholds t = thresholds_of({});
  for (const Known& known : kModels) {
    // The experts of one token, and those of many.
    const RegionVariables few = region_variables(
        known.model, reference(), one_each(known.model.num_experts, known.model.top_k), 132);
    EXPECT_EQ(split_k_helps(few, t), known.split_k) << known.model.name;
    std::vector<std::int64_t> many(static_cast<std::size_t>(known.model.num_experts), 64);
    EXPECT_FALSE(split_k_helps(region_variables(known.model, reference(), many, 132), t))
        << known.model.name;
  }
  // Both conditions are needed, and either may miss by little.
  EXPECT_TRUE(split_k_helps({.kappa = 48, .omega = 0.19}, t));
  EXPECT_FALSE(split_k_helps({.kappa = 47, .omega = 0.19}, t));
  EXPECT_FALSE(split_k_helps({.kappa = 48, .omega = 0.2}, t));
}

TEST(Predictions, WideTilesAreForMoreThanOneWave) {
  const Thresholds t = thresholds_of({});
  EXPECT_FALSE(wide_tiles_help({.omega = 1}, t));
  EXPECT_TRUE(wide_tiles_help({.omega = 1.01}, t));
}

// A kernel of which a lone block starts in 7 us and does a product of 256 rows in 0.2 us, and for
// which splitting K costs 3 us: its profile tells these.
TEST(Regions, ConstantsFollowFromAProfile) {
  Kernel kernel;
  kernel.name = "timed";
  for (const int splits : {1, 4}) {
    for (const int rows : {16, 64}) {
      Configuration c = reference();
      c.name = std::to_string(splits) + " of " + std::to_string(rows);
      c.token_rows = rows;
      c.weight_rows = 128;  // half of the reference's
      c.splits = splits;
      kernel.configurations.push_back(c);
    }
  }
  kernel.time = [&](const Model& model, std::size_t c, std::span<const std::int64_t> counts) {
    const Configuration& its = kernel.configurations[c];
    const double waves = std::ceil(static_cast<double>(grid_of(its, model.n, counts)) / 132);
    const double task = 0.1 * model.k / 128 / its.splits;
    return Timing{7 + task * waves + (its.splits > 1 ? 3 : 0)};
  };
  Plan plan;
  plan.models = {{"short", 8, 1, 256, 1024}, {"long", 8, 1, 256, 8192}};
  plan.tokens = {1, 4, 2048};
  plan.betas = {1};
  plan.test_tokens = {};
  const auto measured = [&] {
    Profile profile = new_profile(kernel, {"machine", 132, 1 << 20}, plan);
    measure(profile, kernel);
    return measured_constants(profile);
  };
  const auto constants = measured();
  ASSERT_TRUE(constants);
  EXPECT_NEAR(constants->block_start_us, 7, 1e-6);
  EXPECT_NEAR(constants->tile_us, 0.2, 1e-6);
  EXPECT_NEAR(constants->split_us, 3, 1e-6);
  EXPECT_EQ(constants->l2_bytes, 1u << 20);
  plan.models.pop_back();
  EXPECT_FALSE(measured()) << "one K tells nothing";
}

// A kernel on which splitting K helps exactly where it is forced to.
Profile forced(bool split_helps) {
  Kernel kernel;
  kernel.name = "forced";
  Configuration whole = reference(), split = reference();
  whole.name = "whole";
  split.name = "split";
  split.splits = 4;
  kernel.configurations = {whole, split};
  kernel.time = [=](const Model&, std::size_t c, std::span<const std::int64_t>) {
    return Timing{c == 0 ? 100.0 : split_helps ? 80.0 : 125.0};
  };
  Plan plan;
  plan.models = {kModels[2].model};
  plan.tokens = {1, 512};
  plan.betas = {1};
  plan.test_tokens = {};
  Profile profile = new_profile(kernel, {"machine", 132}, plan);
  measure(profile, kernel);
  return profile;
}

TEST(Findings, StandBesideThePredictions) {
  for (const bool helps : {true, false}) {
    const std::vector<Finding> found = findings(forced(helps), {});
    // 1 token: 8 experts, 16 tasks, omega 0.12. 512 tokens: far above. No configurations with and
    // without the others.
    ASSERT_EQ(found.size(), 2u);
    for (const Finding& finding : found) {
      EXPECT_EQ(finding.prediction, Prediction::kSplitK);
      EXPECT_EQ(finding.points, 1u);
      EXPECT_NEAR(finding.measured_ratio, helps ? 1.25 : 0.8, 1e-12);
      EXPECT_EQ(finding.confirmed(), finding.predicted == helps);
    }
    EXPECT_FALSE(found[0].predicted);
    EXPECT_TRUE(found[1].predicted);
  }
}

}  // namespace
}  // namespace switchyard::tuner
