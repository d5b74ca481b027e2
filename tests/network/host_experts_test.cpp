// Layers over hosts in two levels: a token crosses once for each host, a layer of that host's ranks
// does the rest.
//
//   SWITCHYARD_CHAOS_SEEDS=10000    random worlds (default 40)
//   SWITCHYARD_CHAOS_FIRST=7        the first seed
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "support/accuracy.h"
#include "support/numbers.h"
#include "support/staged_layers.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;

// Rows go from the memory of one host into that of another, or between those of their devices.
const char* name_of(bool networks_reach_devices) {
  return networks_reach_devices ? "rows of devices" : "rows of hosts";
}

BatchResult run_over_three(bool networks_reach_devices, const LayerSpec& spec,
                           const MoeWeights& weights, const Batch& batch, const Shares& shares,
                           DType output) {
  return run_over({1, 1, 1}, spec, weights, batch, shares, output, {}, {}, networks_reach_devices);
}

TEST(HostExperts, ATokenCrossesOnceForEachHostAndASumComesBack) {
  constexpr int kRanks = 6;
  const LayerSpec spec = spec_of(64, 32, 4 * kRanks, 5);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 100, DType::kF32, 7);
  const Shares shares = Shares::of({30, 0, 25, 20, 25, 0});
  const BatchResult result = run_over({2, 2, 2}, spec, weights, batch, shares, DType::kF32);
  EXPECT_LE(distance(result, run_on_one_host(spec, weights, batch, shares)), 1e-6);
  // 4 experts a rank: the hosts' are [0, 8), [8, 16) and the rest.
  const auto host_of_expert = [](int e) { return e / 8; };
  std::uint64_t crossings = 0, rows_back = 0, sent = 0;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.num_experts)), counted = rows;
  for (std::size_t r = 0; r < kRanks; ++r) {
    for (std::int64_t t = shares.first[r]; t < shares.first[r] + shares.count[r]; ++t) {
      std::set<int> others;
      for (int k = 0; k < 5; ++k) {
        const int e = batch.topk_ids[static_cast<std::size_t>(5 * t + k)];
        ++rows[static_cast<std::size_t>(e)];
        if (host_of_expert(e) != static_cast<int>(r / 2)) others.insert(host_of_expert(e));
      }
      crossings += others.size();
    }
    const ForwardStats& stats = result.stats[r];
    rows_back += stats.combine_bytes;
    sent += stats.dispatch_bytes;
    for (std::size_t e = 0; e < rows.size(); ++e) counted[e] += stats.tokens_per_expert[e];
  }
  EXPECT_EQ(rows_back, crossings * 64 * sizeof(float));
  // The token, its five slots, and an entry of 12 bytes.
  EXPECT_EQ(sent, crossings * (64 * sizeof(float) + 5 * 8 + 12));
  EXPECT_EQ(counted, rows);
}

// Whose host a token is on, and how many ranks hosts have, is nothing to its sum.
TEST(HostExperts, HasTheBitsOfAnyNumberOfRanks) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(to_string(compute));
    const LayerSpec spec = spec_of(64, 32, 12, 4);
    const MoeWeights weights = make_weights(spec, compute, 4, 1);
    const Batch batch = routed_batch(spec, 120, DType::kF32, 7);
    LayerOptions options;
    options.compute = compute;
    const BatchResult expected =
        run_over({1, 1}, spec, weights, batch, Shares::of({60, 60}), DType::kF32, options);
    for (const std::vector<int>& hosts : {std::vector{2, 2}, std::vector{3, 3}}) {
      const int ranks = 2 * hosts[0];
      for (const Shares& shares : {Shares::even(120, ranks), Shares::even(120, 1)}) {
        std::vector<std::int64_t> counts = shares.count;
        counts.resize(static_cast<std::size_t>(ranks));
        for (const bool networks_reach_devices : {false, true}) {
          const BatchResult result = run_over(hosts, spec, weights, batch, Shares::of(counts),
                                              DType::kF32, options, {}, networks_reach_devices);
          EXPECT_TRUE(result.output == expected.output) << ranks << networks_reach_devices;
        }
      }
    }
  }
}

