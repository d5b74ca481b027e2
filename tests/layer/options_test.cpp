// The options that MoeLayer refuses with any engine, and how the backends share these checks.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "gpu/device.h"
#include "layer/compute.h"
#include "model/errors.h"
#include "models/generate.h"
#include "switchyard/layer.h"
#include "switchyard/workspace.h"

namespace switchyard {
namespace {

class LayerOptionsTest : public ::testing::Test {
 protected:
  LayerOptionsTest() {
    spec_.hidden = 64;
    spec_.intermediate = 32;
    spec_.num_experts = 4;
    spec_.top_k = 2;
    weights_ = generate_weights(spec_, DType::kBF16, 1, {.num_threads = 1});
  }
  MoeLayer make(const LayerOptions& options) const { return {world_, spec_, weights_, options}; }

  World world_ = World::single();
  LayerSpec spec_;
  MoeWeights weights_;
};

constexpr Backend kCpu = Backend::kCpu;
constexpr Backend kCuda = Backend::kCuda;

TEST_F(LayerOptionsTest, ValuesOutOfRange) {
  for (const Backend backend : {kCpu, kCuda}) {
    const auto refused = [&](LayerOptions options, const char* part) {
      options.backend = backend;
      EXPECT_ERROR(make(options), kInvalidArgument, part);
    };
    refused({.max_tokens = 0}, "max_tokens is 0");
    refused({.cpu = {.num_threads = -1}}, "num_threads is -1");
    refused({.cuda = {.device = -2}}, "device is -2");
    refused({.cuda = {.reserved_sms = -1}}, "reserved_sms is -1");
    refused({.deadline = std::chrono::milliseconds(-1)}, "deadline is -1 ms");
    refused({.patience = std::chrono::microseconds(-1)}, "patience is -1 us");
    refused({.patience = std::chrono::years(2)}, "patience is 63113904000000 us");
    refused({.compute = DType::kF16}, "compute type f16");
    refused({.compute = DType::kU8}, "bf16, f32 or f8_e4m3");
    refused({.cuda = {.schedule = {.small_tokens = 33}}}, "schedule.small_tokens is 33");
    refused({.cuda = {.schedule = {.paired_rows = -2}}}, "schedule.paired_rows is -2");
    refused({.cuda = {.schedule = {.low_rows = -1}}}, "schedule.low_rows is -1");
    refused({.cuda = {.schedule = {.lag = 0}}}, "schedule.lag is 0");
    refused({.cuda = {.schedule = {.band = 3}}}, "schedule.band is 3");
    refused({.cuda = {.schedule = {.band = 128}}}, "schedule.band is 128");
    refused({.cuda = {.schedule = {.splits = 8}}}, "schedule.splits is 8");
  }
  EXPECT_ERROR(make({.backend = static_cast<Backend>(7)}), kInvalidArgument, "backend is 7");
}

TEST_F(LayerOptionsTest, TheCpuHasOneSchedule) {
  EXPECT_ERROR(make({.cuda = {.schedule = {.lag = 2}}}), kInvalidArgument,
               "schedule is set, but the backend is cpu");
}

TEST_F(LayerOptionsTest, OneMemoryOfTheSameWorld) {
  const Workspace workspace(world_, spec_, {.compute = DType::kF32});
  EXPECT_ERROR(make({.workspace = &workspace, .workspace_slot = 1}), kInvalidArgument,
               "workspace_slot is 1; the workspace has slots 0 to 0");
  EXPECT_ERROR(make({.workspace_slot = 1}), kInvalidArgument, "there is no workspace");
  const Workspace elsewhere(World::single(), spec_, {.compute = DType::kF32});
  EXPECT_ERROR(make({.workspace = &elsewhere}), kInvalidArgument, "workspace is of another world");
}

TEST_F(LayerOptionsTest, WeightsOfARanksOwnExpertsMustBeThere) {
  weights_.experts[2] = {};
  for (const Backend backend : {kCpu, kCuda}) {
    if (backend == kCuda && gpu::device_count() == 0) continue;
    EXPECT_ERROR(make({.backend = backend}), kMissingTensor, "experts[2].gate is empty");
  }
  EXPECT_EQ(own_experts(5, 1, 2).begin, 2);
  EXPECT_EQ(own_experts(5, 1, 2).end, 5);
  EXPECT_EQ(own_experts(2, 1, 4).begin, own_experts(2, 1, 4).end - 1);
  EXPECT_ERROR(own_experts(5, 2, 2), kInvalidArgument, "rank 2 of 2");
  validate(spec_, weights_, {0, 2});
  weights_.experts[3].down = {};
  EXPECT_ERROR(validate(spec_, weights_, {0, 2}), kMissingTensor, "experts[3].down is empty");
  for (FfnWeights& expert : weights_.experts) expert = {};
  EXPECT_ERROR(resolve_compute(weights_, {}), kInvalidArgument, "given no expert's weights");
}

TEST_F(LayerOptionsTest, ADeadlineMayBeForEver) {
  MoeLayer layer = make({.deadline = std::chrono::milliseconds::max()});
  const std::vector<float> x(64);
  std::vector<float> y(64, 1);
  layer.forward({.activations = {x.data(), DType::kF32, 1, 64, 64}},
                {.data = y.data(), .dtype = DType::kF32});
  EXPECT_EQ(y, x);
}

TEST_F(LayerOptionsTest, OptionsOfTheOtherBackend) {
  EXPECT_ERROR(make({.cuda = {.device = 0}}), kInvalidArgument, "device is 0", "cpu");
  EXPECT_ERROR(make({.cuda = {.reserved_sms = 2}}), kInvalidArgument, "reserved_sms is 2", "cpu");
  EXPECT_ERROR(make({.cuda = {.cooperative_launch = false}}), kInvalidArgument,
               "cooperative_launch is false", "cpu");
  EXPECT_ERROR(make({.backend = kCuda, .cpu = {.num_threads = 2}}), kInvalidArgument,
               "num_threads is 2", "cuda");
  EXPECT_ERROR(make({.backend = kCuda, .diagnostics = {.on_step = [](const ProtocolStep&) {}}}),
               kInvalidArgument, "on_step", "cuda");
}

TEST_F(LayerOptionsTest, CudaWithoutAGpuIsUnsupported) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_ERROR(make({.backend = kCuda}), kUnsupported, "CPU");
  EXPECT_ERROR(make({.backend = kCuda, .cuda = {.device = 3}}), kUnsupported, "CPU");
  EXPECT_ERROR(gpu::Stream(), gpu::built_with_cuda() ? ErrorCode::kSystem : ErrorCode::kUnsupported,
               "");
  EXPECT_EQ(gpu::residence_of(&spec_), gpu::Residence::kHost);
}

TEST_F(LayerOptionsTest, CudaDevicesAndSmsThatAreNotThere) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  EXPECT_ERROR(make({.backend = kCuda, .cuda = {.device = 99}}), kInvalidArgument, "device 99");
  const int sms = gpu::device_info(0).num_sms;
  EXPECT_ERROR(make({.backend = kCuda, .cuda = {.device = 0, .reserved_sms = sms}}),
               kInvalidArgument, "reserved_sms", "leave at least 1");
  EXPECT_ERROR(make({.backend = kCuda, .compute = DType::kF32}), kUnsupported, "f32");
}

TEST_F(LayerOptionsTest, TheCpuHasNoStreamsAndTellsItsWorkspace) {
  MoeLayer layer = make({.max_tokens = 8, .cpu = {.num_threads = 1}});
  EXPECT_EQ(layer.backend(), kCpu);
  EXPECT_STREQ(to_string(layer.backend()), "cpu");
  std::vector<float> x(64, 0.5f);
  std::vector<float> y(64);
  ForwardInput input{.activations = {x.data(), DType::kF32, 1, 64, 64}};
  const ForwardOutput output{.data = y.data(), .dtype = DType::kF32};
  layer.forward(input, output);
  EXPECT_GE(layer.workspace_bytes(), layer.stats().workspace_bytes_used);
  input.stream = y.data();
  EXPECT_ERROR(layer.forward(input, output), kInvalidArgument, "stream", "cpu");
}

}  // namespace
}  // namespace switchyard
