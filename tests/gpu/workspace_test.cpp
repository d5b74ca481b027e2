// Layers of different shapes whose passes follow one another in one memory of the GPU's.
#include "switchyard/workspace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/device_ranks.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

constexpr int kMostTokens = 300;

std::vector<LayerSpec> shapes() {
  std::vector<LayerSpec> specs = {spec_of(512, 256, 24, 4), spec_of(1024, 128, 6, 2),
                                  spec_of(256, 768, 13, 8), spec_of(384, 128, 48, 1)};
  specs[1].shared_intermediate = 256;
  specs[3].weight_on_input = true;
  return specs;
}

struct Shapes {
  explicit Shapes(DType type) : compute(type), specs(shapes()) {
    for (const LayerSpec& spec : specs) {
      weights.push_back(generate_weights(spec, type, 3, {.num_threads = 4}));
    }
  }
  WorkspaceOptions options(const DeviceAllocator& allocator = {}) const {
    return {.backend = Backend::kCuda,
            .max_tokens = kMostTokens,
            .compute = compute,
            .allocator = allocator};
  }
  DeviceLayer make(std::size_t l, const Workspace* workspace) const {
    return {specs[l],
            weights[l],
            kMostTokens - static_cast<int>(l),
            {.workspace = workspace, .compute = compute}};
  }

  DType compute;
  std::vector<LayerSpec> specs;
  std::vector<MoeWeights> weights;
};

class GpuWorkspace : public OnGpu<::testing::TestWithParam<DType>> {};

TEST_P(GpuWorkspace, SameBitsAsInMemoryOfTheirOwn) {
  const Shapes shapes(GetParam());
  const Workspace workspace(DeviceLayer::world(), shapes.specs, shapes.options());
  std::vector<std::unique_ptr<DeviceLayer>> own, shared;
  for (std::size_t l = 0; l < shapes.specs.size(); ++l) {
    own.push_back(std::make_unique<DeviceLayer>(shapes.make(l, nullptr)));
    shared.push_back(std::make_unique<DeviceLayer>(shapes.make(l, &workspace)));
  }
  std::mt19937_64 random(5);
  for (int i = 0; i < 80; ++i) {
    const std::size_t l = random() % shapes.specs.size();
    constexpr int kSizes[] = {0, 1, 5, 31, 32, 33, 150, kMostTokens - 10};
    const int tokens = kSizes[random() % std::size(kSizes)];
    const Batch batch = random_batch(shapes.specs[l], tokens, DType::kBF16, random());
    const BatchResult expected = own[l]->run(batch, DType::kBF16);
    const BatchResult result = shared[l]->run(batch, DType::kBF16);
    EXPECT_TRUE(result.output == expected.output) << "pass " << i << " of layer " << l;
    EXPECT_EQ(result.ids, expected.ids);
    EXPECT_EQ(result.stats[0].tokens_per_expert, expected.stats[0].tokens_per_expert);
    EXPECT_EQ(result.stats[0].epoch, static_cast<std::uint64_t>(i) + 1);
  }
}

TEST_P(GpuWorkspace, EveryNarrowerLayerFits) {
  const LayerSpec room = spec_of(512, 1024, 16, 4);
  Shapes shapes(GetParam());
  const Workspace workspace(DeviceLayer::world(), room, shapes.options());
  for (int width = 128; width <= room.intermediate; width += 128) {
    LayerSpec spec = room;
    spec.intermediate = width;
    DeviceLayer(spec, generate_weights(spec, GetParam(), 3, {.num_threads = 4}), kMostTokens,
                {.workspace = &workspace, .compute = GetParam()});
  }
  LayerSpec spec = room;
  spec.intermediate += 128;
  EXPECT_ERROR(DeviceLayer(spec, generate_weights(spec, GetParam(), 3, {.num_threads = 4}),
                           kMostTokens, {.workspace = &workspace, .compute = GetParam()}),
               kInvalidArgument, "does not fit");
}

// Graphs that were captured before go on afterwards: all addresses are the same.
TEST_P(GpuWorkspace, ReleasesAndRestores) {
  const Shapes shapes(GetParam());
  Workspace workspace(DeviceLayer::world(), shapes.specs, shapes.options());
  DeviceLayer first = shapes.make(0, &workspace), second = shapes.make(1, &workspace);
  const Batch batch = random_batch(shapes.specs[0], 200, DType::kBF16, 1);
  const Batch other = random_batch(shapes.specs[1], 20, DType::kBF16, 1);
  const BatchResult expected = first.run(batch, DType::kBF16);
  const BatchResult of_other = second.run(other, DType::kBF16);
  gpu::Graph graph = gpu::Graph::capture(first.stream(), [&] { first.enqueue(); });
  for (int i = 0; i < 3; ++i) {
    graph.launch(first.stream());
    EXPECT_TRUE(first.fetch().output == expected.output);
    const std::uint64_t before = gpu::device_info(0).free_bytes;
    workspace.release();
    workspace.release();
    EXPECT_TRUE(workspace.released());
    EXPECT_GE(gpu::device_info(0).free_bytes, before + workspace.bytes());
    EXPECT_ERROR(second.enqueue(), kInvalidArgument, "call restore() on all ranks");
    EXPECT_ERROR(second.layer().stats(), kInvalidArgument, "restore()");
    workspace.restore();
    EXPECT_FALSE(workspace.released());
    graph.launch(first.stream());
    EXPECT_TRUE(first.fetch().output == expected.output);
    EXPECT_TRUE(second.run(other, DType::kBF16).output == of_other.output);
    EXPECT_EQ(second.layer().stats().epoch, 2u);
  }
}

