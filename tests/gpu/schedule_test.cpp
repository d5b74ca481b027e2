// Schedules that a caller forces: every one computes the same. (What the rules choose is tested
// without a GPU: tests/layer/schedule_rules_test.cpp.)
#include <gtest/gtest.h>

#include <string>

#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

// Every choice of a schedule, forced: of launches, of the order of tiles, of splits.
class GpuSchedule : public OnGpu<::testing::TestWithParam<DType>> {
 protected:
  // Larger than a tile in every direction, ragged in every direction.
  GpuSchedule()
      : spec_(spec_of(592, 360, 16, 4)),
        weights_(GetParam() == kFp8 ? fp8_weights(spec_) : make_weights(spec_, GetParam(), 3)) {}

  BatchResult run(const Schedule& schedule, const Batch& batch) const {
    DeviceLayer layer(spec_, weights_, 1500, {.cuda = {.schedule = schedule}});
    const BatchResult result = layer.run(batch, DType::kBF16);
    if (GetParam() == kFp8) {
      expect_accurate_fp8(spec_, weights_, batch, result, 0.8);
    } else {
      expect_accurate(spec_, weights_, batch, result);
    }
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == result.output) << "repeated";
    return result;
  }

  LayerSpec spec_;
  MoeWeights weights_;
};

TEST_P(GpuSchedule, EveryLaunch) {
  for (const int tokens : {1, 32, 40, 1500}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    const Batch batch = random_batch(spec_, tokens, DType::kBF16, 60 + tokens);
    const BatchResult single = run({.small_tokens = 0, .paired_rows = -1}, batch);
    EXPECT_TRUE(run({.small_tokens = 0, .paired_rows = 0}, batch).output == single.output);
    run({.small_tokens = 32}, batch);
  }
}

TEST_P(GpuSchedule, EveryOrder) {
  const Batch batch = random_batch(spec_, 1500, DType::kBF16, 61);
  const BatchResult by_rule = run({}, batch);
  for (const int lag : {1, 2, 9, 1000}) {
    for (const int band : {1, 2, 8}) {
      for (const int paired_rows : {-1, 0}) {
        SCOPED_TRACE(::testing::Message()
                     << "lag " << lag << ", band " << band << ", paired rows " << paired_rows);
        const Schedule schedule{.paired_rows = paired_rows, .lag = lag, .band = band};
        EXPECT_TRUE(run(schedule, batch).output == by_rule.output);
      }
    }
  }
  LayerOptions few, many;
  few.cuda.schedule.lag = 1;
  many.cuda.schedule.lag = 30;
  EXPECT_LT(DeviceLayer(spec_, weights_, 1500, few).layer().workspace_bytes(),
            DeviceLayer(spec_, weights_, 1500, many).layer().workspace_bytes());
}

TEST_P(GpuSchedule, EverySplit) {
  const Batch batch = random_batch(spec_, 20, DType::kBF16, 62);
  const BatchResult whole = run({.splits = 1}, batch);
  EXPECT_FALSE(run({.splits = 2}, batch).output == whole.output) << "parts are rounded";
  EXPECT_FALSE(run({.splits = 4}, batch).output == whole.output);
  // Large passes have no parts.
  const Batch large = random_batch(spec_, 40, DType::kBF16, 63);
  EXPECT_TRUE(run({.splits = 4}, large).output == run({}, large).output);
}

INSTANTIATE_TEST_SUITE_P(Types, GpuSchedule, ::testing::Values(DType::kBF16, kFp8),
                         [](const auto& type) { return std::string(to_string(type.param)); });

}  // namespace
}  // namespace switchyard::testing
