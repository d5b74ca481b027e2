// Layers of different shapes whose passes follow one another in one memory.
#include "switchyard/workspace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/layers.h"
#include "support/specs.h"

namespace switchyard::testing {
namespace {

constexpr int kMostTokens = 90;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;  // all takes up to a hundred times as long
#else
constexpr bool kSanitized = false;
#endif

// Shapes that differ in everything that the memory's layout follows from.
std::vector<LayerSpec> shapes() {
  std::vector<LayerSpec> specs = {spec_of(96, 64, 24, 4), spec_of(160, 32, 6, 2),
                                  spec_of(64, 256, 13, 8), spec_of(128, 40, 48, 1)};
  specs[1].shared_intermediate = 48;
  specs[3].weight_on_input = true;
  return specs;
}

struct Layers {
  explicit Layers(DType type) : compute(type) {
    for (const LayerSpec& spec : shapes()) {
      specs.push_back(spec);
      weights.push_back(generate_weights(spec, compute == DType::kF8E4M3 ? DType::kF8E4M3 : compute,
                                         3, {.num_threads = 1}));
    }
  }
  DType values() const { return compute == DType::kF32 ? DType::kF32 : DType::kBF16; }
  // Layers declare less than the workspace, each another number.
  int max_tokens(std::size_t l) const { return kMostTokens - static_cast<int>(l) * 11; }
  MoeLayer make(const World& world, std::size_t l, const Workspace* workspace, int slot = 0) const {
    const LayerOptions options{.max_tokens = max_tokens(l),
                               .cpu = {.num_threads = 1},
                               .workspace = workspace,
                               .workspace_slot = slot,
                               .compute = compute};
    return {world, specs[l], weights_of_rank(weights[l], world.rank(), world.size()), options};
  }
  WorkspaceOptions options(int slots = 1) const {
    return {.max_tokens = kMostTokens, .compute = compute, .slots = slots, .num_threads = 1};
  }

  DType compute;
  std::vector<LayerSpec> specs;
  std::vector<MoeWeights> weights;
};

struct Step {
  std::size_t layer;
  Batch batch;
  Shares shares;
};

// Passes of random layers over random tokens, some ranks with none.
std::vector<Step> random_steps(const Layers& layers, int ranks, int count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Step> steps;
  for (int i = 0; i < count; ++i) {
    const std::size_t l = random() % layers.specs.size();
    std::vector<std::int64_t> tokens;
    std::int64_t total = 0;
    for (int r = 0; r < ranks; ++r) {
      tokens.push_back(static_cast<std::int64_t>(
          random() % 4 == 0 ? 0 : random() % static_cast<std::uint64_t>(layers.max_tokens(l) + 1)));
      total += tokens.back();
    }
    steps.push_back(
        {l, random_batch(layers.specs[l], total, layers.values(), random()), Shares::of(tokens)});
  }
  return steps;
}

class WorkspaceOfRanks : public ::testing::TestWithParam<std::tuple<int, DType>> {};

// No barrier stands between the passes, so ranks are often a pass apart, in layers of different
// layouts.
TEST_P(WorkspaceOfRanks, SameBitsAsInMemoryOfTheirOwn) {
  const auto [ranks, compute] = GetParam();
  const Layers layers(compute);
  const std::vector<Step> steps = random_steps(layers, ranks, kSanitized ? 12 : 60, 7);
  std::vector<BatchResult> alone, shared;
  for (const Step& step : steps) {
    alone.push_back(empty_result(layers.specs[step.layer], step.batch, ranks, layers.values()));
    shared.push_back(alone.back());
  }
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    const Workspace workspace(world, layers.specs, layers.options());
    std::vector<MoeLayer> own, others;
    for (std::size_t l = 0; l < layers.specs.size(); ++l) {
      own.push_back(layers.make(world, l, nullptr));
      others.push_back(layers.make(world, l, &workspace));
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      forward_share(others[steps[i].layer], steps[i].batch, steps[i].shares, world.rank(),
                    shared[i]);
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      forward_share(own[steps[i].layer], steps[i].batch, steps[i].shares, world.rank(), alone[i]);
    }
  });
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_TRUE(shared[i].output == alone[i].output) << "step " << i;
    EXPECT_EQ(shared[i].ids, alone[i].ids) << "step " << i;
    for (std::size_t r = 0; r < alone[i].stats.size(); ++r) {
      EXPECT_EQ(shared[i].stats[r].tokens_per_expert, alone[i].stats[r].tokens_per_expert);
      EXPECT_EQ(shared[i].stats[r].dispatch_bytes, alone[i].stats[r].dispatch_bytes);
      EXPECT_EQ(shared[i].stats[r].epoch, i + 1);
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int, DType>>& info) {
  return std::to_string(std::get<0>(info.param)) + "_ranks_" + to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Workspace, WorkspaceOfRanks,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5),
                                            ::testing::Values(DType::kF32, DType::kBF16,
                                                              DType::kF8E4M3)),
                         name_of);