TEST(HostExperts, WeighsInputsAndAddsSharedExperts) {
  for (const int kind : {0, 1, 2, 3}) {
    for (const bool networks_reach_devices : {false, true}) {
      const bool shared = kind % 2 != 0, weighs_input = kind / 2 != 0;
      SCOPED_TRACE(::testing::Message()
                   << shared << weighs_input << ", " << name_of(networks_reach_devices));
      LayerSpec spec = spec_of(64, 32, 12, 3);
      if (shared) spec.shared_intermediate = 48;
      spec.weight_on_input = weighs_input;
      const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
      const Batch batch = routed_batch(spec, 120, DType::kF32, 7);
      const Shares shares = Shares::of({60, 1, 59});
      const BatchResult result =
          run_over_three(networks_reach_devices, spec, weights, batch, shares, DType::kF32);
      EXPECT_LE(distance(result, run_on_one_host(spec, weights, batch, shares)), 1e-6);
    }
  }
}

TEST(HostExperts, Bf16IsAccurate) {
  LayerSpec spec = spec_of(64, 32, 12, 4);
  spec.shared_intermediate = 24;
  const MoeWeights weights = make_weights(spec, DType::kBF16, 3, 1);
  for (const DType x : {DType::kBF16, DType::kF32}) {
    const Batch batch =
        x == DType::kBF16 ? random_batch(spec, 90, x, 5) : routed_batch(spec, 90, x, 5);
    for (const bool networks_reach_devices : {false, true}) {
      SCOPED_TRACE(name_of(networks_reach_devices));
      const BatchResult result = run_over_three(networks_reach_devices, spec, weights, batch,
                                                Shares::of({50, 0, 40}), DType::kBF16);
      if (x == DType::kBF16) expect_same_routing(spec, weights, batch, result);
      expect_accurate(spec, weights, batch, result);
    }
  }
}

TEST(HostExperts, Fp8IsAccurate) {
  for (const bool networks_reach_devices : {false, true}) {
    SCOPED_TRACE(name_of(networks_reach_devices));
    expect_accurate_in_fp8(networks_reach_devices);
  }
}

TEST(HostExperts, FourBitsAreAccurate) {
  struct Case {
    DType weights, compute;
    bool has_shared;
  };
  LayerSpec spec = spec_of(128, 96, 12, 4);
  for (const Case& c : {Case{DType::kF4E2M1, DType::kBF16, true},
                        {DType::kF4E2M1, DType::kF8E4M3, false},
                        {DType::kU4, DType::kBF16, true}}) {
    spec.shared_intermediate = c.has_shared ? 64 : 0;
    const MoeWeights weights = make_weights(spec, c.weights, 3, 1);
    const Batch batch = random_batch(spec, 60, DType::kBF16, 5);
    for (const bool networks_reach_devices : {false, true}) {
      SCOPED_TRACE(::testing::Message() << to_string(c.weights) << " in " << to_string(c.compute)
                                        << ", " << name_of(networks_reach_devices));
      const BatchResult result =
          run_over({1, 1, 1}, spec, weights, batch, Shares::of({20, 40, 0}), DType::kBF16,
                   {.compute = c.compute}, {}, networks_reach_devices);
      double yardstick = 0;
      const double error =
          output_error(spec, weights, batch, result, &yardstick, c.compute == DType::kF8E4M3);
      EXPECT_LE(error, 2 * yardstick);
    }
  }
}

