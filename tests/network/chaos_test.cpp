// Layers and exchanges over hosts, with a network that reorders, delays and refuses whatever it
// likes: the same bits as on one host. Each trial follows from a seed, which a failure prints.
//
//   SWITCHYARD_CHAOS_SEEDS=10000    trials of each kind (default 40)
//   SWITCHYARD_CHAOS_FIRST=7        the first seed
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/accuracy.h"
#include "support/exchanges.h"
#include "support/hosts.h"
#include "support/layers.h"
#include "support/numbers.h"

namespace switchyard::testing {
namespace {

std::uint64_t num_seeds() { return test::number_from("SWITCHYARD_CHAOS_SEEDS", 40); }
std::uint64_t first_seed() { return test::number_from("SWITCHYARD_CHAOS_FIRST", 1); }

struct Trial {
  test::ChaosHosts hosts;
  int ranks = 0;
  std::uint64_t seed;
  test::Numbers numbers;

  explicit Trial(std::uint64_t its_seed) : seed(its_seed), numbers(its_seed) {
    const int num_hosts = numbers.between(2, 4);
    for (int h = 0; h < num_hosts; ++h) {
      hosts.ranks_of_hosts.push_back(numbers.between(1, num_hosts == 4 ? 2 : 3));
      ranks += hosts.ranks_of_hosts.back();
    }
    test::draw_network(hosts, numbers, seed);
  }
  std::string name() const {
    std::string text = "seed " + std::to_string(seed) + ": ranks on hosts";
    for (const int count : hosts.ranks_of_hosts) text += " " + std::to_string(count);
    return text + ", window " + std::to_string(hosts.windows.window) + " of " +
           std::to_string(hosts.windows.chunk_bytes);
  }
};

// The results of all trials of a test. `bench/hosts_chaos.py` keeps these numbers.
struct Tally {
  std::uint64_t trials = 0, hangs = 0, wrong_words = 0, wrong_names = 0;
  std::uint64_t seed = 0;  // of the trial that runs

  // False when all trials, of every `step`-th seed, have been, or enough of them failed.
  bool begins_trial(std::uint64_t step = 1) {
    if (trials * step >= num_seeds() || !may_go_on()) return false;
    seed = first_seed() + trials++ * step;
    return true;
  }

  // No rank may throw here. One that waited for its deadline hung.
  void require_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
    for (const std::exception_ptr& failure : thrown) {
      try {
        if (failure) std::rethrow_exception(failure);
      } catch (const TimeoutError& error) {
        ++hangs;
        ADD_FAILURE() << error.what();
        return;
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
  }
  // After a few failures the next ones tell nothing new.
  bool may_go_on() const { return hangs + wrong_words + wrong_names < 3; }
  ~Tally() {
    for (const auto& [name, number] : {std::pair("trials", trials),
                                       {"hangs", hangs},
                                       {"wrong_words", wrong_words},
                                       {"wrong_names", wrong_names}}) {
      ::testing::Test::RecordProperty(name, std::to_string(number));
    }
  }
};

TEST(HostsChaos, LayersHaveTheBitsOfOneHost) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    SCOPED_TRACE(trial.name());
    LayerSpec spec = spec_of(32, 16, trial.numbers.between(std::max(3, trial.ranks), 24), 3);
    if (trial.numbers.between(0, 1) == 1) spec.shared_intermediate = 16;
    spec.weight_on_input = trial.numbers.between(0, 3) == 0;
    const MoeWeights weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
    constexpr int kPasses = 3;
    std::vector<Batch> batches;
    std::vector<Shares> shares;
    std::vector<Matrix> expected;
    for (int pass = 0; pass < kPasses; ++pass) {
      std::vector<std::int64_t> counts;
      std::int64_t total = 0;
      for (int r = 0; r < trial.ranks; ++r) {
        counts.push_back(trial.numbers.between(0, 3) == 0 ? 0 : trial.numbers.between(0, 70));
        total += counts.back();
      }
      const SyntheticRouting routing =
          synthetic_routing(static_cast<int>(total), spec.num_experts, spec.top_k, 0.7, seed);
      batches.push_back({Matrix::random(total, spec.hidden, DType::kF32, seed + 1000),
                         routing.ids,
                         routing.weights,
                         {}});
      shares.push_back(Shares::of(counts));
      expected.push_back(
          run_batch(spec, weights, batches.back(), Shares::of({total}), DType::kF32).output);
    }
    std::vector<BatchResult> results;
    for (const Batch& batch : batches) {
      results.push_back(empty_result(spec, batch, trial.ranks, DType::kF32));
    }
    const auto thrown = test::run_over_chaos(trial.hosts, [&](const World& world) {
      LayerOptions options;
      options.max_tokens = 70;
      options.cpu.num_threads = world.rank() % 2 + 1;
      MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), trial.ranks), options);
      for (std::size_t pass = 0; pass < kPasses; ++pass) {
        forward_share(layer, batches[pass], shares[pass], world.rank(), results[pass]);
      }
    });
    tally.require_nothing_thrown(thrown);
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      std::uint64_t wrong = 0;
      for (std::int64_t i = 0; i < expected[pass].rows() * spec.hidden; ++i) {
        wrong += results[pass].output.get(i) != expected[pass].get(i);
      }
      EXPECT_EQ(wrong, 0u) << "pass " << pass;
      tally.wrong_words += wrong;
    }
  }
}

