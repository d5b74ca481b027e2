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

#include "base/convert.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/numbers.h"
#include "support/staged_layers.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;

double distance(const BatchResult& result, const BatchResult& expected) {
  const std::vector<float> values = expected.output.floats();
  return reference::relative_error(result.output.floats(),
                                   std::vector<double>(values.begin(), values.end()));
}

// How tokens and sums travel.
struct Way {
  const char* name;
  std::vector<int> hosts;       // for three ranks
  bool networks_reach_devices;  // rows go from one device's memory to another's
};
const std::vector<Way>& ways() {
  static const std::vector<Way> all = {{"carried by the exchange", {2, 1}, false},
                                       {"rows of hosts", {1, 1, 1}, false},
                                       {"rows of devices", {1, 1, 1}, true}};
  return all;
}

BatchResult run_by_host(const std::vector<int>& hosts, const LayerSpec& spec,
                        const MoeWeights& weights, const Batch& batch, const Shares& shares,
                        DType output, const LayerOptions& options = {},
                        const AdjustCall& adjust = {}, bool networks_reach_devices = false) {
  return run_over(hosts, SharedBy::kHost, spec, weights, batch, shares, output, options, adjust,
                  networks_reach_devices);
}
BatchResult run_by_host(const Way& way, const LayerSpec& spec, const MoeWeights& weights,
                        const Batch& batch, const Shares& shares, DType output,
                        const LayerOptions& options = {}, const AdjustCall& adjust = {}) {
  return run_by_host(way.hosts, spec, weights, batch, shares, output, options, adjust,
                     way.networks_reach_devices);
}

TEST(ExpertsByHost, ATokenCrossesOnceForEachHostAndASumComesBack) {
  // The exchange carries tokens where hosts have different numbers of ranks.
  for (const std::vector<int>& hosts : {std::vector{2, 2, 1}, std::vector{2, 2, 2}}) {
    const bool carried = hosts[2] == 1;
    SCOPED_TRACE(carried);
    const int ranks = carried ? 5 : 6;
    const LayerSpec spec = spec_of(64, 32, 4 * ranks, 5);
    const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
    const Batch batch = routed_batch(spec, 100, DType::kF32, 7);
    std::vector<std::int64_t> counts = {30, 0, 25, 20, 25};
    counts.resize(static_cast<std::size_t>(ranks));
    const Shares shares = Shares::of(counts);
    LayerOptions options;
    const BatchResult result =
        run_by_host(hosts, spec, weights, batch, shares, DType::kF32, options);
    options.max_tokens = 100;
    const BatchResult expected = run_batch(spec, weights, batch, shares, DType::kF32, options);
    EXPECT_LE(distance(result, expected), 1e-6);
    // 4 experts a rank: the hosts' are [0, 8), [8, 16) and the rest.
    const auto host_of_expert = [](int e) { return e / 8; };
    std::uint64_t crossings = 0, rows_back = 0, sent = 0;
    std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.num_experts)), counted = rows;
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
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
    // The token, its five slots, and an entry of 12 bytes; where the exchange carries no tokens, a
    // word in the place of each.
    EXPECT_EQ(sent, crossings * (64 * sizeof(float) + 5 * 8 + 12 + (carried ? 0 : 4)));
    EXPECT_EQ(counted, rows);
  }
}

// Whose host a token is on, and how many ranks hosts have, is nothing to its sum.
TEST(ExpertsByHost, HasTheBitsOfAnyNumberOfRanks) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(to_string(compute));
    const LayerSpec spec = spec_of(64, 32, 12, 4);
    const MoeWeights weights = make_weights(spec, compute, 4, 1);
    const Batch batch = routed_batch(spec, 120, DType::kF32, 7);
    LayerOptions options;
    options.compute = compute;
    const BatchResult expected =
        run_by_host({1, 1}, spec, weights, batch, Shares::of({60, 60}), DType::kF32, options);
    for (const std::vector<int>& hosts : {std::vector{2, 2}, std::vector{3, 3}}) {
      const int ranks = 2 * hosts[0];
      for (const Shares& shares : {Shares::even(120, ranks), Shares::even(120, 1)}) {
        std::vector<std::int64_t> counts = shares.count;
        counts.resize(static_cast<std::size_t>(ranks));
        for (const bool networks_reach_devices : {false, true}) {
          const BatchResult result = run_by_host(hosts, spec, weights, batch, Shares::of(counts),
                                                 DType::kF32, options, {}, networks_reach_devices);
          EXPECT_TRUE(result.output == expected.output) << ranks << networks_reach_devices;
        }
      }
    }
  }
}

