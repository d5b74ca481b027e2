// This library's kernels as the tuner sees them: configurations, models, routing of a histogram,
// and timings on the CPU.
#include "bench/tune.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <string>

#include "bench/grouped.h"
#include "machine/host.h"
#include "model/errors.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

using ::testing::Each;
using ::testing::Gt;

template <typename Choice>
void expect_sound(const std::vector<Choice>& choices) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const tuner::Configuration& c = choices[i].configuration;
    EXPECT_TRUE(names.insert(c.name).second) << c.name << " is there twice";
    EXPECT_EQ(c.is_rule, i == 0) << c.name;
    EXPECT_THAT((std::vector{c.token_rows, c.weight_rows, c.splits, c.blocks, c.group_m}),
                Each(Gt(0)));
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_FALSE(choices[i].schedule == choices[j].schedule &&
                   choices[i].num_threads == choices[j].num_threads)
          << c.name << " is " << choices[j].configuration.name;
    }
  }
}

TEST(TuneChoices, AreDistinctAndEnough) {
  for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
    const std::vector<GroupedChoice> grouped = grouped_choices(Backend::kCuda, dtype, 8);
    EXPECT_GE(grouped.size(), 1u + 134u);
    expect_sound(grouped);
    EXPECT_EQ(grouped[0].schedule, GroupedSchedule{});
    const std::vector<LayerChoice> layers = layer_choices(Backend::kCuda, dtype, 8);
    EXPECT_EQ(layers.size(), 1u + 3 + 50);
    expect_sound(layers);
    EXPECT_EQ(layers[0].schedule, Schedule{});
  }
  EXPECT_THROW(grouped_choices(Backend::kCuda, DType::kF32, 8), Error);
  EXPECT_THROW(layer_choices(Backend::kCuda, DType::kF16, 8), Error);
}

// What GroupedGemmEngine and MoeLayer accept (src/gpu/host/grouped_gemm.cpp, src/layer/layer.cpp).
TEST(TuneChoices, AreThoseThatKernelsTake) {
  for (const GroupedChoice& choice : grouped_choices(Backend::kCuda, DType::kBF16, 8)) {
    const GroupedSchedule& s = choice.schedule;
    if (choice.configuration.is_rule) continue;
    EXPECT_EQ(*s.tile_rows % 16, 0);
    EXPECT_LE(*s.tile_rows, *s.splits > 1 ? 64 : 256);
    EXPECT_GE(*s.stages, 2);
    EXPECT_LE(*s.stages, 12);
    EXPECT_LE(*s.splits, kMostGroupedSplits);
    EXPECT_EQ(choice.configuration.token_rows, *s.tile_rows);
    EXPECT_EQ(choice.configuration.splits, *s.splits);
  }
  for (const GroupedChoice& choice : grouped_choices(Backend::kCuda, DType::kF8E4M3, 8)) {
    if (choice.configuration.is_rule) continue;
    EXPECT_TRUE(*choice.schedule.tile_rows == 64 || *choice.schedule.tile_rows == 128);
    EXPECT_FALSE(choice.schedule.stages);
  }
  for (const LayerChoice& choice : layer_choices(Backend::kCuda, DType::kBF16, 8)) {
    const Schedule& s = choice.schedule;
    if (s.band) {
      EXPECT_LE(*s.band, kMostBand);
    }
    if (s.lag) {
      EXPECT_GE(*s.lag, 1);
    }
    if (s.splits) {
      EXPECT_LE(*s.splits, kMostSplits);
    }
  }
}

TEST(TuneChoices, OfTheCpuAreThreads) {
  std::vector<int> threads;
  for (const GroupedChoice& choice : grouped_choices(Backend::kCpu, DType::kBF16, 6)) {
    threads.push_back(choice.num_threads);
  }
  EXPECT_EQ(threads, (std::vector{0, 1, 2, 4, 6}));
  expect_sound(layer_choices(Backend::kCpu, DType::kF32, 1));
}

TEST(TuneModels, AreThoseOfThePaper) {
  EXPECT_EQ(ramp_models().size(), 8u);
  int unseen = 0;
  for (const std::string& name : ramp_models()) {
    const TuneModel tuned = tune_model(name);
    EXPECT_EQ(tuned.model.name, name);
    EXPECT_EQ(tuned.model.n, 2 * tuned.spec.intermediate);
    EXPECT_EQ(tuned.model.k, tuned.spec.hidden);
    EXPECT_EQ(tuned.spec.shared_intermediate, 0);
    unseen += tuned.model.unseen;
  }
  EXPECT_EQ(unseen, 3);
  const tuner::Model dsv3 = tune_model("ramp-dsv3-tp8").model;
  EXPECT_EQ(dsv3, (tuner::Model{"ramp-dsv3-tp8", 256, 8, 512, 7168, false}));
  const tuner::Model dbrx = tune_model("ramp-dbrx").model;
  EXPECT_EQ(dbrx, (tuner::Model{"ramp-dbrx", 16, 4, 21504, 6144, true}));
}

