// Layers of devices on several hosts, played on copies over a network that reorders, delays and
// refuses, with the CPU engine's kernels in place of the device's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <vector>

#include "model/errors.h"
#include "protocol/partition.h"
#include "support/accuracy.h"
#include "support/staged_layers.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<int> kHosts = {1, 1, 1};
constexpr int kRanks = 3;

BatchResult run(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                const Shares& shares, DType output, const LayerOptions& options = {},
                const AdjustCall& adjust = {}) {
  return run_over(kHosts, spec, weights, batch, shares, output, options, adjust);
}

class EveryModelStaged : public ::testing::TestWithParam<ModelEntry> {};

TEST_P(EveryModelStaged, IsAsGoodAsAStraightforwardProgram) {
  const LayerSpec spec = small_spec(GetParam());
  const MoeWeights weights = make_weights(spec, DType::kBF16, 3, 1);
  const Batch batch = random_batch(spec, 90, DType::kBF16, 5);
  const BatchResult result = run(spec, weights, batch, Shares::of({50, 0, 40}), DType::kBF16);
  expect_same_routing(spec, weights, batch, result);
  expect_accurate(spec, weights, batch, result);
}
INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelStaged, ::testing::ValuesIn(model_table()),
                         name_of_model);

// One host computes the slots of each host's experts alone, and rounds; a plain loop adds these
// sums in the order of k.
Matrix sums_of_hosts(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                     DType compute) {
  LayerOptions options;
  options.compute = compute;
  const auto tokens = static_cast<int>(batch.x.rows());
  options.max_tokens = tokens;
  const protocol::ExpertPartition experts{spec.num_experts, kRanks};
  std::vector<std::vector<float>> of_host;
  for (int host = 0; host < kRanks; ++host) {
    Batch here = batch;
    for (std::int32_t& id : here.topk_ids) {
      if (experts.owner(id) != host) id = kNoExpert;
    }
    const BatchResult result =
        run_batch(spec, weights, here, Shares::of({tokens}), compute, options);
    of_host.push_back(result.output.floats());
  }
  Matrix sums(tokens, spec.hidden, DType::kF32);
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  for (std::int64_t i = 0; i < tokens * spec.hidden; ++i) {
    float sum = 0;
    std::set<int> seen;
    const std::size_t slot = static_cast<std::size_t>(i / spec.hidden) * top_k;
    for (std::size_t k = 0; k < top_k; ++k) {
      const int host = experts.owner(batch.topk_ids[slot + k]);
      if (!seen.insert(host).second) continue;
      sum += of_host[static_cast<std::size_t>(host)][static_cast<std::size_t>(i)];
    }
    sums.set(i, sum);
  }
  return sums;
}

TEST(StagedLayer, HasTheBitsOfSumsOfHosts) {
  for (const bool weighs_input : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(::testing::Message() << weighs_input << to_string(dtype));
      LayerSpec spec = spec_of(64, 32, 13, 3);
      spec.weight_on_input = weighs_input;
      const MoeWeights weights = make_weights(spec, dtype, 4, 1);
      const Batch batch = routed_batch(spec, 120, DType::kF32, 7);
      const Shares shares = Shares::of({60, 1, 59});
      LayerOptions options;
      options.compute = dtype;
      const BatchResult result = run(spec, weights, batch, shares, DType::kF32, options);
      EXPECT_TRUE(result.output == sums_of_hosts(spec, weights, batch, dtype));
      for (std::size_t r = 0; r < kRanks; ++r) {
        EXPECT_EQ(result.stats[r].tokens, shares.count[r]);
        EXPECT_EQ(result.stats[r].epoch, 1u);
      }
    }
  }
}

TEST(StagedLayer, ScalesAddsAndConverts) {
  LayerSpec spec = spec_of(64, 32, 9, 2);
  spec.shared_intermediate = 16;
  const MoeWeights weights = make_weights(spec, DType::kBF16, 4, 1);
  for (const DType x : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType y : {DType::kF32, DType::kF16, DType::kBF16}) {
      Batch batch = routed_batch(spec, 33, x, 8);
      const Shares shares = Shares::of({11, 12, 10});
      const AdjustCall adjust = [&](ForwardInput& input, ForwardOutput& output, std::size_t) {
        output.scale = -0.5f;
        output.accumulate = true;
        for (std::int64_t i = 0; i < input.activations.rows * spec.hidden; ++i) {
          const float value = static_cast<float>(i % 5) - 2;
          std::byte* const to = static_cast<std::byte*>(output.data);
          if (y == DType::kF32) {
            std::memcpy(to + i * 4, &value, 4);
            continue;
          }
          const std::uint16_t code = y == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
          std::memcpy(to + i * 2, &code, 2);
        }
      };
      LayerOptions options;
      options.compute = DType::kBF16;
      LayerOptions alone = options;
      alone.max_tokens = 33;
      const BatchResult expected = run_batch(spec, weights, batch, shares, y, alone, adjust);
      for (const bool networks_reach_devices : {false, true}) {
        const BatchResult result = run_over(kHosts, spec, weights, batch, shares, y, options,
                                            adjust, networks_reach_devices);
        // Sums of hosts are rounded to bf16, and so is the shared expert's row.
        EXPECT_LE(distance(result, expected), 4 * 0x1p-8)
            << to_string(x) << to_string(y) << networks_reach_devices;
      }
    }
  }
}