TEST(HostsChaos, ExchangesBringEveryRowAndSum) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    SCOPED_TRACE(trial.name());
    ExchangeSpec spec;
    spec.hidden = 24;
    spec.num_experts = trial.numbers.between(trial.ranks, 16);
    spec.top_k = 3;
    spec.max_tokens = 40;
    spec.combine = DType::kF32;
    spec.pre_sum = trial.numbers.between(0, 1) == 1;
    spec.weights = spec.pre_sum ? CombineWeights::kBySender : CombineWeights::kByReceiver;
    std::vector<ExchangeBatch> batches;
    for (std::uint64_t b = 0; b < 3; ++b) {
      batches.emplace_back(spec, trial.ranks, DType::kBF16, seed * 8 + b);
    }
    std::vector<int> wrong(static_cast<std::size_t>(trial.ranks), -1);
    const auto thrown = test::run_over_chaos(trial.hosts, [&](const World& world) {
      ExchangeOptions options;
      options.num_threads = world.rank() % 2 + 1;
      Exchange exchange(world, spec, options);
      ExchangeHandle handle = exchange.make_handle();
      int& mine = wrong[static_cast<std::size_t>(world.rank())];
      mine = 0;
      for (int round = 0; round < 4; ++round) {
        const bool reuse = round == 2;
        const ExchangeBatch& batch = batches[static_cast<std::size_t>(reuse ? 1 : round % 3)];
        DispatchInput input = input_of(batch, world.rank());
        if (reuse) {
          input = {};
          input.tokens = batch.tokens[static_cast<std::size_t>(world.rank())].view();
          input.reuse = true;
        }
        ExchangeArrays got{exchange.spec(), exchange.own_places(), exchange.rows_needed()};
        exchange.dispatch_send(input, handle);
        exchange.dispatch_recv(got.output(), handle);
        mine += wrong_rows(batch, world.rank(), exchange.spec().layout, got);
        const Matrix results = results_of(batch, got);
        exchange.combine_send({results.view()}, handle);
        Matrix out(batch.count(world.rank()), spec.hidden, DType::kF32);
        exchange.combine_recv(output_of(out), handle);
        mine += wrong_sums(batch, world.rank(), out);
      }
    });
    tally.require_nothing_thrown(thrown);
    EXPECT_EQ(wrong, std::vector<int>(wrong.size(), 0));
    for (const int count : wrong) tally.wrong_words += count > 0 ? static_cast<unsigned>(count) : 0;
  }
}

struct PlayedUntilFailure {
  std::vector<WaitFailure> failures;       // of ranks
  std::vector<std::exception_ptr> thrown;  // beside these
};