TEST(ExpertsByHost, WeighsInputsAndAddsSharedExperts) {
  for (const int kind : {0, 1, 2, 3}) {
    for (const Way& way : ways()) {
      const bool shared = kind % 2 != 0, weighs_input = kind / 2 != 0;
      SCOPED_TRACE(::testing::Message() << shared << weighs_input << ", " << way.name);
      LayerSpec spec = spec_of(64, 32, 12, 3);
      if (shared) spec.shared_intermediate = 48;
      spec.weight_on_input = weighs_input;
      const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
      const Batch batch = routed_batch(spec, 120, DType::kF32, 7);
      const Shares shares = Shares::of({60, 1, 59});
      LayerOptions options;
      const BatchResult result =
          run_by_host(way, spec, weights, batch, shares, DType::kF32, options);
      options.max_tokens = 120;
      EXPECT_LE(distance(result, run_batch(spec, weights, batch, shares, DType::kF32, options)),
                1e-6);
    }
  }
}

TEST(ExpertsByHost, ScalesAddsAndConverts) {
  const LayerSpec spec = spec_of(64, 32, 9, 2);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  for (const auto& [x, way] : {std::pair(DType::kF32, ways()[0]),
                               {DType::kF16, ways()[0]},
                               {DType::kBF16, ways()[0]},
                               {DType::kF32, ways()[1]},
                               {DType::kF16, ways()[1]},
                               {DType::kF32, ways()[2]},
                               {DType::kBF16, ways()[2]}}) {
    const Batch batch = routed_batch(spec, 33, x, 8);
    const Shares shares = Shares::of({11, 12, 10});
    const AdjustCall adjust = [&](ForwardInput& input, ForwardOutput& output, std::size_t) {
      output.scale = -0.5f;
      output.accumulate = true;
      std::fill_n(static_cast<float*>(output.data), input.activations.rows * spec.hidden, 3.0f);
    };
    LayerOptions options;
    const BatchResult result =
        run_by_host(way, spec, weights, batch, shares, DType::kF32, options, adjust);
    options.max_tokens = 33;
    EXPECT_LE(
        distance(result, run_batch(spec, weights, batch, shares, DType::kF32, options, adjust)),
        1e-6)
        << to_string(x) << ", " << way.name;
  }
}

TEST(ExpertsByHost, Bf16IsAccurate) {
  LayerSpec spec = spec_of(64, 32, 12, 4);
  spec.shared_intermediate = 24;
  const MoeWeights weights = make_weights(spec, DType::kBF16, 3, 1);
  for (const DType x : {DType::kBF16, DType::kF32}) {
    const Batch batch =
        x == DType::kBF16 ? random_batch(spec, 90, x, 5) : routed_batch(spec, 90, x, 5);
    for (const Way& way : ways()) {
      SCOPED_TRACE(way.name);
      const BatchResult result =
          run_by_host(way, spec, weights, batch, Shares::of({50, 0, 40}), DType::kBF16);
      if (x == DType::kBF16) expect_same_routing(spec, weights, batch, result);
      expect_accurate(spec, weights, batch, result);
    }
  }
}

TEST(ExpertsByHost, Fp8IsAccurate) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    expect_accurate_in_fp8(SharedBy::kHost, way.hosts, way.networks_reach_devices);
  }
}