TEST(Workspace, IsNotLargerThanItsLargestLayer) {
  const Layers layers(DType::kF32);
  const World world = World::single();
  std::uint64_t largest = 0, sum = 0;
  for (std::size_t l = 0; l < layers.specs.size(); ++l) {
    const std::uint64_t bytes = Workspace(world, layers.specs[l], layers.options()).bytes();
    largest = std::max(largest, bytes);
    sum += bytes;
  }
  const std::uint64_t bytes = Workspace(world, layers.specs, layers.options()).bytes();
  EXPECT_GE(bytes, largest);
  EXPECT_LT(bytes, sum);
  EXPECT_EQ(Workspace(world, layers.specs, layers.options(3)).bytes(), 3 * bytes);
}

TEST(Workspace, LayersThatNeedMoreAreRefused) {
  const Layers layers(DType::kF32);
  run_all_ranks(World::threads(2), [&](const World& world) {
    const LayerSpec room = spec_of(96, 64, 24, 4);
    const Workspace workspace(world, room, layers.options());
    const auto refused = [&](const LayerSpec& spec, int max_tokens, const char* what) {
      SCOPED_TRACE(what);
      const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
      LayerOptions options{.max_tokens = max_tokens, .cpu = {.num_threads = 1}};
      options.workspace = &workspace;
      EXPECT_ERROR(MoeLayer(world, spec, weights, options), kInvalidArgument, "does not fit");
    };
    LayerSpec spec = room;
    refused(spec, kMostTokens + 1, "tokens");
    spec.hidden += 8;
    refused(spec, kMostTokens, "hidden");
    spec = room;
    spec.intermediate += 8;
    refused(spec, kMostTokens, "intermediate");
    spec = room;
    spec.num_experts += 1;
    refused(spec, kMostTokens, "experts");
    spec = room;
    spec.top_k += 1;
    refused(spec, kMostTokens, "top-k");
    spec = room;
    spec.shared_intermediate = 16;
    refused(spec, kMostTokens, "a shared expert");
    spec = room;
    spec.weight_on_input = true;
    refused(spec, kMostTokens, "weights on the input");
    // And the workspace is as it was.
    MoeLayer layer = Layers(DType::kF32).make(world, 0, &workspace);
  });
}

TEST(Workspace, BadOptionsAreRefused) {
  const World world = World::single();
  const LayerSpec spec = spec_of(96, 64, 24, 4);
  const auto refused = [&](const WorkspaceOptions& options, const char* part) {
    EXPECT_ERROR(Workspace(world, spec, options), kInvalidArgument, part);
  };
  refused({.max_tokens = 0}, "max_tokens is 0");
  refused({.compute = DType::kF16}, "compute type f16");
  refused({.slots = 0}, "slots is 0");
  refused({.slots = 17}, "slots is 17; use 1 to 16");
  refused({.weights = DType::kF8E4M3}, "weights is f8_e4m3; give f4_e2m1 or u4");
  refused({.num_threads = -1}, "num_threads is -1");
  refused({.device = 0}, "backend is cpu");
  refused({.allocator = {[](std::size_t) -> void* { return nullptr; }, [](void*) {}}},
          "an allocator is given, but the backend is cpu");
  refused({.backend = Backend::kCuda, .num_threads = 2}, "num_threads is 2");
  refused({.backend = Backend::kCuda, .allocator = {nullptr, [](void*) {}}}, "allocate and free");
  EXPECT_ERROR(Workspace(world, std::span<const LayerSpec>(), WorkspaceOptions{}), kInvalidArgument,
               "no layers");
}

