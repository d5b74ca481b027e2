// Results that a host sums before they cross (LayerOptions and ExchangeSpec::pre_sum_per_host),
// over a chaotic network: the bits of a plain loop over slots, and sums close to the fp64
// reference's. Each trial follows from a seed, which a failure prints; see chaos_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "model/errors.h"
#include "network/proxy.h"
#include "support/accuracy.h"
#include "support/exchanges.h"
#include "support/hosts.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

std::uint64_t num_seeds() { return test::number_from("SWITCHYARD_CHAOS_SEEDS", 20); }
std::uint64_t first_seed() { return test::number_from("SWITCHYARD_CHAOS_FIRST", 1); }

test::ChaosHosts random_hosts(test::Numbers& numbers, std::uint64_t seed) {
  test::ChaosHosts hosts;
  const int num_hosts = numbers.between(2, 4);
  for (int h = 0; h < num_hosts; ++h) hosts.ranks_of_hosts.push_back(numbers.between(1, 3));
  test::draw_network(hosts, numbers, seed);
  return hosts;
}

std::string name_of(const test::ChaosHosts& hosts) {
  std::string text = "seed " + std::to_string(hosts.chaos.seed) + ": ranks on hosts";
  for (const int count : hosts.ranks_of_hosts) text += " " + std::to_string(count);
  return text;
}

// The rows of all slots: a batch in which each slot is a token of its own. An expert has the same
// rows in the same order as in the layer's pass, so they have the same bits.
Matrix rows_of_slots(LayerSpec spec, MoeWeights weights, const Batch& batch) {
  spec.shared_intermediate = 0;
  weights.shared = {};
  spec.capacity_factor = 0;
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  const auto slots = static_cast<std::int64_t>(batch.topk_ids.size());
  Batch each{Matrix(slots, spec.hidden, batch.x.dtype()), {}, {}, {}};
  each.topk_ids.assign(batch.topk_ids.size() * top_k, kNoExpert);
  each.topk_weights.assign(batch.topk_ids.size() * top_k, 0.0f);
  for (std::size_t s = 0; s < batch.topk_ids.size(); ++s) {
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      each.x.set(static_cast<std::int64_t>(s) * spec.hidden + i,
                 batch.x.get(static_cast<std::int64_t>(s / top_k) * spec.hidden + i));
    }
    each.topk_ids[s * top_k] = batch.topk_ids[s];
    each.topk_weights[s * top_k] = spec.weight_on_input ? batch.topk_weights[s] : 1.0f;
  }
  LayerOptions options;
  options.max_tokens = static_cast<int>(slots);
  const DType value = weights.experts[0].up.dtype;
  return run_batch(spec, weights, each, Shares::of({slots}), value, options).output;
}