TEST(TuneModels, MayBeThoseOfTheTable) {
  EXPECT_EQ(tune_model("qwen3-30b").model, (tuner::Model{"qwen3-30b", 128, 8, 1536, 2048, false}));
  ConfigOverrides overrides;
  overrides.num_experts = 16;
  overrides.intermediate = 64;
  EXPECT_EQ(tune_model("qwen3-30b", overrides).model,
            (tuner::Model{"qwen3-30b", 16, 8, 128, 2048, false}));
  EXPECT_EQ(tune_model("ramp-phi", overrides).model,
            (tuner::Model{"ramp-phi", 16, 2, 128, 4096, true}));
  EXPECT_THROW(tune_model("no-such-model"), Error);
}

TEST(IdsOf, MakeTheHistogramWithDistinctExperts) {
  for (const double beta : {0.2, 0.6, 1.0}) {
    const auto counts = tuner::draw_counts(tuner::Generator::kDistinct, 64, 32, 4, beta, 3);
    const std::vector<std::int32_t> ids = ids_of(counts, 4);
    ASSERT_EQ(ids.size(), 64u * 4);
    std::vector<std::int64_t> found(32);
    for (std::size_t t = 0; t < 64; ++t) {
      std::set<std::int32_t> of_token(&ids[t * 4], &ids[t * 4] + 4);
      EXPECT_EQ(of_token.size(), 4u) << "token " << t;
      for (const std::int32_t id : of_token) ++found[static_cast<std::size_t>(id)];
    }
    EXPECT_EQ(found, counts);
  }
}

TEST(IdsOf, RefuseWhatNoRouterChooses) {
  EXPECT_EQ(ids_of(std::vector<std::int64_t>{2, 2}, 2).size(), 4u);
  EXPECT_ERROR((ids_of(std::vector<std::int64_t>{3, 1}, 2)), kUnsupported,
               "expert 0 has 3 rows of 2 tokens");
  EXPECT_THROW(ids_of(std::vector<std::int64_t>{2, 1}, 2), Error);
}

// The rows of `bench --suite grouped` and those of the tuner come from one generator.
TEST(IdsOf, SharesItsHistogramsWithTheSuite) {
  const GroupedPoint point{32, 64, 64, 16, false, 0.7};
  const auto counts = tuner::draw_counts(tuner::Generator::kDistinct, 64, 32, 8, 0.7, 5);
  const std::vector<std::int32_t> ends = ends_of(point, 5);
  std::int64_t sum = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) EXPECT_EQ(ends[e], sum += counts[e]);
}

ConfigOverrides tiny() {
  ConfigOverrides overrides;
  overrides.num_experts = 8;
  overrides.top_k = 2;
  overrides.hidden = 128;
  overrides.intermediate = 128;
  return overrides;
}

TEST(TunedKernelOnTheCpu, IsMeasuredFittedAndChosen) {
  for (const TunedKernel which : {TunedKernel::kGrouped, TunedKernel::kLayer}) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF8E4M3}) {
      TuneOptions options;
      options.kernel = which;
      options.dtype = dtype;
      options.models = {tune_model("olmoe", tiny())};
      options.max_tokens = 16;
      options.repeat = 2;
      int prepared = 0;
      options.preparing = [&](const std::string&) { ++prepared; };
      const tuner::Kernel kernel = make_tuned_kernel(options);
      tuner::Plan plan;
      plan.models = {options.models[0].model};
      plan.tokens = {2, 4, 8, 16};
      plan.betas = {0.6, 1};
      plan.test_tokens = {4, 16};
      plan.test_betas = {0.8, 1};
      tuner::Profile profile = tuner::new_profile(kernel, tuned_device(Backend::kCpu), plan);
      EXPECT_TRUE(tuner::measure(profile, kernel));
      EXPECT_EQ(prepared, 1);
      for (const tuner::Point& point : profile.points) EXPECT_THAT(point.times_us, Each(Gt(0)));
      const tuner::Fit fit = tuner::fit(profile);
      const std::vector<tuner::Outcome> outcomes = tuner::evaluate(profile, fit);
      EXPECT_EQ(outcomes.size(), 4u);
      for (const tuner::Outcome& outcome : outcomes) EXPECT_TRUE(outcome.rule_us);
    }
  }
}

// Histograms drawn with repetition are no routing of a layer.
TEST(TunedKernelOnTheCpu, LeavesOutHistogramsThatNoRouterMakes) {
  TuneOptions options;
  options.kernel = TunedKernel::kLayer;
  options.models = {tune_model("olmoe", tiny())};
  options.max_tokens = 16;
  options.repeat = 1;
  const tuner::Kernel kernel = make_tuned_kernel(options);
  const std::vector<std::int64_t> twice{32, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_ERROR(kernel.time(options.models[0].model, 0, twice), kUnsupported,
               "--generator distinct");
  const std::vector<std::int64_t> good{16, 16, 0, 0, 0, 0, 0, 0};
  EXPECT_GT(kernel.time(options.models[0].model, 0, good).median_us, 0);
  tuner::Model other = options.models[0].model;
  other.name = "another";
  EXPECT_THROW(kernel.time(other, 0, good), Error);
}

}  // namespace
}  // namespace switchyard::bench