TEST(Workspace, RanksMustUseTheSame) {
  const Layers layers(DType::kF32);
  run_all_ranks(World::threads(2), [&](const World& world) {
    const Workspace workspace(world, layers.specs, layers.options(2));
    EXPECT_ERROR(layers.make(world, 0, world.rank() == 0 ? &workspace : nullptr), kSpecMismatch,
                 "rank 0 and rank 1 do not work in the same memory");
    EXPECT_ERROR(layers.make(world, 0, &workspace, world.rank()), kSpecMismatch,
                 "do not work in the same memory");
  });
}

TEST(Workspace, StaysAsLongAsALayerIsInIt) {
  const Layers layers(DType::kF32);
  const Batch batch = random_batch(layers.specs[0], 30, DType::kF32, 1);
  const Shares shares = Shares::even(30, 2);
  BatchResult result = empty_result(layers.specs[0], batch, 2, DType::kF32);
  run_all_ranks(World::threads(2), [&](const World& world) {
    auto workspace = std::make_unique<Workspace>(world, layers.specs, layers.options());
    MoeLayer layer = layers.make(world, 0, workspace.get());
    workspace.reset();
    forward_share(layer, batch, shares, world.rank(), result);
  });
  EXPECT_TRUE(result.output ==
              run_batch(layers.specs[0], layers.weights[0], batch, shares, DType::kF32).output);
}

// Two layers over the same weights, at the same time on two threads of each rank.
TEST(Workspace, SlotsServeTwoBatchesAtOnce) {
  const Layers layers(DType::kF32);
  constexpr int kRounds = 20;
  const Batch batches[] = {random_batch(layers.specs[0], 80, DType::kF32, 1),
                           random_batch(layers.specs[0], 50, DType::kF32, 2)};
  BatchResult results[] = {empty_result(layers.specs[0], batches[0], 2, DType::kF32),
                           empty_result(layers.specs[0], batches[1], 2, DType::kF32)};
  run_all_ranks(World::threads(2), [&](const World& world) {
    const Workspace workspace(world, layers.specs, layers.options(2));
    std::vector<MoeLayer> made;
    for (int slot = 0; slot < 2; ++slot) made.push_back(layers.make(world, 0, &workspace, slot));
    const auto rounds = [&](std::size_t slot) {
      for (int i = 0; i < kRounds; ++i) {
        forward_share(made[slot], batches[slot], Shares::even(batches[slot].x.rows(), 2),
                      world.rank(), results[slot]);
      }
    };
    std::thread second(rounds, 1);
    rounds(0);
    second.join();
  });
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(results[i].output == run_batch(layers.specs[0], layers.weights[0], batches[i],
                                               Shares::even(batches[i].x.rows(), 2), DType::kF32)
                                         .output);
  }
}