// Ranks that play passes until each finds that it can't go on: because a link is cut, or because
// rank `late` waits for the others' deadlines to pass.
PlayedUntilFailure play_until_failure(const test::ChaosHosts& hosts, int ranks, std::uint64_t seed,
                                      int late = -1) {
  const LayerSpec spec = spec_of(32, 16, 12, 3);
  const MoeWeights weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
  const Batch batch = random_batch(spec, 40 * ranks, DType::kF32, seed);
  const Shares shares = Shares::even(batch.x.rows(), ranks);
  BatchResult result = empty_result(spec, batch, ranks, DType::kF32);
  PlayedUntilFailure played;
  std::atomic<int> done{0};
  played.failures.resize(static_cast<std::size_t>(ranks));
  played.thrown = test::run_over_chaos(hosts, [&](const World& world) {
    LayerOptions options;
    options.max_tokens = 40;
    options.cpu.num_threads = 1;
    options.deadline = late < 0 ? test::kGenerous : std::chrono::milliseconds(1'500);
    if (world.rank() == late) {
      options.diagnostics.on_step = [&](const ProtocolStep& step) {
        if (step.kind != ProtocolStep::Kind::kGemm2) return;
        test::eventually([&] { return done.load() == ranks - 1; });
      };
    }
    MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), ranks), options);
    try {
      for (;;) forward_share(layer, batch, shares, world.rank(), result);
    } catch (const TimeoutError& error) {
      played.failures[static_cast<std::size_t>(world.rank())] = error.failure();
      if (late < 0) {
        EXPECT_STREQ(error.failure().phase, "link") << error.what();
      }
    }
    ++done;
  });
  return played;
}

// A link between two ranks breaks at some put. Everybody ends with an error that names one of the
// two, long before the deadline.
TEST(HostsChaos, ACutLinkEndsAllRanks) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    SCOPED_TRACE(trial.name());
    // One rank a host: every pair of ranks has a link.
    trial.ranks = static_cast<int>(trial.hosts.ranks_of_hosts.size());
    trial.hosts.ranks_of_hosts.assign(static_cast<std::size_t>(trial.ranks), 1);
    trial.hosts.chaos.cut_after = trial.numbers.between(0, 60);
    trial.hosts.chaos.cut_rank = trial.numbers.between(0, trial.ranks - 1);
    const auto start = test::Clock::now();
    const auto [failures, thrown] = play_until_failure(trial.hosts, trial.ranks, seed);
    tally.require_nothing_thrown(thrown);
    EXPECT_LT(test::since(start), test::kAtOnce);
    const int cut = trial.hosts.chaos.cut_rank;
    for (const WaitFailure& failure : failures) {
      const bool right =
          failure.peer_rank != -1 && (failure.waiter_rank == cut || failure.peer_rank == cut);
      EXPECT_TRUE(right) << "rank " << failure.waiter_rank << " blames rank " << failure.peer_rank;
      tally.wrong_names += right ? 0 : 1;
    }
  }
}

// Both ends of a cut link name each other, and a neighbour of one end hears of both. The ranks of a
// host report the same failure all the same.
TEST(HostsChaos, RanksOfAHostReportOneFailure) {
  for (std::uint64_t seed = first_seed(); seed < first_seed() + num_seeds(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    test::Numbers numbers(seed);
    test::ChaosHosts hosts;
    hosts.ranks_of_hosts = {2, 1};
    hosts.chaos.seed = seed;
    hosts.chaos.cut_after = numbers.between(0, 60);
    hosts.chaos.cut_rank = 2;
    const auto [failures, thrown] = play_until_failure(hosts, 3, seed);
    for (const std::exception_ptr& failure : thrown) EXPECT_EQ(failure, nullptr);
    EXPECT_EQ(failures[0].waiter_rank, failures[1].waiter_rank);
    EXPECT_EQ(failures[0].peer_rank, failures[1].peer_rank);
    EXPECT_EQ(failures[0].epoch, failures[1].epoch);
  }
}

bool same_failure(const WaitFailure& a, const WaitFailure& b) {
  return a.waiter_rank == b.waiter_rank && a.peer_rank == b.peer_rank && a.epoch == b.epoch &&
         std::string_view(a.phase) == b.phase;
}

// A rank's link to one other is cut. Both ends find that out by themselves and accuse each other,
// and the other ranks hear of both. All report the same of the two.
TEST(HostsChaos, AllHostsReportOneFailure) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    // The rank is alone on its host: it has links to all others.
    const auto alone = static_cast<std::size_t>(
        trial.numbers.between(0, static_cast<int>(trial.hosts.ranks_of_hosts.size()) - 1));
    trial.hosts.ranks_of_hosts[alone] = 1;
    const auto first = trial.hosts.ranks_of_hosts.begin();
    trial.ranks = std::accumulate(first, trial.hosts.ranks_of_hosts.end(), 0);
    const int cut = std::accumulate(first, first + static_cast<std::ptrdiff_t>(alone), 0);
    trial.hosts.chaos.cut_rank = cut;
    trial.hosts.chaos.cut_after = trial.numbers.between(0, 60);
    SCOPED_TRACE(trial.name() + ", cut off: rank " + std::to_string(cut));
    const auto [failures, thrown] = play_until_failure(trial.hosts, trial.ranks, seed);
    tally.require_nothing_thrown(thrown);
    EXPECT_TRUE(failures[0].waiter_rank == cut || failures[0].peer_rank == cut);
    for (const WaitFailure& other : failures) {
      const bool same = same_failure(other, failures[0]);
      EXPECT_TRUE(same) << "rank " << other.waiter_rank << " blames rank " << other.peer_rank
                        << " in pass " << other.epoch << ", and rank " << failures[0].waiter_rank
                        << " rank " << failures[0].peer_rank << " in pass " << failures[0].epoch;
      tally.wrong_names += same ? 0 : 1;
    }
  }
}

