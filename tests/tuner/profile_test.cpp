// Measuring: what is timed, budgets, interruptions, going on, and refusals.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "model/temporary_directory.h"
#include "tuner/known_kernel.h"

namespace switchyard::tuner {
namespace {

using switchyard::test::TemporaryDirectory;
using namespace test;
using ::testing::Each;
using ::testing::Gt;
using ::testing::HasSubstr;

TEST(Grid, IsTheSumOverExperts) {
  Configuration c;
  c.token_rows = 16;
  c.weight_rows = 256;
  const std::vector<std::int64_t> counts{0, 1, 16, 17, 160};
  EXPECT_EQ(grid_of(c, 512, counts), (0 + 1 + 1 + 2 + 10) * 2);
  EXPECT_EQ(grid_of(c, 513, counts), 14 * 3);
  c.splits = 4;
  EXPECT_EQ(grid_of(c, 512, counts), 14 * 2 * 4);
  c.blocks = 2;
  EXPECT_EQ(grid_of(c, 512, counts), 14 * 2 * 4 * 2);
}

TEST(NewProfile, HasBothGrids) {
  const KnownKernel known;
  const Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall, kLarge}));
  // 5 x 5 to fit on, 6 x 4 to judge by; 32, 128 and 256 tokens at 0.5 and 1 are in both.
  ASSERT_EQ(profile.points.size(), 2u * (25 + 24 - 6));
  int fit = 0, test = 0, held_out = 0;
  for (std::size_t p = 0; p < profile.points.size(); ++p) {
    const Point& point = profile.points[p];
    EXPECT_EQ(point.model, p / 43);
    EXPECT_THAT(point.times_us, Each(kNotTimed));
    EXPECT_TRUE(point.fit || point.test);
    fit += point.fit;
    test += point.test;
    held_out += point.held_out();
    if (point.beta == 0.2 || point.beta == 0.8 || point.tokens == 1024) {
      EXPECT_TRUE(point.held_out());
    }
    if (p % 43 < 25) {
      EXPECT_TRUE(point.fit) << "points to fit on come first";
    }
  }
  EXPECT_EQ(fit, 2 * 25);
  EXPECT_EQ(test, 2 * 24);
  EXPECT_EQ(held_out, 2 * 18);
}

TEST(NewProfile, RefusesWhatMakesNoSense) {
  const auto refused = [](const std::function<void(Kernel&, Plan&)>& spoil, const char* why) {
    KnownKernel known;
    Plan plan = plan_of({kSmall});
    spoil(known.kernel, plan);
    try {
      new_profile(known.kernel, kDevice, plan);
      ADD_FAILURE() << why << " is accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  };
  refused([](Kernel& k, Plan&) { k.configurations[1].name = k.configurations[0].name; },
          "two configurations");
  refused([](Kernel& k, Plan&) { k.configurations[1].token_rows = 0; }, "token_rows 0");
  refused([](Kernel& k, Plan&) { k.configurations.clear(); }, "no configuration");
  refused([](Kernel& k, Plan&) { k.name.clear(); }, "no name");
  refused([](Kernel& k, Plan&) { k.version = -1; }, "-1");
  refused(
      [](Kernel& k, Plan&) { k.configurations[0].is_rule = k.configurations[1].is_rule = true; },
      "2 configurations stand");
  refused([](Kernel&, Plan& p) { p.models.push_back(p.models[0]); }, "two models");
  refused([](Kernel&, Plan& p) { p.models[0].top_k = 33; }, "top_k 33");
  refused([](Kernel&, Plan& p) { p.models.clear(); }, "no models");
  refused([](Kernel&, Plan& p) { p.betas = {1.5}; }, "1.5");
  refused([](Kernel&, Plan& p) { p.tokens = {0}; }, "0 tokens");
  refused([](Kernel&, Plan& p) { p.betas.clear(); }, "no points");
}

TEST(Measure, TimesEverythingOnce) {
  KnownKernel known(0.1);
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall}));
  std::vector<Progress> told;
  EXPECT_TRUE(
      measure(profile, known.kernel, {.progress = [&](const Progress& p) { told.push_back(p); }}));
  EXPECT_EQ(known.calls, 43 * 6);
  for (const Point& point : profile.points) EXPECT_THAT(point.times_us, Each(Gt(0)));
  ASSERT_EQ(told.size(), 43u * 6 + 1);
  EXPECT_EQ(told.front().done, 0u);
  EXPECT_EQ(told.front().total, 43u * 6);
  EXPECT_EQ(told[1].done, 1u);
  EXPECT_EQ(told.front().model->name, "small");
  EXPECT_EQ(told.back().done, told.back().total);
  EXPECT_EQ(told.back().model, nullptr);
  EXPECT_EQ(told.back().seconds_left, 0);
  // There is nothing left.
  EXPECT_TRUE(measure(profile, known.kernel));
  EXPECT_EQ(known.calls, 43 * 6);
}