TEST(ExpertsByHost, DropsOverCapacityAsOneHostDoes) {
  LayerSpec spec = spec_of(64, 32, 12, 4);
  spec.capacity_factor = 1;
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 90, DType::kF32, 7);
  const Shares shares = Shares::of({30, 30, 30});
  LayerOptions alone;
  alone.max_tokens = 90;
  const BatchResult expected = run_batch(spec, weights, batch, shares, DType::kF32, alone);
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const BatchResult result = run_by_host(way, spec, weights, batch, shares, DType::kF32);
    EXPECT_LE(distance(result, expected), 1e-6);
    EXPECT_EQ(result.ids, expected.ids);
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_GT(result.stats[r].dropped_slots, 0);
      EXPECT_EQ(result.stats[r].dropped_slots, expected.stats[r].dropped_slots);
    }
  }
}

// Twelve experts at sixteen places, of which ranks use their own where they have one.
TEST(ExpertsByHost, UsesPlacesOfExperts) {
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
  LayerOptions alone;
  alone.max_tokens = 80;
  const BatchResult expected = run_batch(spec, all, batch, shares, DType::kF32, alone);
  for (const bool networks_reach_devices : {false, true}) {
    const BatchResult result = run_by_host({2, 2}, spec, weights, batch, shares, DType::kF32,
                                           options, {}, networks_reach_devices);
    EXPECT_LE(distance(result, expected), 1e-6);
  }
  // Of three ranks on two hosts the exchange carries the tokens.
  MoeWeights of_three = weights;
  of_three.experts.resize(15);
  options.placement.expert_at.resize(15);
  const BatchResult carried =
      run_by_host({2, 1}, spec, of_three, batch, Shares::even(80, 3), DType::kF32, options);
  EXPECT_LE(distance(carried, expected), 1e-6);
}

TEST(ExpertsByHost, RanksThatCannotShareGoOnAlone) {
  const LayerSpec spec = spec_of(64, 32, 13, 3);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 60, DType::kF32, 7);
  // The first three ranks have 2, 3 and 2 experts; their seven on three ranks would be 2, 2 and 3.
  const Shares shares = Shares::even(60, 5);
  LayerOptions options;
  const BatchResult result =
      run_by_host({3, 2}, spec, weights, batch, shares, DType::kF32, options);
  options.max_tokens = 60;
  const BatchResult expected = run_batch(spec, weights, batch, shares, DType::kF32, options);
  EXPECT_TRUE(result.output == expected.output);
}

TEST(ExpertsByHost, NewWeightsAreUsed) {
  const LayerSpec spec = spec_of(64, 32, 12, 3);
  const MoeWeights before = make_weights(spec, DType::kF32, 4, 1);
  const MoeWeights after = make_weights(spec, DType::kF32, 4, 2);
  const Batch batch = routed_batch(spec, 60, DType::kF32, 7);
  const Shares shares = Shares::of({20, 20, 20});
  LayerOptions options;
  options.max_tokens = 60;
  const BatchResult expected = run_batch(spec, after, batch, shares, DType::kF32, options);
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    BatchResult result = empty_result(spec, batch, 3, DType::kF32);
    test::ChaosHosts hosts;
    hosts.ranks_of_hosts = way.hosts;
    hosts.chaos.takes_device_memory = way.networks_reach_devices;
    expect_nothing_thrown(test::run_over_chaos(hosts, [&](World world) {
      Staged staged = make_staged(world, spec, before, options, SharedBy::kHost, 50,
                                  way.networks_reach_devices);
      forward(staged, batch, shares, world.rank(), result);
      world.barrier();
      staged.layer->rebind(weights_of_rank(after, world.rank(), 3), nullptr);
      forward(staged, batch, shares, world.rank(), result);
    }));
    EXPECT_LE(distance(result, expected), 1e-6);
  }
}

// A layer that has failed takes nothing with it: the world's next one works.
TEST(ExpertsByHost, TheWorldOutlivesALayerThatFailed) {
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
  expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    {
      LayerOptions short_lived = options;
      short_lived.deadline = milliseconds(300);
      Staged staged = make_staged(world, spec, weights, short_lived, SharedBy::kHost);
      if (world.rank() != 2) {
        EXPECT_THROW(forward(staged, batch, shares, world.rank(), result), TimeoutError);
        ++told;
      }
      EXPECT_TRUE(test::eventually([&] { return told.load() == 3; }));
    }
    Staged staged = make_staged(world, spec, weights, options, SharedBy::kHost);
    forward(staged, batch, shares, world.rank(), result);
  }));
  EXPECT_LE(distance(result, run_batch(spec, weights, batch, shares, DType::kF32, options)), 1e-6);
}