TEST(Workspace, ASecondPassInTheSameSlotIsRefused) {
  const Layers layers(DType::kF32);
  const World world = World::single();
  Workspace workspace(world, layers.specs, layers.options());
  MoeLayer other = layers.make(world, 1, &workspace);
  const Batch batch = random_batch(layers.specs[0], 5, DType::kF32, 1);
  const Batch others = random_batch(layers.specs[1], 5, DType::kF32, 1);
  BatchResult result = empty_result(layers.specs[0], batch, 1, DType::kF32);
  BatchResult of_other = empty_result(layers.specs[1], others, 1, DType::kF32);
  std::atomic<int> seen = 0;
  LayerOptions options{.max_tokens = 10, .cpu = {.num_threads = 1}};
  options.workspace = &workspace;
  options.diagnostics.on_step = [&](const ProtocolStep&) {
    ++seen;
    EXPECT_ERROR(forward_share(other, others, Shares::even(5, 1), 0, of_other), kInvalidArgument,
                 "another pass is under way in the same memory");
    EXPECT_ERROR(workspace.release(), kInvalidArgument, "a pass is under way");
  };
  MoeLayer layer(world, layers.specs[0], layers.weights[0], options);
  forward_share(layer, batch, Shares::even(5, 1), 0, result);
  EXPECT_GT(seen, 0);
  forward_share(other, others, Shares::even(5, 1), 0, of_other);
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * 4096;
}

TEST(Workspace, ReleasesAndRestores) {
  // A layer that commits some 30 MB.
  const LayerSpec spec = spec_of(kSanitized ? 64 : 2048, 64, 8, 2);
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 1, {.num_threads = 1});
  constexpr int kTokens = 1000;
  const Batch batch = random_batch(spec, kTokens, DType::kF32, 1);
  for (const int ranks : {1, 2}) {
    const Shares shares = Shares::even(kTokens, ranks);
    std::vector<BatchResult> results(3, empty_result(spec, batch, ranks, DType::kBF16));
    std::atomic<std::uint64_t> before = 0, after = 0;
    run_all_ranks(World::threads(ranks), [&](World world) {
      Workspace workspace(world, spec, {.max_tokens = kTokens, .num_threads = 1});
      LayerOptions options{.max_tokens = kTokens, .cpu = {.num_threads = 1}};
      options.workspace = &workspace;
      MoeLayer layer(world, spec, weights, options);
      forward_share(layer, batch, shares, world.rank(), results[0]);
      forward_share(layer, batch, shares, world.rank(), results[1]);
      world.barrier();
      if (world.rank() == 0) before = resident_bytes();
      world.barrier();
      workspace.release();
      workspace.release();
      EXPECT_TRUE(workspace.released());
      world.barrier();
      if (world.rank() == 0) after = resident_bytes();
      world.barrier();
      EXPECT_ERROR(forward_share(layer, batch, shares, world.rank(), results[1]), kInvalidArgument,
                   "call restore() on all ranks");
      workspace.restore();
      workspace.restore();
      EXPECT_FALSE(workspace.released());
      forward_share(layer, batch, shares, world.rank(), results[2]);
    });
    EXPECT_TRUE(results[0].output == results[2].output) << ranks << " ranks";
    EXPECT_EQ(results[2].stats[0].epoch, 1u) << "passes are numbered anew";
    if (!kSanitized) {
      EXPECT_LT(after + 10'000'000, before) << ranks << " ranks";
    }
  }
}

TEST(Workspace, OneThatDiedCannotBeReleased) {
  const Layers layers(DType::kF32);
  const Batch batch = random_batch(layers.specs[0], 6, DType::kF32, 1);
  BatchResult result = empty_result(layers.specs[0], batch, 2, DType::kF32);
  run_all_ranks(World::threads(2), [&](World world) {
    Workspace workspace(world, layers.specs, layers.options());
    LayerOptions options{.max_tokens = 10, .cpu = {.num_threads = 1}};
    options.deadline = std::chrono::milliseconds(200);
    options.workspace = &workspace;
    MoeLayer layer(world, layers.specs[0], layers.weights[0], options);
    MoeLayer second = layers.make(world, 1, &workspace);
    if (world.rank() == 0) {
      // The other rank makes no pass.
      EXPECT_THROW(forward_share(layer, batch, Shares::of({6, 0}), 0, result), TimeoutError);
    }
    world.barrier();
    EXPECT_ERROR(workspace.release(), kAborted, "was given up");
    EXPECT_THROW(second.check(), TimeoutError);
  });
}

}  // namespace
}  // namespace switchyard::testing