// A rank stalls. The deadlines of all others pass at the same time, and each may find the failure.
// All of them, and the late rank when it goes on, report one, and that names the late rank.
TEST(HostsChaos, AllHostsReportOneLateRank) {
  Tally tally;
  constexpr std::uint64_t kTakesLong = 8;  // a deadline passes in each trial
  while (tally.begins_trial(kTakesLong)) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    const int late = trial.numbers.between(0, trial.ranks - 1);
    SCOPED_TRACE(trial.name() + ", late: rank " + std::to_string(late));
    const auto [failures, thrown] = play_until_failure(trial.hosts, trial.ranks, seed, late);
    for (const std::exception_ptr& failure : thrown) EXPECT_EQ(failure, nullptr);
    for (const WaitFailure& failure : failures) {
      const bool right = failure.peer_rank == late && same_failure(failure, failures[0]);
      EXPECT_TRUE(right) << "rank " << failure.waiter_rank << " blames rank " << failure.peer_rank
                         << " in pass " << failure.epoch;
      tally.wrong_names += right ? 0 : 1;
    }
  }
}

// A rank's program returns in the middle of the others' passes or exchanges. They wait for no
// deadline, and name it.
TEST(HostsChaos, WhoLeavesAmidCallsIsNamedAtOnce) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    const int leaves = trial.numbers.between(0, trial.ranks - 1);
    const int calls = trial.numbers.between(0, 3);
    const bool passes = trial.numbers.between(0, 1) == 1;
    // Others may need nothing of it but what it passes on.
    const bool is_avoided = trial.numbers.between(0, 1) == 1;
    SCOPED_TRACE(trial.name() + ", leaves: rank " + std::to_string(leaves) + " after " +
                 std::to_string(calls) + (passes ? " passes" : " exchanges") +
                 (is_avoided ? ", avoided" : ""));
    const LayerSpec spec = spec_of(32, 16, 2 * trial.ranks, 1);
    const MoeWeights weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
    Batch batch = random_batch(spec, 40 * trial.ranks, DType::kF32, seed);
    for (std::int32_t& id : batch.topk_ids) {
      if (is_avoided && id / 2 == leaves) id = 2 * ((leaves + 1) % trial.ranks);
    }
    const Shares shares = Shares::even(batch.x.rows(), trial.ranks);
    BatchResult result = empty_result(spec, batch, trial.ranks, DType::kF32);
    ExchangeSpec exchange_spec;
    exchange_spec.hidden = 24;
    exchange_spec.num_experts = 2 * trial.ranks;
    exchange_spec.top_k = 2;
    exchange_spec.max_tokens = 40;
    exchange_spec.combine = DType::kF32;
    const ExchangeBatch rows(exchange_spec, trial.ranks, DType::kBF16, seed);
    std::vector<WaitFailure> failures(static_cast<std::size_t>(trial.ranks));
    const auto start = test::Clock::now();
    const auto thrown = test::run_over_chaos(trial.hosts, [&](const World& world) {
      const int rank = world.rank();
      std::optional<MoeLayer> layer;
      std::optional<Exchange> exchange;
      ExchangeHandle handle;
      if (passes) {
        LayerOptions options;
        options.max_tokens = 40;
        options.cpu.num_threads = rank % 2 + 1;
        layer.emplace(world, spec, weights_of_rank(weights, rank, trial.ranks), options);
      } else {
        exchange.emplace(world, exchange_spec, ExchangeOptions{.num_threads = 1});
        handle = exchange->make_handle();
      }
      try {
        for (int call = 0; rank != leaves || call < calls; ++call) {
          if (passes) {
            forward_share(*layer, batch, shares, rank, result);
          } else {
            check_round(*exchange, handle, rows, rank);
          }
        }
      } catch (const TimeoutError& error) {
        failures[static_cast<std::size_t>(rank)] = error.failure();
        EXPECT_STREQ(error.failure().phase, "link") << error.what();
        EXPECT_THAT(error.what(), ::testing::HasSubstr("has destroyed its World"));
      }
      handle = {};
    });
    tally.require_nothing_thrown(thrown);
    EXPECT_LT(test::since(start), test::kAtOnce);
    for (int rank = 0; rank < trial.ranks; ++rank) {
      const int named = failures[static_cast<std::size_t>(rank)].peer_rank;
      const bool right = named == (rank == leaves ? -1 : leaves);
      EXPECT_TRUE(right) << "rank " << rank << " names rank " << named;
      tally.wrong_names += right ? 0 : 1;
    }
  }
}

