// The tuner through the C interface: a C callback, its statuses, and what is refused.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "c_api/calls.h"
#include "model/temporary_directory.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

const char* const kValueNames[] = {"BLOCK_M"};
const std::int64_t kLow[] = {16}, kHigh[] = {64};

struct Calls {
  int timed = 0, told = 0;
  sy_status status = SY_OK;
};

// Low tiles for few tokens, high tiles for many.
sy_status time_one(void* user, std::int32_t, std::int32_t configuration, const std::int64_t* counts,
                   std::int32_t num_experts, double* median_us, double*) {
  auto& calls = *static_cast<Calls*>(user);
  ++calls.timed;
  double tiles = 0;
  for (std::int32_t e = 0; e < num_experts; ++e) {
    const std::int64_t rows = configuration == 0 ? 16 : 64;
    tiles += static_cast<double>((counts[e] + rows - 1) / rows);
  }
  *median_us = 5 + tiles * (configuration == 0 ? 1.0 : 2.0);
  return calls.status;
}

void tell(void* user, std::uint64_t, std::uint64_t, double, double, std::int32_t) {
  ++static_cast<Calls*>(user)->told;
}

class CTuner : public ::testing::Test {
 protected:
  CTuner() {
    configurations_[0] = {.name = "low",
                          .token_rows = 16,
                          .weight_rows = 128,
                          .splits = 1,
                          .blocks = 1,
                          .group_m = 1,
                          .num_values = 1,
                          .value_names = kValueNames,
                          .values = kLow};
    configurations_[1] = configurations_[0];
    configurations_[1].name = "high";
    configurations_[1].token_rows = 64;
    configurations_[1].values = kHigh;
    kernel_.name = "kernel";
    kernel_.machine = "machine";
    kernel_.num_sms = 4;
    kernel_.num_configurations = 2;
    kernel_.configurations = configurations_;
    model_ = {.name = "model", .num_experts = 8, .top_k = 2, .n = 128, .k = 128};
    plan_.models = &model_;
    plan_.num_models = 1;
    options_.file = profile_.c_str();
    options_.time = time_one;
    options_.progress = tell;
    options_.user = &calls_;
  }
  void expect_refused(sy_status status, sy_status code, const char* part) {
    EXPECT_EQ(status, code);
    EXPECT_THAT(last_error().message, HasSubstr(part));
  }

  test::TemporaryDirectory directory_;
  std::string profile_ = (directory_ / "p.json").string(), fit_ = (directory_ / "f.json").string();
  Calls calls_;
  sy_tune_configuration configurations_[2]{};
  sy_tune_model model_{};
  sy_tune_kernel kernel_ = SY_TUNE_KERNEL_INIT;
  sy_tune_plan plan_ = SY_TUNE_PLAN_INIT;
  sy_tune_options options_ = SY_TUNE_OPTIONS_INIT;
};

TEST_F(CTuner, MeasuresFitsAndSelects) {
  std::int32_t complete = 0;
  ASSERT_EQ(sy_tune_measure(&kernel_, &plan_, &options_, &complete), SY_OK);
  EXPECT_EQ(complete, 1);
  EXPECT_EQ(calls_.timed, 43 * 2);
  EXPECT_EQ(calls_.told, 43 * 2 + 1);
  ASSERT_EQ(sy_tune_fit(profile_.c_str(), SY_FORM_TASKS, 0, fit_.c_str()), SY_OK);
  sy_tuner* tuner = nullptr;
  ASSERT_EQ(sy_tuner_open(&kernel_, fit_.c_str(), &tuner), SY_OK);
  std::int32_t chosen = -1;
  double predicted = 0;
  const std::vector<std::int64_t> few(8, 1), many(8, 64);
  ASSERT_EQ(sy_tuner_select(tuner, "model", few.data(), 8, &chosen, &predicted), SY_OK);
  EXPECT_EQ(chosen, 0);
  EXPECT_NEAR(predicted, 5 + 8, 1e-3);
  ASSERT_EQ(sy_tuner_select(tuner, "model", many.data(), 8, &chosen, nullptr), SY_OK);
  EXPECT_EQ(chosen, 1);
  expect_refused(sy_tuner_select(tuner, "model", few.data(), 7, &chosen, nullptr),
                 SY_INVALID_ARGUMENT, "7 experts");
  EXPECT_EQ(sy_tuner_destroy(&tuner), SY_OK);
  EXPECT_EQ(tuner, nullptr);
  kernel_.version = 1;
  expect_refused(sy_tuner_open(&kernel_, fit_.c_str(), &tuner), SY_INVALID_ARGUMENT, "older");
  kernel_.version = 0;
  kernel_.machine = "another";
  expect_refused(sy_tuner_open(&kernel_, fit_.c_str(), &tuner), SY_INVALID_ARGUMENT,
                 "'machine', and 'another'");

  std::uint64_t size = 0;
  ASSERT_EQ(sy_tune_evaluate(profile_.c_str(), SY_FORM_TASKS, 0, nullptr, &size), SY_OK);
  std::string text(size, '?');
  ASSERT_EQ(sy_tune_evaluate(profile_.c_str(), SY_FORM_TASKS, 0, text.data(), &size), SY_OK);
  EXPECT_EQ(text.back(), '\0');
  EXPECT_THAT(text, HasSubstr("\"exhaustive_us\""));
}

TEST_F(CTuner, StopsWithItsCallback) {
  calls_.status = SY_SYSTEM;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_ABORTED, "system");
  EXPECT_EQ(calls_.timed, 1);
  calls_.status = SY_UNSUPPORTED;
  EXPECT_EQ(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_OK);
  expect_refused(sy_tune_fit(profile_.c_str(), SY_FORM_TASKS, 0, fit_.c_str()), SY_INVALID_ARGUMENT,
                 "at most 0 points");
}

TEST_F(CTuner, RefusesWhatMakesNoSense) {
  expect_refused(sy_tune_measure(nullptr, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT,
                 "sy_tune_kernel is null");
  options_.time = nullptr;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT,
                 "time is null");
  options_.time = time_one;
  options_.budget_seconds = -1;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT, "-1");
  options_.budget_seconds = INFINITY;
  configurations_[1].name = nullptr;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT,
                 "name is null");
  configurations_[1].name = "high";
  plan_.num_models = -1;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT,
                 "models has -1");
  plan_.num_models = 1;
  plan_.generator = 7;
  expect_refused(sy_tune_measure(&kernel_, &plan_, &options_, nullptr), SY_INVALID_ARGUMENT, "7");
  expect_refused(sy_tune_fit("/nowhere/p.json", SY_FORM_FULL, 1, fit_.c_str()), SY_INVALID_FILE,
                 "/nowhere/p.json");
  expect_refused(sy_tune_fit(profile_.c_str(), 9, 1, fit_.c_str()), SY_INVALID_ARGUMENT,
                 "the form is 9");
  std::int64_t counts[4];
  expect_refused(sy_draw_counts(SY_DISTINCT, 2, 4, 5, 1, 0, counts), SY_INVALID_ARGUMENT,
                 "5 of 4 experts");
  EXPECT_EQ(calls_.timed, 0);
}

}  // namespace
}  // namespace switchyard::testing
