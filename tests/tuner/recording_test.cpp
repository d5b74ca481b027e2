// Recordings of routings: their files, and the points that they become.
#include "switchyard/recording.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "model/errors.h"
#include "model/temporary_directory.h"
#include "switchyard/routing.h"
#include "tuner/known_kernel.h"

namespace switchyard::tuner {
namespace {

using switchyard::test::TemporaryDirectory;
using namespace test;
using ::testing::ElementsAre;
using ::testing::SizeIs;

Recording recording_of(const std::string& layer, const Model& model, int steps,
                       std::uint64_t seed) {
  Recording recording;
  recording.layer = layer;
  recording.rank = 1;
  recording.num_ranks = 2;
  recording.num_experts = model.num_experts;
  recording.top_k = model.top_k;
  recording.n = model.n;
  recording.k = model.k;
  recording.overwritten = 17;
  for (int i = 0; i < steps; ++i) {
    const auto step = static_cast<std::uint64_t>(i);
    recording.steps.push_back({17 + step, 20 + 2 * step, 5,
                               draw_counts(Generator::kDistinct, 10 + i, model.num_experts,
                                           model.top_k, 0.8, seed + step)});
  }
  return recording;
}

TEST(RecordingFile, ReadsWhatItWrote) {
  const Recordings recordings{
      "a \"machine\"", {recording_of("layers.0", kSmall, 3, 1), recording_of("", kTiny, 0, 2)}};
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "routing.json";
  write_recordings(file, recordings);
  EXPECT_EQ(read_recordings(file), recordings);
  EXPECT_EQ(parse_recordings(to_json(recordings), "a text"), recordings);
  EXPECT_EQ(parse_recordings(to_json(Recordings{}), "a text"), Recordings{});
}

TEST(RecordingFile, RefusesWhatMakesNoSense) {
  const std::string good = to_json(Recordings{"m", {recording_of("layers.0", kTiny, 1, 1)}});
  const auto refused = [&](const std::string& from, const std::string& to, const char* part) {
    std::string text = good;
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    EXPECT_ERROR(parse_recordings(text, "r.json"), kInvalidFile, "r.json", part);
  };
  refused("switchyard routing", "switchyard fit", "switchyard routing");
  refused("\"file_version\": 1", "\"file_version\": 2", "version 2");
  refused("\"experts\":16", "\"experts\":17", "has 16 elements");
  refused("\"rank\":1", "\"rank\":2", "2 of 2 ranks");
  refused("\"counts\":[", "\"counts\":[-1,", "whole numbers");
  refused("\"overwritten\":17", "\"other\":17", "overwritten is absent");
}

TEST(RecordedPoints, AreFittedAndJudgedBy) {
  const KnownKernel known;
  Plan plan;
  plan.models = {kSmall, kTiny};
  plan.tokens = {8};
  plan.betas = {1};
  plan.test_tokens.clear();
  plan.test_betas.clear();
  const Recordings recordings{
      "m",
      {recording_of("layers.0", kSmall, 6, 1), recording_of("layers.1", kSmall, 4, 100),
       recording_of("layers.0", kTiny, 3, 7)}};
  add_recorded(plan, recordings, 8);
  ASSERT_THAT(plan.recorded, SizeIs(8 + 3));
  // Evenly over all: both ends of the first layer's steps, and the second layer's.
  EXPECT_EQ(plan.recorded[0].counts, recordings.layers[0].steps[0].counts);
  EXPECT_EQ(plan.recorded[7].counts, recordings.layers[1].steps[2].counts);

  const Profile profile = new_profile(known.kernel, kDevice, plan);
  int fitted = 0, held_out = 0;
  for (const Point& point : profile.points) {
    if (!point.test) continue;
    (point.held_out() ? held_out : fitted) += 1;
    EXPECT_EQ(point.beta_reached, balancedness(point.counts));
    EXPECT_EQ(point.beta, point.beta_reached);
    std::int64_t rows = 0;
    for (const std::int64_t count : point.counts) rows += count;
    EXPECT_EQ(point.tokens * profile.models[point.model].top_k, rows);
  }
  EXPECT_EQ(fitted, 6 + 3);
  EXPECT_EQ(held_out, 2);

  // Measured, written, and gone on with: no point comes twice.
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "p.json";
  Profile measured = profile;
  EXPECT_TRUE(measure(measured, known.kernel, {.file = file}));
  EXPECT_EQ(resumed_profile(file, known.kernel, kDevice, plan), measured);
}

TEST(RecordedPoints, TheSameHistogramCountsOnce) {
  Plan plan;
  plan.models = {kTiny};
  Recording recording = recording_of("layers.0", kTiny, 2, 3);
  recording.steps.push_back(recording.steps[0]);
  recording.steps.emplace_back();  // a pass without tokens
  recording.steps.back().counts.assign(16, 0);
  add_recorded(plan, {"m", {recording}});
  EXPECT_THAT(plan.recorded, SizeIs(2));
}

TEST(RecordedPoints, OtherLayersAreRefused) {
  Plan plan;
  plan.models = {kSmall};
  EXPECT_ERROR(add_recorded(plan, {"m", {recording_of("layers.0", kTiny, 2, 3)}}), kInvalidArgument,
               "32 experts with top-4", "small");
  plan.models = {kTiny};
  plan.recorded = {{0, {1, 2}}};
  const KnownKernel known;
  EXPECT_ERROR(new_profile(known.kernel, kDevice, plan), kInvalidArgument, "2 experts");
  plan.recorded = {{1, std::vector<std::int64_t>(16, 1)}};
  EXPECT_ERROR(new_profile(known.kernel, kDevice, plan), kInvalidArgument, "model 1");
  plan.recorded = {{0, std::vector<std::int64_t>(16, 0)}};
  EXPECT_ERROR(new_profile(known.kernel, kDevice, plan), kInvalidArgument, "no rows");
}

}  // namespace
}  // namespace switchyard::tuner