// A graph is made once and launched with other tokens and ids in the same memory.
TEST(StagedLayer, ReplaysArePassesOfTheirOwn) {
  const LayerSpec spec = spec_of(64, 32, 12, 3);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Shares shares = Shares::of({20, 20, 20});
  std::vector<Batch> batches;
  std::vector<BatchResult> results, expected;
  LayerOptions options;
  options.max_tokens = 20;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    batches.push_back(routed_batch(spec, 60, DType::kF32, seed));
    results.push_back(empty_result(spec, batches.back(), kRanks, DType::kF32));
    expected.push_back(run_batch(spec, weights, batches.back(), shares, DType::kF32, options));
  }
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = kHosts;
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    Staged staged = make_staged(world, spec, weights, options);
    const auto first =
        static_cast<std::size_t>(shares.first[static_cast<std::size_t>(world.rank())]);
    Matrix x = Matrix::random(20, spec.hidden, DType::kF32, 9), y(20, spec.hidden, DType::kF32);
    std::vector<std::int32_t> ids(60);
    std::vector<float> weights_of_ids(60);
    ForwardInput input;
    input.activations = x.view();
    input.topk_ids = ids;
    input.topk_weights = weights_of_ids;
    ForwardOutput output;
    output.data = y.row(0);
    output.dtype = DType::kF32;
    staged.device->captures = true;
    staged.layer->forward(input, output);
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const std::size_t row = static_cast<std::size_t>(spec.hidden) * sizeof(float);
      std::memcpy(x.row(0), batches[i].x.rows_from(static_cast<std::int64_t>(first), 20).data,
                  20 * row);
      std::copy_n(batches[i].topk_ids.begin() + static_cast<std::ptrdiff_t>(first * 3), 60,
                  ids.begin());
      std::copy_n(batches[i].topk_weights.begin() + static_cast<std::ptrdiff_t>(first * 3), 60,
                  weights_of_ids.begin());
      staged.device->replay();
      staged.device->synchronize_all();
      staged.layer->check();
      std::memcpy(results[i].output.row(static_cast<std::int64_t>(first)), y.row(0), 20 * row);
      EXPECT_EQ(staged.layer->stats().epoch, i + 1);
    }
  }));
  for (std::size_t i = 0; i < batches.size(); ++i) {
    EXPECT_LE(distance(results[i], expected[i]), 1e-6) << "pass " << i;
  }
}

TEST(StagedLayer, ABadIdIsToldOnceAndTheLayerLives) {
  const LayerSpec spec = spec_of(64, 32, 13, 3);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch good = routed_batch(spec, 9, DType::kF32, 3);
  Batch bad = good;
  bad.topk_ids[4] = 99;
  const Shares shares = Shares::of({3, 3, 3});
  BatchResult result = empty_result(spec, good, kRanks, DType::kF32);
  LayerOptions options;
  options.max_tokens = 3;
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = kHosts;
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    Staged staged = make_staged(world, spec, weights, options);
    if (world.rank() == 0) {
      EXPECT_ERROR(forward(staged, bad, shares, 0, result), kInvalidArgument,
                   "topk_ids[1][1] is 99");
      EXPECT_EQ(staged.layer->stats().bad_slots, 1);
    } else {
      forward(staged, bad, shares, world.rank(), result);
    }
    forward(staged, good, shares, world.rank(), result);
  }));
  EXPECT_LE(distance(result, run_batch(spec, weights, good, shares, DType::kF32, options)), 1e-6);
}

TEST(StagedLayer, NamesARankThatDoesNotCome) {
  const LayerSpec spec = spec_of(64, 32, 4, 2);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 8, DType::kF32, 3);
  std::atomic<bool> is_over{false};
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {1, 1};
  const auto thrown = test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.max_tokens = 4;
    options.deadline = std::chrono::milliseconds(500);
    Staged staged = make_staged(world, spec, weights, options);
    if (world.rank() == 1) {
      test::eventually([&] { return is_over.load(); });
      return;
    }
    BatchResult result = empty_result(spec, batch, 2, DType::kF32);
    for (int i = 0; i < 2; ++i) {
      test::blame_of(1, [&] { forward(staged, batch, Shares::of({4, 4}), 0, result); });
    }
    is_over = true;
  });
  EXPECT_EQ(thrown[0], nullptr);
}

TEST(StagedLayer, OptionsThatItDoesNotHaveAreRefusedOnAllRanks) {
  const LayerSpec spec = spec_of(64, 32, 4, 2);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {1, 1};
  for (const bool trace : {true, false}) {
    const auto thrown = test::run_over_chaos(hosts, [&](const World& world) {
      LayerOptions options;
      options.diagnostics.trace = trace;
      options.diagnostics.recorded_steps = trace ? 0 : 4;
      make_staged(world, spec, weights, options);
    });
    for (const std::exception_ptr& failure : thrown) {
      EXPECT_ERROR(std::rethrow_exception(failure), kUnsupported,
                   trace ? "trace is set" : "recorded_steps is set");
    }
  }
}

// Before anything is started, by all ranks alike.
TEST(StagedLayer, HostsThatCannotBeLayersAreRefused) {
  struct Case {
    std::vector<int> hosts;
    int experts;
    const char* words;
  };
  for (const Case& one : {Case{{2, 1}, 12, "host 1 has 1 rank, and host 0 has 2"},
                          Case{{1, 1, 2}, 12, "host 2 has 2 ranks, and host 0 has 1"},
                          Case{{3, 3, 3}, 5, "has no expert of 5"}}) {
    SCOPED_TRACE(one.words);
    const LayerSpec spec = spec_of(64, 32, one.experts, 2);
    const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
    test::ChaosHosts hosts;
    hosts.ranks_of_hosts = one.hosts;
    for (const std::exception_ptr& failure : test::run_over_chaos(
             hosts, [&](const World& world) { make_staged(world, spec, weights); })) {
      EXPECT_ERROR(std::rethrow_exception(failure), kUnsupported, one.words);
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