TEST(HostExperts, DropsOverCapacityAsOneHostDoes) {
  LayerSpec spec = spec_of(64, 32, 12, 4);
  spec.capacity_factor = 1;
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 90, DType::kF32, 7);
  const Shares shares = Shares::of({30, 30, 30});
  const BatchResult expected = run_on_one_host(spec, weights, batch, shares);
  for (const bool networks_reach_devices : {false, true}) {
    SCOPED_TRACE(name_of(networks_reach_devices));
    const BatchResult result =
        run_over_three(networks_reach_devices, spec, weights, batch, shares, DType::kF32);
    EXPECT_LE(distance(result, expected), 1e-6);
    EXPECT_EQ(result.ids, expected.ids);
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_GT(result.stats[r].dropped_slots, 0);
      EXPECT_EQ(result.stats[r].dropped_slots, expected.stats[r].dropped_slots);
    }
  }
}

// Twelve experts at sixteen places, of which ranks use their own where they have one.
TEST(HostExperts, UsesPlacesOfExperts) {
  const LayerSpec spec = spec_of(64, 32, 12, 4);
  const MoeWeights all = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 80, DType::kF32, 7);
  const Shares shares = Shares::even(80, 4);
  LayerOptions options;
  options.placement.expert_at = {0, 5, 2, 11, 3, 4, 1, 6, 7, 8, 9, 10, 0, 1, 5, 2};
  MoeWeights weights = all;
  weights.experts.clear();
  for (const std::int32_t e : options.placement.expert_at) {
    weights.experts.push_back(all.experts[static_cast<std::size_t>(e)]);
  }
  const BatchResult expected = run_on_one_host(spec, all, batch, shares);
  for (const bool networks_reach_devices : {false, true}) {
    const BatchResult result = run_over({2, 2}, spec, weights, batch, shares, DType::kF32, options,
                                        {}, networks_reach_devices);
    EXPECT_LE(distance(result, expected), 1e-6);
  }
}

// The second host's ranks have 2 experts and 1. Its three dealt anew would be 1 and 2.
TEST(HostExperts, RanksHaveOtherNumbersOfExpertsThanInALayerOfTheirOwn) {
  const LayerSpec spec = spec_of(64, 32, 8, 3);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 60, DType::kF32, 7);
  const Shares shares = Shares::even(60, 6);
  const BatchResult result = run_over({2, 2, 2}, spec, weights, batch, shares, DType::kF32);
  EXPECT_LE(distance(result, run_on_one_host(spec, weights, batch, shares)), 1e-6);
  std::vector<std::int64_t> rows(8), counted(8);
  for (const std::int32_t e : batch.topk_ids) ++rows[static_cast<std::size_t>(e)];
  for (const ForwardStats& stats : result.stats) {
    for (std::size_t e = 0; e < 8; ++e) counted[e] += stats.tokens_per_expert[e];
  }
  EXPECT_EQ(counted, rows);
}

TEST(HostExperts, NewWeightsAreUsed) {
  const LayerSpec spec = spec_of(64, 32, 12, 3);
  const MoeWeights before = make_weights(spec, DType::kF32, 4, 1);
  const MoeWeights after = make_weights(spec, DType::kF32, 4, 2);
  const Batch batch = routed_batch(spec, 60, DType::kF32, 7);
  const Shares shares = Shares::of({20, 20, 20});
  LayerOptions options;
  options.max_tokens = 60;
  const BatchResult expected = run_batch(spec, after, batch, shares, DType::kF32, options);
  for (const bool networks_reach_devices : {false, true}) {
    SCOPED_TRACE(name_of(networks_reach_devices));
    BatchResult result = empty_result(spec, batch, 3, DType::kF32);
    test::ChaosHosts hosts;
    hosts.ranks_of_hosts = {1, 1, 1};
    hosts.chaos.takes_device_memory = networks_reach_devices;
    test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](World world) {
      Staged staged = make_staged(world, spec, before, options, 50, networks_reach_devices);
      forward(staged, batch, shares, world.rank(), result);
      world.barrier();
      staged.layer->rebind(weights_of_rank(after, world.rank(), 3), nullptr);
      forward(staged, batch, shares, world.rank(), result);
    }));
    EXPECT_LE(distance(result, expected), 1e-6);
  }
}