// ------------------------------------------------------------------------------------ failures

struct Fault {
  int rank;               // that stops
  bool in_its_pass;       // having received its tokens, or before it sends any
  int last_of_the_first;  // rank of the first host
  bool networks_reach_devices = false;
};

class ExpertsByHostFault : public ::testing::TestWithParam<Fault> {};

TEST_P(ExpertsByHostFault, EveryOtherRankNamesTheOneThatStops) {
  const Fault fault = GetParam();
  const LayerSpec spec = spec_of(64, 32, 12, 4);
  const MoeWeights weights = make_weights(spec, DType::kF32, 4, 1);
  const Batch batch = routed_batch(spec, 40, DType::kF32, 3);
  const Shares shares = Shares::even(40, 4);
  std::atomic<int> told{0};
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {fault.last_of_the_first + 1, 3 - fault.last_of_the_first};
  hosts.chaos.takes_device_memory = fault.networks_reach_devices;
  BatchResult result = empty_result(spec, batch, 4, DType::kF32);
  const auto thrown = test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.max_tokens = 40;
    options.deadline = milliseconds(1500);
    Staged staged = make_staged(world, spec, weights, options, SharedBy::kHost, 50,
                                fault.networks_reach_devices);
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
    try {
      forward(staged, batch, shares, world.rank(), result);
      // One that had all it needed before it stopped hears of it in its next call.
      if (world.rank() == fault.rank) forward(staged, batch, shares, world.rank(), result);
      ADD_FAILURE() << "no error on rank " << world.rank();
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.failure().peer_rank, fault.rank)
          << "rank " << world.rank() << ": " << error.what();
    }
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took, milliseconds(1500) + test::kGenerous);
    if (world.rank() != fault.rank) ++told;
  });
  expect_nothing_thrown(thrown);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ExpertsByHostFault,
                         ::testing::Values(Fault{0, false, 1}, Fault{3, false, 1},
                                           Fault{0, true, 1}, Fault{1, true, 1}, Fault{2, true, 1},
                                           Fault{3, true, 1}, Fault{1, false, 2}, Fault{1, true, 2},
                                           Fault{3, true, 2}, Fault{1, true, 1, true},
                                           Fault{2, false, 1, true}),
                         [](const ::testing::TestParamInfo<Fault>& fault) {
                           return "Rank" + std::to_string(fault.param.rank) +
                                  (fault.param.in_its_pass ? "InItsPass" : "BeforeItSends") +
                                  (fault.param.last_of_the_first == 1 ? "" : "Carried") +
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
    const int num_hosts = numbers.between(2, 4), most = numbers.between(1, 3);
    const bool alike = numbers.between(0, 3) != 0, reached = numbers.between(0, 1) == 1;
    int ranks = 0;
    for (int h = 0; h < num_hosts; ++h) {
      hosts.ranks_of_hosts.push_back(alike ? most : numbers.between(1, most));
      ranks += hosts.ranks_of_hosts.back();
    }
    hosts.in_turn = numbers.between(0, 2) == 0;
    hosts.chaos.takes_device_memory = reached;
    hosts.chaos.seed = seed;
    hosts.chaos.longest_delay = std::chrono::microseconds(numbers.between(0, 400));
    hosts.chaos.full_queue = numbers.between(0, 3) * 0.1;
    hosts.windows.window = static_cast<std::uint32_t>(numbers.between(1, 3));
    hosts.windows.chunk_bytes = static_cast<std::uint32_t>(numbers.between(32, 80) * 64);
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
           Staged staged =
               make_staged(world, spec, weights, options, SharedBy::kHost, most_rows, reached);
           for (std::size_t pass = 0; pass < kPasses; ++pass) {
             forward(staged, batches[pass], shares[pass], world.rank(), results[pass]);
           }
         })) {
      if (!failure) continue;
      ++hangs;
      expect_nothing_thrown({failure});
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