// The layer's expected output, by plain loops. `batch` has the routing.
Matrix summed_per_host(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                       const Shares& shares, const std::vector<int>& host_of, DType output) {
  const Matrix rows = rows_of_slots(spec, weights, batch);
  const DType value = rows.dtype();
  const int ranks = static_cast<int>(host_of.size());
  const int num_hosts = host_of.back() + 1;
  Matrix shared(batch.x.rows(), spec.hidden, value);
  if (spec.shared_intermediate > 0) {
    Batch none = batch;
    none.topk_ids.assign(none.topk_ids.size(), kNoExpert);
    shared = run_batch(spec, weights, none, Shares::of({batch.x.rows()}), value).output;
  }
  const auto address = [](const Matrix& of, std::int64_t row) { return of.view().row(row); };
  const auto combine = cpu::kernels().combine;
  Matrix out(batch.x.rows(), spec.hidden, output);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::int64_t t = shares.first[r]; t < shares.first[r] + shares.count[r]; ++t) {
      Matrix sums(num_hosts, spec.hidden, value);
      std::vector<const void*> terms;
      std::vector<float> factors;
      std::vector<bool> seen(static_cast<std::size_t>(num_hosts));
      const auto host_of_slot = [&](int k) {
        const std::int32_t id = batch.topk_ids[static_cast<std::size_t>(t * spec.top_k + k)];
        if (id < 0) return -1;
        return host_of[static_cast<std::size_t>(
            protocol::ExpertPartition{spec.num_experts, ranks}.owner(id))];
      };
      const auto weight = [&](int k) {
        return spec.weight_on_input
                   ? 1.0f
                   : batch.topk_weights[static_cast<std::size_t>(t * spec.top_k + k)];
      };
      for (int k = 0; k < spec.top_k; ++k) {
        const int host = host_of_slot(k);
        if (host < 0) continue;
        if (host == host_of[r]) {
          terms.push_back(address(rows, t * spec.top_k + k));
          factors.push_back(weight(k));
          continue;
        }
        if (seen[static_cast<std::size_t>(host)]) continue;
        seen[static_cast<std::size_t>(host)] = true;
        std::vector<const void*> of_host;
        std::vector<float> by;
        for (int j = k; j < spec.top_k; ++j) {
          if (host_of_slot(j) != host) continue;
          of_host.push_back(address(rows, t * spec.top_k + j));
          by.push_back(weight(j));
        }
        combine(of_host.data(), by.data(), static_cast<int>(by.size()), value, sums.row(host),
                value, spec.hidden, 1, false);
        terms.push_back(address(sums, host));
        factors.push_back(1);
      }
      if (spec.shared_intermediate > 0) {
        terms.push_back(address(shared, t));
        factors.push_back(1);
      }
      combine(terms.data(), factors.data(), static_cast<int>(factors.size()), value, out.row(t),
              output, spec.hidden, 1, false);
    }
  }
  return out;
}

std::uint64_t num_different(const Matrix& a, const Matrix& b, int hidden) {
  std::uint64_t different = 0;
  for (std::int64_t i = 0; i < a.rows() * hidden; ++i) {
    different += std::bit_cast<std::uint32_t>(a.get(i)) != std::bit_cast<std::uint32_t>(b.get(i));
  }
  return different;
}

TEST(HostsChaosSums, LayersHaveTheBitsOfAPlainLoop) {
  for (std::uint64_t seed = first_seed(); seed < first_seed() + num_seeds(); ++seed) {
    test::Numbers numbers(seed);
    const test::ChaosHosts hosts = random_hosts(numbers, seed);
    SCOPED_TRACE(name_of(hosts));
    const std::vector<int> host_of = test::hosts_by_rank(hosts.ranks_of_hosts);
    const int ranks = static_cast<int>(host_of.size());
    LayerSpec spec = spec_of(32, 16, numbers.between(ranks, 24), numbers.between(2, 6));
    spec.top_k = std::min(spec.top_k, spec.num_experts);
    if (numbers.between(0, 1) == 1) spec.shared_intermediate = 16;
    spec.weight_on_input = numbers.between(0, 3) == 0;
    spec.capacity_factor = numbers.between(0, 3) == 0 ? 1.25f : 0.0f;
    const DType dtype = numbers.between(0, 1) == 1 ? DType::kBF16 : DType::kF32;
    const MoeWeights weights = generate_weights(spec, dtype, seed, {.num_threads = 1});
    constexpr std::size_t kPasses = 3;
    std::vector<Batch> batches;
    std::vector<Shares> shares;
    std::vector<BatchResult> results;
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      std::vector<std::int64_t> counts;
      std::int64_t total = 0;
      for (int r = 0; r < ranks; ++r) {
        counts.push_back(numbers.between(0, 3) == 0 ? 0 : numbers.between(0, 40));
        if (r == ranks - 1 && total == 0) counts.back() = 1;  // what is expected is of some token
        total += counts.back();
      }
      const SyntheticRouting routing = synthetic_routing(static_cast<int>(total), spec.num_experts,
                                                         spec.top_k, 0.7, seed * 8 + pass);
      batches.push_back({Matrix::random(total, spec.hidden, dtype, seed + 1000 + pass),
                         routing.ids,
                         routing.weights,
                         {}});
      shares.push_back(Shares::of(counts));
      results.push_back(empty_result(spec, batches.back(), ranks, DType::kF32));
    }
    const int late = numbers.between(-1, ranks - 1);
    test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
      LayerOptions options;
      options.max_tokens = 40;
      options.cpu.num_threads = world.rank() % 2 + 1;
      options.patience = std::chrono::microseconds(world.rank() % 3 * 100);
      options.pre_sum_per_host = true;
      MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), ranks), options);
      for (std::size_t pass = 0; pass < kPasses; ++pass) {
        if (world.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        forward_share(layer, batches[pass], shares[pass], world.rank(), results[pass]);
      }
    }));
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      // A dropped slot has no expert.
      Batch routed = batches[pass];
      routed.topk_ids = results[pass].ids;
      routed.topk_weights = results[pass].weights;
      const Matrix expected =
          summed_per_host(spec, weights, routed, shares[pass], host_of, DType::kF32);
      EXPECT_EQ(num_different(results[pass].output, expected, spec.hidden), 0u) << "pass " << pass;
    }
    if (HasFailure()) return;
  }
}