// A layer that has failed takes nothing with it: the world's next one works.
TEST(HostExperts, TheWorldOutlivesALayerThatFailed) {
  const LayerSpec spec = spec_of(64, 32, 12, 3);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 40, DType::kF32, 7);
  const Shares shares = Shares::even(40, 4);
  LayerOptions options;
  options.max_tokens = 40;
  BatchResult result = empty_result(spec, batch, 4, DType::kF32);
  std::atomic<int> told{0};
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 2};
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    {
      LayerOptions short_lived = options;
      short_lived.deadline = milliseconds(300);
      Staged staged = make_staged(world, spec, weights, short_lived);
      if (world.rank() != 2) {
        EXPECT_THROW(forward(staged, batch, shares, world.rank(), result), TimeoutError);
        ++told;
      }
      EXPECT_TRUE(test::eventually([&] { return told.load() == 3; }));
    }
    Staged staged = make_staged(world, spec, weights, options);
    forward(staged, batch, shares, world.rank(), result);
  }));
  EXPECT_LE(distance(result, run_batch(spec, weights, batch, shares, DType::kF32, options)), 1e-6);
}

// ------------------------------------------------------------------------------------ failures

struct Fault {
  int rank;          // that stops
  bool in_its_pass;  // having received its tokens, or before it sends any
  bool networks_reach_devices = false;
};

class HostExpertsFault : public ::testing::TestWithParam<Fault> {};

TEST_P(HostExpertsFault, EveryOtherRankNamesTheOneThatStops) {
  const Fault fault = GetParam();
  const LayerSpec spec = spec_of(64, 32, 12, 4);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 40, DType::kF32, 3);
  const Shares shares = Shares::even(40, 4);
  std::atomic<int> told{0};
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 2};
  hosts.chaos.takes_device_memory = fault.networks_reach_devices;
  BatchResult result = empty_result(spec, batch, 4, DType::kF32);
  const auto thrown = test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.max_tokens = 40;
    options.deadline = milliseconds(1500);
    Staged staged = make_staged(world, spec, weights, options, 50, fault.networks_reach_devices);
    forward(staged, batch, shares, world.rank(), result);
    const auto others_are_told = [&] {
      EXPECT_TRUE(test::eventually([&] { return told.load() == 3; }));
    };
    if (world.rank() == fault.rank) {
      if (!fault.in_its_pass) return others_are_told();
      staged.device->before_copy = [&, once = true]() mutable {
        if (std::exchange(once, false)) others_are_told();
      };
    }
    const auto start = std::chrono::steady_clock::now();
    test::blame_of(fault.rank, [&] {
      forward(staged, batch, shares, world.rank(), result);
      // One that had all it needed before it stopped hears of it in its next call.
      if (world.rank() == fault.rank) forward(staged, batch, shares, world.rank(), result);
    });
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took, milliseconds(1500) + test::kGenerous);
    if (world.rank() != fault.rank) ++told;
  });
  test::expect_nothing_thrown(thrown);
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostExpertsFault,
                         ::testing::Values(Fault{0, false}, Fault{3, false}, Fault{0, true},
                                           Fault{1, true}, Fault{2, true}, Fault{3, true},
                                           Fault{1, true, true}, Fault{2, false, true}),
                         [](const ::testing::TestParamInfo<Fault>& fault) {
                           return "Rank" + std::to_string(fault.param.rank) +
                                  (fault.param.in_its_pass ? "InItsPass" : "BeforeItSends") +
                                  (fault.param.networks_reach_devices ? "OnDevices" : "");
                         });

// ------------------------------------------------------------------------------- random worlds

