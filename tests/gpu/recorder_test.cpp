// The recorder of routings on the GPU: what the kernel stores beside what it routed, also in
// graphs.
#include <gtest/gtest.h>

#include <string>

#include "gpu/device.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

class GpuRecorder : public OnGpu<::testing::TestWithParam<DType>> {
 protected:
  GpuRecorder()
      : spec_(spec_of(256, 128, 40, 4)),
        weights_(GetParam() == kFp8 ? fp8_weights(spec_) : make_weights(spec_, GetParam(), 3)) {}

  // The rows of each expert that a pass told of.
  std::vector<std::int64_t> counted(const std::vector<std::int32_t>& ids) const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(spec_.num_experts));
    for (const std::int32_t id : ids) {
      if (id >= 0) ++counts[static_cast<std::size_t>(id)];
    }
    return counts;
  }

  LayerSpec spec_;
  MoeWeights weights_;
};

// Small passes, large ones and pairs, with more of them than the ring has slots.
TEST_P(GpuRecorder, HasWhatThePassesRouted) {
  DeviceLayer layer(spec_, weights_, 1500,
                    {.diagnostics = {.recorded_steps = 5, .name = "layers.7"}});
  EXPECT_TRUE(layer.layer().recording().steps.empty());
  std::vector<RecordedStep> expected;
  for (const int tokens : {1, 20, 0, 40, 300, 1500, 7}) {
    const Batch batch = random_batch(spec_, tokens, DType::kBF16, 80 + tokens);
    const BatchResult result = layer.run(batch, DType::kBF16);
    EXPECT_EQ(result.stats[0].tokens_per_expert, counted(result.ids));
    expected.push_back({expected.size(), result.stats[0].epoch, tokens, counted(result.ids)});
  }
  const Recording recording = layer.layer().recording();
  EXPECT_EQ(recording.layer, "layers.7");
  EXPECT_EQ(recording.overwritten, 2u);
  EXPECT_EQ(recording.steps, (std::vector<RecordedStep>(expected.begin() + 2, expected.end())));
}

TEST_P(GpuRecorder, ReplaysAreStepsOfTheirOwn) {
  DeviceLayer layer(spec_, weights_, 64, {.diagnostics = {.recorded_steps = 8}});
  const Batch batch = random_batch(spec_, 64, DType::kBF16, 5),
              other = random_batch(spec_, 64, DType::kBF16, 6);
  const auto first = counted(layer.run(batch, DType::kBF16).ids);
  const auto second = counted(layer.run(other, DType::kBF16).ids);
  ASSERT_NE(first, second);
  layer.load(batch, DType::kBF16);
  gpu::Graph graph = gpu::Graph::capture(layer.stream(), [&] { layer.enqueue(); });
  EXPECT_EQ(graph.num_nodes(), 1);
  graph.launch(layer.stream());
  layer.stream().synchronize();
  layer.replace_activations(other);
  graph.launch(layer.stream());
  layer.stream().synchronize();
  const Recording recording = layer.layer().recording();
  ASSERT_EQ(recording.steps.size(), 4u);
  EXPECT_EQ(recording.steps[2].counts, first);
  EXPECT_EQ(recording.steps[3].counts, second);
  EXPECT_EQ(recording.steps[3].epoch, recording.steps[0].epoch + 3);
}

// A recorder changes no result.
TEST_P(GpuRecorder, IsOffUnlessAskedFor) {
  DeviceLayer off(spec_, weights_, 300);
  EXPECT_THROW(off.layer().recording(), Error);
  DeviceLayer on(spec_, weights_, 300, {.diagnostics = {.recorded_steps = 3}});
  for (const int tokens : {16, 300}) {
    const Batch batch = random_batch(spec_, tokens, DType::kBF16, 9);
    EXPECT_TRUE(on.run(batch, DType::kBF16).output == off.run(batch, DType::kBF16).output);
  }
  EXPECT_EQ(on.layer().workspace_bytes() - off.layer().workspace_bytes(), 8u + 3 * (16 + 4 * 40));
}

INSTANTIATE_TEST_SUITE_P(Types, GpuRecorder, ::testing::Values(DType::kBF16, kFp8),
                         [](const auto& type) { return std::string(to_string(type.param)); });

}  // namespace
}  // namespace switchyard::testing