class HostsChaosSumsOver : public ::testing::TestWithParam<std::tuple<int, int>> {};

// A model with a shared expert, and one without. How many ranks a host has makes no
// difference, and fewer bytes cross than without sums.
TEST_P(HostsChaosSumsOver, AccurateAndTheSameBitsHoweverManyRanksAHostHas) {
  const auto [num_hosts, ranks_of_host] = GetParam();
  for (const char* name : {"deepseek-v3", "olmoe"}) {
    SCOPED_TRACE(name);
    const auto model =
        std::find_if(model_table().begin(), model_table().end(),
                     [&](const ModelEntry& entry) { return entry.name == std::string(name); });
    ASSERT_NE(model, model_table().end());
    LayerSpec spec = small_spec(*model);
    // Every host has the same experts and tokens with any of these numbers of ranks.
    spec.num_experts = spec.routing.num_groups > 1 ? spec.routing.num_groups * 6 : 48;
    const MoeWeights weights = make_weights(spec, DType::kBF16, 11, 1);
    const std::int64_t tokens = 96;
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
    const auto run = [&](int ranks_each, bool summed, std::uint64_t seed, std::uint64_t& bytes) {
      test::ChaosHosts hosts;
      hosts.ranks_of_hosts.assign(static_cast<std::size_t>(num_hosts), ranks_each);
      hosts.chaos.seed = seed;
      const int ranks = num_hosts * ranks_each;
      const Shares shares = Shares::even(tokens, ranks);
      BatchResult result = empty_result(spec, batch, ranks, DType::kBF16);
      std::atomic<std::uint64_t> sent{0};
      test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
        LayerOptions options;
        options.max_tokens = static_cast<int>(tokens);
        options.cpu.num_threads = 1;
        options.pre_sum_per_host = summed;
        MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), ranks), options);
        forward_share(layer, batch, shares, world.rank(), result);
        sent += world.fabric().proxy()->traffic().bytes_sent;
      }));
      bytes = sent;
      return result;
    };
    std::uint64_t plain_bytes = 0, bytes = 0, other_bytes = 0;
    run(ranks_of_host, false, 1, plain_bytes);
    const BatchResult result = run(ranks_of_host, true, 2, bytes);
    expect_accurate(spec, weights, batch, result);
    EXPECT_EQ(run(ranks_of_host == 1 ? 2 : 1, true, 3, other_bytes).output, result.output);
    EXPECT_LT(bytes, plain_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, HostsChaosSumsOver,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) + "_hosts_of_" +
                                  std::to_string(std::get<1>(param.param));
                         });

TEST(HostsChaosSums, Fp8LayersAreAccurate) {
  LayerSpec spec = spec_of(256, 128, 12, 6);
  GenerateOptions how;
  how.num_threads = 1;
  const MoeWeights weights = generate_weights(spec, DType::kF8E4M3, 3, how);
  const Batch batch = random_batch(spec, 60, DType::kBF16, 5);
  const Shares shares = Shares::even(60, 4);
  BatchResult result = empty_result(spec, batch, 4, DType::kBF16);
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 2};
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.max_tokens = 15;
    options.cpu.num_threads = 1;
    options.compute = DType::kF8E4M3;
    options.pre_sum_per_host = true;
    MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), 4), options);
    forward_share(layer, batch, shares, world.rank(), result);
  }));
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick, true);
  EXPECT_LE(error, 2 * yardstick);
}