TEST(HostsChaos, LayersInTwoLevelsAreRight) {
  const std::uint64_t first = test::number_from("SWITCHYARD_CHAOS_FIRST", 1);
  const std::uint64_t seeds = test::number_from("SWITCHYARD_CHAOS_SEEDS", 40);
  std::uint64_t trials = 0, hangs = 0, wrong_words = 0;
  for (std::uint64_t seed = first; seed < first + seeds && hangs + wrong_words < 3; ++seed) {
    ++trials;
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    test::Numbers numbers(seed);
    test::ChaosHosts hosts;
    const int num_hosts = numbers.between(2, 4);
    const bool reached = numbers.between(0, 1) == 1;
    const int ranks_of_host = numbers.between(1, 3), ranks = num_hosts * ranks_of_host;
    hosts.ranks_of_hosts.assign(static_cast<std::size_t>(num_hosts), ranks_of_host);
    hosts.in_turn = numbers.between(0, 2) == 0;
    hosts.chaos.takes_device_memory = reached;
    test::draw_network(hosts, numbers, seed);
    LayerSpec spec = spec_of(32, 16, ranks * numbers.between(1, 4) + numbers.between(0, 1), 3);
    spec.num_experts = std::max(spec.num_experts, 3);
    if (numbers.between(0, 1) == 1) spec.shared_intermediate = 16;
    spec.weight_on_input = numbers.between(0, 3) == 0;
    const bool fp8 = numbers.between(0, 2) == 0;
    if (fp8) spec.hidden = numbers.between(0, 1) == 0 ? 48 : 272;
    const DType weights_type = fp8 ? DType::kF8E4M3 : DType::kF32;
    const DType tokens_type = fp8 && numbers.between(0, 1) == 0 ? DType::kBF16 : DType::kF32;
    // Sums of hosts are rounded to bf16 in FP8 layers, and so is their sum.
    const double tolerance = fp8 ? 4 * 0x1p-8 : 1e-6;
    const MoeWeights weights = generate_weights(spec, weights_type, seed, {.num_threads = 1});
    constexpr int kPasses = 3;
    std::vector<Batch> batches;
    std::vector<Shares> shares;
    std::vector<BatchResult> results, expected;
    LayerOptions options;
    options.max_tokens = 70;
    for (std::uint64_t pass = 0; pass < kPasses; ++pass) {
      std::vector<std::int64_t> counts;
      std::int64_t total = 0;
      for (int r = 0; r < ranks; ++r) {
        counts.push_back(numbers.between(0, 3) == 0 ? 0 : numbers.between(0, 70));
        total += counts.back();
      }
      batches.push_back(routed_batch(spec, total, tokens_type, seed + 1000 * pass));
      shares.push_back(Shares::of(counts));
      results.push_back(empty_result(spec, batches.back(), ranks, DType::kF32));
      LayerOptions alone;
      alone.max_tokens = static_cast<int>(std::max<std::int64_t>(total, 1));
      expected.push_back(
          run_batch(spec, weights, batches.back(), Shares::of({total}), DType::kF32, alone));
    }
    const std::int64_t most_rows = numbers.between(20, 300);
    for (const std::exception_ptr& failure : test::run_over_chaos(hosts, [&](const World& world) {
           Staged staged = make_staged(world, spec, weights, options, most_rows, reached);
           for (std::size_t pass = 0; pass < kPasses; ++pass) {
             forward(staged, batches[pass], shares[pass], world.rank(), results[pass]);
           }
         })) {
      if (!failure) continue;
      ++hangs;
      test::expect_nothing_thrown({failure});
      break;
    }
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      const double error = distance(results[pass], expected[pass]);
      if (error <= tolerance) continue;
      ++wrong_words;
      ADD_FAILURE() << "pass " << pass << " is off by " << error;
    }
  }
  RecordProperty("trials", std::to_string(trials));
  RecordProperty("hangs", std::to_string(hangs));
  RecordProperty("wrong_words", std::to_string(wrong_words));
}

}  // namespace
}  // namespace switchyard::testing