TEST(Measure, EndsWithItsBudgetAndSaysWhatIsLeft) {
  KnownKernel known;
  double now = 100;
  Kernel slow = known.kernel;
  slow.time = [&](const Model& m, std::size_t c, std::span<const std::int64_t> counts) {
    now += 2;
    return known.kernel.time(m, c, counts);
  };
  Profile profile = new_profile(slow, kDevice, plan_of({kSmall}));
  Progress last;
  MeasureOptions options;
  options.budget_seconds = 20;
  options.clock = [&] { return now; };
  options.progress = [&](const Progress& p) { last = p; };
  EXPECT_FALSE(measure(profile, slow, options));
  EXPECT_EQ(known.calls, 10);
  EXPECT_EQ(last.done, 10u);
  EXPECT_DOUBLE_EQ(last.seconds, 20);
  EXPECT_DOUBLE_EQ(last.seconds_left, 2.0 * (43 * 6 - 10));
}

TEST(Measure, GoesOnFromItsFile) {
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory / "profile.json";
  KnownKernel whole(0.05);
  const Profile at_once = test::measured(whole, {kSmall, kLarge});

  int budget = 100;
  double now = 0;
  KnownKernel parts(0.05);
  Profile profile = new_profile(parts.kernel, kDevice, plan_of({kSmall, kLarge}));
  int runs = 0;
  while (true) {
    MeasureOptions options;
    options.file = file;
    options.budget_seconds = budget;
    options.clock = [&] { return now++; };
    const bool complete = measure(profile, parts.kernel, options);
    ++runs;
    profile = resumed_profile(file, parts.kernel, kDevice, plan_of({kSmall, kLarge}));
    if (complete) break;
    ASSERT_LT(runs, 100);
  }
  EXPECT_GT(runs, 3);
  EXPECT_EQ(parts.calls, whole.calls) << "nothing is timed twice";
  EXPECT_TRUE(to_json(profile) == to_json(at_once));
}

TEST(Measure, KeepsItsTimesWhenTheKernelFails) {
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory / "profile.json";
  KnownKernel known;
  Kernel breaks = known.kernel;
  breaks.time = [&](const Model& m, std::size_t c, std::span<const std::int64_t> counts) {
    if (known.calls == 20) throw std::runtime_error("the device is gone");
    return known.kernel.time(m, c, counts);
  };
  Profile profile = new_profile(breaks, kDevice, plan_of({kSmall}));
  EXPECT_THROW(measure(profile, breaks, {.file = file}), std::runtime_error);
  profile = resumed_profile(file, known.kernel, kDevice, plan_of({kSmall}));
  EXPECT_TRUE(measure(profile, known.kernel, {.file = file}));
  EXPECT_EQ(known.calls, 43 * 6);
}

TEST(Measure, LeavesOutWhatCannotRun) {
  KnownKernel known;
  Kernel picky = known.kernel;
  picky.time = [&](const Model& m, std::size_t c, std::span<const std::int64_t> counts) {
    if (m.name == "large" && c == 2) throw Error(ErrorCode::kUnsupported, "too large");
    return known.kernel.time(m, c, counts);
  };
  Profile profile = new_profile(picky, kDevice, plan_of({kSmall, kLarge}));
  EXPECT_TRUE(measure(profile, picky));
  for (const Point& point : profile.points) {
    EXPECT_EQ(point.times_us[2] == kUnsupported, point.model == 1);
  }
  const Fit its = fit(profile);
  EXPECT_GT(its.coefficients[0][2].points, 0);
  EXPECT_EQ(its.coefficients[1][2].points, 0);
  for (const Point& point : profile.points) {
    if (point.model == 1) {
      EXPECT_NE(select(its, 1, point.counts), 2u);
    }
  }
}