TEST(HostsChaosSums, ExchangesSumWithinTheRoundings) {
  for (std::uint64_t seed = first_seed(); seed < first_seed() + num_seeds(); ++seed) {
    test::Numbers numbers(seed);
    const test::ChaosHosts hosts = random_hosts(numbers, seed);
    SCOPED_TRACE(name_of(hosts));
    int ranks = 0;
    for (const int count : hosts.ranks_of_hosts) ranks += count;
    ExchangeSpec spec;
    spec.hidden = 24;
    spec.num_experts = numbers.between(ranks, 16);
    spec.top_k = numbers.between(2, 5);
    spec.max_tokens = 40;
    spec.combine = numbers.between(0, 1) == 1 ? DType::kBF16 : DType::kF32;
    spec.pre_sum = numbers.between(0, 1) == 1;
    spec.pre_sum_per_host = true;
    spec.weights = numbers.between(0, 1) == 1 ? CombineWeights::kBySender : CombineWeights::kNone;
    std::vector<ExchangeBatch> batches;
    for (std::uint64_t b = 0; b < 3; ++b) {
      batches.emplace_back(spec, ranks, DType::kBF16, seed * 8 + b);
    }
    std::vector<int> wrong(static_cast<std::size_t>(ranks), 0), changed(wrong);
    test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
      ExchangeOptions options;
      options.num_threads = world.rank() % 2 + 1;
      Exchange exchange(world, spec, options);
      // Two handles, so that a dispatch comes between another and its combines.
      ExchangeHandle handles[] = {exchange.make_handle(), exchange.make_handle()};
      int& mine = wrong[static_cast<std::size_t>(world.rank())];
      std::vector<ExchangeArrays> got(
          2, ExchangeArrays{exchange.spec(), exchange.own_places(), exchange.rows_needed()});
      std::vector<Matrix> first_sums;
      for (std::size_t round = 0; round < 4; ++round) {
        const bool reuse = round == 3;
        const std::size_t b = reuse ? 2 : round, h = reuse ? 0 : round % 2;
        const ExchangeBatch& batch = batches[b];
        DispatchInput input = input_of(batch, world.rank());
        if (reuse) {
          input = {};
          input.tokens = batch.tokens[static_cast<std::size_t>(world.rank())].view();
          input.reuse = true;
        }
        if (!reuse) {
          got[h] = {exchange.spec(), exchange.own_places(), exchange.rows_needed()};
        }
        exchange.dispatch(input, got[h].output(), handles[h]);
        // The batch before, again, and this one.
        for (const std::size_t c : {round == 0 || reuse ? b : b - 1, b}) {
          const std::size_t of = reuse ? 0 : c % 2;
          const Matrix results = results_of(batches[c], got[of]);
          Matrix out(batches[c].count(world.rank()), spec.hidden, DType::kF32);
          exchange.combine({results.view()}, output_of(out), handles[of]);
          mine += wrong_sums(batches[c], world.rank(), out);
          if (c == first_sums.size()) {
            first_sums.push_back(out);
          } else if (c < first_sums.size()) {
            changed[static_cast<std::size_t>(world.rank())] += !(first_sums[c] == out);
          }
        }
      }
    }));
    EXPECT_EQ(wrong, std::vector<int>(wrong.size(), 0));
    EXPECT_EQ(changed, std::vector<int>(wrong.size(), 0)) << "other bits in another combine";
    if (HasFailure()) return;
  }
}