// Ranks end their last pass at different times, further apart than a goodbye is waited for. Whoever
// needs nothing more of those that have left goes on, and what they sent arrives.
TEST(HostsChaos, RanksThatEndInOrderAreNotMissed) {
  Tally tally;
  while (tally.begins_trial()) {
    const std::uint64_t seed = tally.seed;
    Trial trial(seed);
    SCOPED_TRACE(trial.name());
    trial.hosts.deadline = std::chrono::milliseconds(10'000);
    constexpr int kTokens = 60, kPasses = 2;
    const LayerSpec spec = spec_of(32, 16, trial.ranks, 1);
    const MoeWeights weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
    // All tokens of a rank go to one expert, and so need one rank.
    Batch batch{Matrix::random(kTokens * trial.ranks, spec.hidden, DType::kF32, seed), {}, {}, {}};
    std::vector<int> delays;
    for (int r = 0; r < trial.ranks; ++r) {
      const int expert =
          trial.numbers.between(0, 1) == 0 ? r : trial.numbers.between(0, trial.ranks - 1);
      batch.topk_ids.insert(batch.topk_ids.end(), kTokens, expert);
      batch.topk_weights.insert(batch.topk_weights.end(), kTokens, 1.0f);
      delays.push_back(trial.numbers.between(0, 2) * 100);
    }
    const Shares shares = Shares::even(batch.x.rows(), trial.ranks);
    const Matrix expected =
        run_batch(spec, weights, batch, Shares::of({batch.x.rows()}), DType::kF32).output;
    BatchResult result = empty_result(spec, batch, trial.ranks, DType::kF32);
    const auto thrown = test::run_over_chaos(trial.hosts, [&](const World& world) {
      const int delay = delays[static_cast<std::size_t>(world.rank())];
      std::atomic<int> pass{0};
      std::atomic<bool> was_late{false};
      LayerOptions options;
      options.max_tokens = kTokens;
      options.cpu.num_threads = 1;
      options.diagnostics.on_step = [&](const ProtocolStep& step) {
        if (step.kind != ProtocolStep::Kind::kGemm2 || pass < kPasses || was_late.exchange(true)) {
          return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(delay));
      };
      MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), trial.ranks), options);
      while (pass < kPasses) {
        ++pass;
        forward_share(layer, batch, shares, world.rank(), result);
      }
    });
    tally.require_nothing_thrown(thrown);
    std::uint64_t wrong = 0;
    for (std::int64_t i = 0; i < expected.rows() * spec.hidden; ++i) {
      wrong += result.output.get(i) != expected.get(i);
    }
    EXPECT_EQ(wrong, 0u);
    tally.wrong_words += wrong;
  }
}