TEST(Measure, RefusesTimesThatAreNone) {
  KnownKernel known;
  for (const double time : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    Kernel odd = known.kernel;
    odd.time = [=](const Model&, std::size_t, std::span<const std::int64_t>) {
      return Timing{time};
    };
    Profile profile = new_profile(odd, kDevice, plan_of({kSmall}));
    EXPECT_THROW(measure(profile, odd), Error);
  }
  Kernel silent = known.kernel;
  silent.time = nullptr;
  Profile profile = new_profile(silent, kDevice, plan_of({kSmall}));
  EXPECT_THROW(measure(profile, silent), Error);
}

TEST(CompleteModels, HaveAllTheirPointsToFitOn) {
  const KnownKernel known;
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kLarge, kSmall}));
  EXPECT_TRUE(complete_models(profile).models.empty());
  measure(profile, known.kernel);
  profile.points[3].times_us[1] = kNotTimed;      // of the large one's grid to fit on
  profile.points.back().times_us[1] = kNotTimed;  // of the small one's grid to judge by
  const Profile complete = complete_models(profile);
  ASSERT_EQ(complete.models.size(), 1u);
  EXPECT_EQ(complete.models[0].name, "small");
  EXPECT_EQ(complete.points.size(), 43u);
  for (const Point& point : complete.points) EXPECT_EQ(point.model, 0u);
  EXPECT_EQ(evaluate(complete, fit(complete)).size(), 23u);
}

// Every way in which a file is not the kernel's.
TEST(Resume, RefusesWhatIsNotTheKernels) {
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory / "profile.json";
  KnownKernel known;
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall}));
  write_profile(file, profile);
  const auto refused = [&](const std::function<void(Kernel&, Device&, Plan&)>& change,
                           const std::string& field, const std::string& found,
                           const std::string& wanted) {
    KnownKernel other;
    Device device = kDevice;
    Plan plan = plan_of({kSmall});
    change(other.kernel, device, plan);
    try {
      resumed_profile(file, other.kernel, device, plan);
      ADD_FAILURE() << "another " << field << " is accepted";
    } catch (const MismatchError& error) {
      EXPECT_EQ(error.field(), field);
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(found));
      EXPECT_THAT(error.what(), HasSubstr(wanted));
      EXPECT_THAT(error.what(), HasSubstr(file.string()));
    }
  };
  refused([](Kernel& k, Device&, Plan&) { k.name = "another"; }, "kernel", "'known'", "'another'");
  refused([](Kernel& k, Device&, Plan&) { k.version = 4; }, "version", "version 3",
          "older than version 4");
  refused([](Kernel& k, Device&, Plan&) { k.version = 2; }, "version", "version 3",
          "newer than version 2");
  refused([](Kernel&, Device& d, Plan&) { d.machine = "Imagined 200"; }, "machine", "Imagined 100",
          "Imagined 200");
  refused([](Kernel&, Device& d, Plan&) { d.num_sms = 90; }, "number of SMs", "'100'", "'90'");
  refused([](Kernel& k, Device&, Plan&) { k.configurations.pop_back(); },
          "number of configurations", "'6'", "'5'");
  refused([](Kernel& k, Device&, Plan&) { k.configurations[0].name = "new"; }, "configuration",
          "rows 4 x 128", "new");
  refused([](Kernel& k, Device&, Plan&) { k.configurations[0].splits = 2; }, "configuration",
          "rows 4 x 128", "another configuration");
  refused([](Kernel&, Device&, Plan& p) { p.generator = Generator::kRepeated; }, "generator",
          "distinct", "repeated");
  refused([](Kernel&, Device&, Plan& p) { p.seed = 6; }, "seed", "'5'", "'6'");
  refused([](Kernel&, Device&, Plan& p) { p.models[0].k = 99; }, "model", "K 1024", "K 99");
}

TEST(Resume, AddsPointsToWhatTheFileHas) {
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory / "profile.json";
  KnownKernel known;
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall}));
  measure(profile, known.kernel, {.file = file});
  const int before = known.calls;
  Plan more = plan_of({kSmall, kLarge});
  more.tokens.push_back(64);
  profile = resumed_profile(file, known.kernel, kDevice, more);
  EXPECT_TRUE(measure(profile, known.kernel, {.file = file}));
  // 64 tokens at 0.5 and 1 were points to judge by: now they are to fit on, and timed already.
  EXPECT_EQ(known.calls, before + 3 * 6 + (43 + 3) * 6);
  KnownKernel fresh;
  Profile at_once = new_profile(fresh.kernel, kDevice, more);
  measure(at_once, fresh.kernel);
  ASSERT_EQ(at_once.points.size(), profile.points.size());
  for (const Point& point : at_once.points) {
    const auto same =
        std::find_if(profile.points.begin(), profile.points.end(), [&](const Point& other) {
          return other.model == point.model && other.tokens == point.tokens &&
                 other.beta == point.beta;
        });
    ASSERT_NE(same, profile.points.end());
    EXPECT_EQ(same->counts, point.counts);
    EXPECT_EQ(same->times_us, point.times_us);
    EXPECT_EQ(same->fit, point.fit);
    EXPECT_EQ(same->test, point.test);
  }
}