TEST_P(GpuWorkspace, TheCallersAllocator) {
  const Shapes shapes(GetParam());
  std::map<void*, gpu::DeviceBuffer> buffers;
  std::size_t bytes = 0;
  std::vector<gpu::DeviceBuffer> in_the_way;
  const DeviceAllocator allocator{[&](std::size_t size) -> void* {
                                    gpu::DeviceBuffer buffer(size + 16);
                                    void* const memory = buffer.data() + 16;  // as it comes
                                    bytes += size;
                                    buffers.emplace(memory, std::move(buffer));
                                    return memory;
                                  },
                                  [&](void* memory) { EXPECT_EQ(buffers.erase(memory), 1u); }};
  std::optional<Workspace> workspace(std::in_place, DeviceLayer::world(), shapes.specs,
                                     shapes.options(allocator));
  EXPECT_EQ(buffers.size(), 2u);
  EXPECT_GE(bytes, workspace->bytes());
  std::optional<DeviceLayer> layer(std::in_place, shapes.make(0, &*workspace));
  const Batch batch = random_batch(shapes.specs[0], 200, DType::kBF16, 1);
  const BatchResult expected = shapes.make(0, nullptr).run(batch, DType::kBF16);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(layer->run(batch, DType::kBF16).output == expected.output);
    workspace->release();
    EXPECT_TRUE(buffers.empty());
    in_the_way.emplace_back(std::size_t{64} << 20);  // so that addresses change
    workspace->restore();
  }
  EXPECT_TRUE(layer->run(batch, DType::kBF16).output == expected.output);
  workspace.reset();
  EXPECT_EQ(buffers.size(), 2u) << "the layer has it";
  layer.reset();
  EXPECT_TRUE(buffers.empty());
  const DeviceAllocator empty{[](std::size_t) -> void* { return nullptr; }, [](void*) {}};
  EXPECT_ERROR(Workspace(DeviceLayer::world(), shapes.specs, shapes.options(empty)),
               kCapacityExceeded, "the workspace's allocator has no");
}

std::string name_of(const ::testing::TestParamInfo<DType>& info) { return to_string(info.param); }
INSTANTIATE_TEST_SUITE_P(Types, GpuWorkspace, ::testing::Values(DType::kBF16, DType::kF8E4M3),
                         name_of);

// Ranks are often a pass apart, in layers of different layouts.
class RanksWorkspace : public OnGpu<::testing::TestWithParam<DType>> {};

TEST_P(RanksWorkspace, SameBitsAsInMemoryOfTheirOwn) {
  const Shapes shapes(GetParam());
  constexpr int kRanks = 2, kPasses = 40;
  struct Step {
    std::size_t layer;
    Batch batch;
    Shares shares;
    BatchResult expected;
  };
  std::vector<Step> steps;
  std::mt19937_64 random(6);
  for (int i = 0; i < kPasses; ++i) {
    const std::size_t l = random() % shapes.specs.size();
    std::vector<std::int64_t> tokens;
    for (int r = 0; r < kRanks; ++r) {
      tokens.push_back(random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % 290));
    }
    Batch batch = random_batch(shapes.specs[l], tokens[0] + tokens[1], DType::kBF16, random());
    BatchResult expected = empty_result(shapes.specs[l], batch, kRanks, DType::kBF16);
    steps.push_back({l, std::move(batch), Shares::of(tokens), std::move(expected)});
  }
  run_all_ranks(World::threads(kRanks), [&](const World& world) {
    const LayerOptions of_rank = options_of_rank(world.rank(), kRanks, {});
    gpu::set_device(of_rank.cuda.device);
    WorkspaceOptions options = shapes.options();
    options.device = of_rank.cuda.device;
    options.reserved_sms = of_rank.cuda.reserved_sms;
    Workspace workspace(world, shapes.specs, options);
    std::vector<std::unique_ptr<DeviceRank>> own, shared;
    for (std::size_t l = 0; l < shapes.specs.size(); ++l) {
      own.push_back(std::make_unique<DeviceRank>(world, shapes.specs[l], shapes.weights[l],
                                                 kMostTokens, LayerOptions{.compute = GetParam()}));
      shared.push_back(std::make_unique<DeviceRank>(
          world, shapes.specs[l], shapes.weights[l], kMostTokens,
          LayerOptions{.workspace = &workspace, .compute = GetParam()}));
    }
    const int rank = world.rank();
    std::vector<std::unique_ptr<DeviceBatch>> batches;
    for (Step& step : steps) {
      own[step.layer]->run(step.batch, step.shares, step.expected);
      batches.push_back(
          std::make_unique<DeviceBatch>(own[step.layer]->share(step.batch, step.shares)));
    }
    const auto all_passes = [&] {
      const gpu::Stream& stream = shared[0]->stream();
      for (const auto& batch : batches) batch->poison(stream);
      stream.synchronize();
      World(world).barrier();
      for (std::size_t i = 0; i < steps.size(); ++i) {
        batches[i]->enqueue(shared[steps[i].layer]->layer(), stream);
      }
      stream.synchronize();
      World(world).barrier();
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        EXPECT_TRUE(has_rows_of(batches[i]->fetch(), step.expected, step.shares, rank))
            << "pass " << i;
      }
      World(world).barrier();
    };
    all_passes();
    workspace.release();
    EXPECT_ERROR(batches[0]->enqueue(shared[steps[0].layer]->layer(), shared[0]->stream()),
                 kInvalidArgument, "restore()");
    workspace.restore();
    all_passes();
    World(world).barrier();
    // Layers of a rank end one after the other, and wait for the other rank's.
  });
}
INSTANTIATE_TEST_SUITE_P(Types, RanksWorkspace, ::testing::Values(DType::kBF16, DType::kF8E4M3),
                         name_of);

}  // namespace
}  // namespace switchyard::testing