// One rank of the experts' host stalls. Ranks of both hosts name it, and not the one that keeps the
// sums or would have sent them.
TEST(HostsChaosSums, TheRankThatStallsIsNamed) {
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 2};
  const LayerSpec spec = spec_of(32, 16, 8, 4);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  const Batch batch{Matrix::random(64, spec.hidden, DType::kF32, 1), {}, {}, {}};
  const Shares shares = Shares::even(64, 4);
  BatchResult result = empty_result(spec, batch, 4, DType::kF32);
  for (const int culprit : {2, 3}) {
    std::atomic<int> have_failed{0};
    test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
      LayerOptions options;
      options.max_tokens = 16;
      options.cpu.num_threads = 1;
      options.deadline = std::chrono::milliseconds(1'000);
      options.pre_sum_per_host = true;
      if (world.rank() == culprit) {
        options.deadline = test::kGenerous;
        options.diagnostics.on_step = [&](const ProtocolStep& step) {
          if (step.kind != ProtocolStep::Kind::kGemm2) return;
          test::eventually([&] { return have_failed == 3; });
        };
      }
      MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), 4), options);
      test::blame_of(culprit, [&] { forward_share(layer, batch, shares, world.rank(), result); });
      ++have_failed;
    }));
  }
}

// Layers of different shapes work in one memory in turn, and have the bits that they have alone.
TEST(HostsChaosSums, LayersShareAWorkspace) {
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 1, 2};
  const std::vector<int> host_of = test::hosts_by_rank(hosts.ranks_of_hosts);
  const std::vector<LayerSpec> specs = {spec_of(32, 16, 15, 5), spec_of(48, 16, 10, 2)};
  std::vector<MoeWeights> weights;
  std::vector<Batch> batches;
  std::vector<BatchResult> results;
  const Shares shares = Shares::of({20, 3, 0, 17, 20});
  for (const LayerSpec& spec : specs) {
    weights.push_back(generate_weights(spec, DType::kF32, 1, {.num_threads = 1}));
    const SyntheticRouting routing = synthetic_routing(60, spec.num_experts, spec.top_k, 0.5, 3);
    batches.push_back(
        {Matrix::random(60, spec.hidden, DType::kF32, 7), routing.ids, routing.weights, {}});
    results.push_back(empty_result(spec, batches.back(), 5, DType::kF32));
  }
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    WorkspaceOptions room;
    room.max_tokens = 20;
    room.compute = DType::kF32;
    room.num_threads = 1;
    LayerOptions options;
    options.max_tokens = 20;
    options.cpu.num_threads = 1;
    options.pre_sum_per_host = true;
    const auto make = [&](const Workspace& workspace, std::size_t i) {
      options.workspace = &workspace;
      return MoeLayer(world, specs[i], weights_of_rank(weights[i], world.rank(), 5), options);
    };
    {
      const Workspace without(world, specs, room);
      EXPECT_THROW(make(without, 0), Error);
    }
    room.pre_sum_per_host = true;
    const Workspace workspace(world, specs, room);
    MoeLayer layers[] = {make(workspace, 0), make(workspace, 1)};
    for (int pass = 0; pass < 6; ++pass) {
      const auto i = static_cast<std::size_t>(pass % 2);
      forward_share(layers[i], batches[i], shares, world.rank(), results[i]);
    }
  }));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const Matrix expected =
        summed_per_host(specs[i], weights[i], batches[i], shares, host_of, DType::kF32);
    EXPECT_EQ(num_different(results[i].output, expected, specs[i].hidden), 0u) << "layer " << i;
  }
}

TEST(HostsChaosSums, RanksThatDisagreeAreTold) {
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {1, 1};
  const LayerSpec spec = spec_of(32, 16, 4, 2);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  const auto expect_refused = [](const auto& make) {
    EXPECT_ERROR(make(), kSpecMismatch, "pre_sum_per_host");
  };
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.pre_sum_per_host = world.rank() == 1;
    expect_refused([&] { MoeLayer(world, spec, weights, options); });
    ExchangeSpec exchange;
    exchange.hidden = 24;
    exchange.num_experts = 4;
    exchange.top_k = 2;
    exchange.max_tokens = 8;
    exchange.weights = CombineWeights::kNone;
    exchange.pre_sum_per_host = world.rank() == 1;
    expect_refused([&] { Exchange(world, exchange); });
    exchange.pre_sum_per_host = true;
    exchange.weights = CombineWeights::kByReceiver;
    EXPECT_THROW(Exchange(world, exchange), Error);
  }));
}

}  // namespace
}  // namespace switchyard::testing