// A kernel of which two configurations are hopeless everywhere, one of them the only one that
// splits.
struct PrunedKernel : KnownKernel {
  PrunedKernel() {
    kernel.configurations[1].is_rule = true;
    kernel.configurations[5].splits = 2;
    const Timer honest = kernel.time;
    kernel.time = [honest](const Model& model, std::size_t c,
                           std::span<const std::int64_t> counts) {
      Timing timing = honest(model, c, counts);
      if (c == 1 || c == 2 || c == 5) timing.median_us *= 10;
      return timing;
    };
  }
};

TEST(Prune, LeavesOutWhatIsFarFromTheBestAtAllPilots) {
  PrunedKernel known;
  Profile profile = new_profile(known.kernel, kDevice, plan_of({kSmall, kLarge}));
  const TemporaryDirectory directory;
  MeasureOptions options;
  options.file = directory.path() / "p.json";
  options.prune = 0.3;
  Progress last;
  options.progress = [&](const Progress& p) { last = p; };
  EXPECT_TRUE(measure(profile, known.kernel, options));
  EXPECT_EQ(last.done, last.total);
  for (std::size_t m = 0; m < 2; ++m) {
    int pilots = 0;
    for (const Point& point : profile.points) {
      if (point.model != m) continue;
      EXPECT_GT(point.times_us[1], 0) << "the rule is a baseline";
      EXPECT_GT(point.times_us[5], 0) << "what splits tells whether splitting helps";
      if (point.times_us[2] > 0) {
        ++pilots;
        EXPECT_TRUE(point.fit);
        EXPECT_TRUE(point.tokens == 8 || point.tokens == 128 || point.tokens == 512);
        EXPECT_TRUE(point.beta == 0.35 || point.beta == 1);
      } else {
        EXPECT_EQ(point.times_us[2], kPruned);
      }
    }
    EXPECT_EQ(pilots, 6);
    EXPECT_GE(num_pruned(profile, m), 1u);
  }
  EXPECT_EQ(read_profile(options.file), profile);

  // The pruned one is never fitted, so never chosen, and neither is the one that was timed on for
  // the prediction alone; the rest is judged as without pruning.
  const Fit its = fit(profile);
  EXPECT_EQ(its.coefficients[0][2].points, 0);
  EXPECT_EQ(its.coefficients[0][5].points, 0);
  EXPECT_EQ(its.coefficients[0][0].points, 25);
  Profile all = new_profile(known.kernel, kDevice, plan_of({kSmall, kLarge}));
  EXPECT_TRUE(measure(all, known.kernel));
  const std::vector<Outcome> pruned = evaluate(profile, its), complete = evaluate(all, fit(all));
  ASSERT_EQ(pruned.size(), complete.size());
  for (std::size_t i = 0; i < pruned.size(); ++i) {
    EXPECT_EQ(pruned[i].exhaustive_us, complete[i].exhaustive_us);
  }
}

TEST(Prune, GoesOnAfterABudget) {
  PrunedKernel known;
  const TemporaryDirectory directory;
  const Plan plan = plan_of({kSmall});
  MeasureOptions options;
  options.file = directory.path() / "p.json";
  options.prune = 0.3;
  Profile profile = new_profile(known.kernel, kDevice, plan);
  Profile whole = profile;
  EXPECT_TRUE(measure(whole, known.kernel, {.prune = 0.3}));
  double now = 0;
  options.clock = [&] { return now += 1; };
  options.budget_seconds = 20;
  int runs = 0;
  while (!measure(profile, known.kernel, options)) {
    profile = resumed_profile(options.file, known.kernel, kDevice, plan);
    ASSERT_LT(++runs, 100);
  }
  EXPECT_GT(runs, 3);
  EXPECT_EQ(profile, whole);
  options.prune = -1;
  EXPECT_THROW(measure(profile, known.kernel, options), Error);
}

}  // namespace
}  // namespace switchyard::tuner