// A pass of three ranks, each on a host of its own. All tokens of a rank go to one expert, and rank
// 2 is late.
struct ThreeHosts {
  static constexpr std::int64_t kEach = 8;
  test::ChaosHosts hosts;
  LayerSpec spec = spec_of(32, 16, 3, 1);
  MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  Batch batch{Matrix::random(3 * kEach, spec.hidden, DType::kF32, 1), {}, {}, {}};
  Shares shares = Shares::even(3 * kEach, 3);
  BatchResult result = empty_result(spec, batch, 3, DType::kF32);

  // `experts`: of the tokens of ranks 0, 1 and 2.
  explicit ThreeHosts(const std::array<std::int32_t, 3>& experts) {
    hosts.ranks_of_hosts = {1, 1, 1};
    for (const std::int32_t expert : experts) {
      batch.topk_ids.insert(batch.topk_ids.end(), kEach, expert);
      batch.topk_weights.insert(batch.topk_weights.end(), kEach, 1.0f);
    }
  }
  // The layer of a rank. Rank 2 waits until `others_are_done` before it ends its second product.
  MoeLayer layer(const World& world, const std::function<bool()>& others_are_done) const {
    LayerOptions options;
    options.max_tokens = kEach;
    options.cpu.num_threads = 1;
    options.deadline = std::chrono::milliseconds(1'500);
    if (world.rank() == 2) {
      options.deadline = test::kGenerous;
      options.diagnostics.on_step = [others_are_done](const ProtocolStep& step) {
        if (step.kind == ProtocolStep::Kind::kGemm2) test::eventually(others_are_done);
      };
    }
    return MoeLayer(world, spec, weights_of_rank(weights, world.rank(), 3), options);
  }
  void forward(MoeLayer& layer, int rank) { forward_share(layer, batch, shares, rank, result); }
};

// A rank that has let go of its layer has no part in what ended it. The first host's has, so the
// others decide, and do not wait for it.
TEST(HostsChaos, WhoHasLetGoOfTheLayerDecidesNothing) {
  ThreeHosts three({0, 2, 1});
  std::atomic<int> done{0};
  std::array<WaitFailure, 3> failures;
  const auto start = test::Clock::now();
  const auto thrown = test::run_over_chaos(three.hosts, [&](const World& world) {
    const int rank = world.rank();
    {
      MoeLayer layer = three.layer(world, [&] { return done.load() == 2; });
      try {
        three.forward(layer, rank);
        if (rank == 2) three.forward(layer, rank);
        EXPECT_EQ(rank, 0);
      } catch (const TimeoutError& error) {
        failures[static_cast<std::size_t>(rank)] = error.failure();
      }
    }
    ++done;
    // Its World stays, and with it what answers the others.
    test::eventually([&] { return done.load() == 3; });
  });
  for (const std::exception_ptr& failure : thrown) EXPECT_EQ(failure, nullptr);
  EXPECT_EQ(failures[1].peer_rank, 2);
  EXPECT_TRUE(same_failure(failures[1], failures[2]));
  EXPECT_LT(test::since(start), test::kAtOnce);  // verdict_time is far longer
}

// A rank that has done its part and left is silent, and no culprit: the one that stalls is.
TEST(HostsChaos, WhoHasLeftIsNotBlamed) {
  ThreeHosts three({0, 2, 2});
  std::atomic<bool> others_are_done{false};
  int blamed = -1;
  const auto thrown = test::run_over_chaos(three.hosts, [&](const World& world) {
    MoeLayer layer = three.layer(world, [&] { return others_are_done.load(); });
    try {
      three.forward(layer, world.rank());
      // The late rank has all that it needs, and may end its pass before it hears of the others'.
      EXPECT_NE(world.rank(), 1);
    } catch (const TimeoutError& error) {
      EXPECT_NE(world.rank(), 0) << error.what();
      if (world.rank() == 1) blamed = error.failure().peer_rank;
    }
    if (world.rank() == 1) others_are_done = true;
  });
  for (const std::exception_ptr& failure : thrown) EXPECT_EQ(failure, nullptr);
  EXPECT_EQ(blamed, 2);
}

}  // namespace
}  // namespace switchyard::testing
