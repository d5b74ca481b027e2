// Worlds over hosts with a relay between them that delays, reorders and loses packets, is narrow,
// or is cut for a while. Skipped, with the reason, where namespaces or TUN devices may not be made.
//
//   SWITCHYARD_RELAY_PASSES=500    passes of each layer and exchange (default 8)
#include "support/relay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "support/accuracy.h"
#include "support/exchanges.h"
#include "support/layers.h"
#include "support/namespaces.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;

constexpr milliseconds kLimit = std::chrono::minutes(5);

class HostsOverRelay : public HostsTest {
 protected:
  void make_relay(int num_hosts, const test::RelayOptions& options) {
    ASSERT_NO_FATAL_FAILURE(make_hosts(num_hosts));
    if (IsSkipped()) return;
    try {
      relay_.emplace(*hosts_, options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      GTEST_SKIP() << error.what();
    }
  }
  std::string root_ip() const override { return relay_->ip(0); }

  // Runs body(rank) as `size` ranks in turn on all hosts, and `beside` in a process of its own.
  // `killed` is a rank that does not return.
  void run(
      int size, const std::function<void(int)>& body, const std::function<void()>& beside = [] {},
      int killed = -1) {
    const std::vector<int> codes = test::run_processes(
        size + 2,
        [&](int child) {
          if (child == size) return relay_->play(size - (killed < 0 ? 0 : 1), kLimit);
          if (child == size + 1) return beside();
          const test::Relay::Leaves leaves(*relay_);
          enter_host_of(child, size / hosts_->size());
          body(child);
        },
        kLimit);
    for (int child = 0; child < size + 2; ++child) {
      EXPECT_EQ(codes[static_cast<std::size_t>(child)], child == killed ? test::kKilled : 0)
          << "process " << child;
    }
  }

  std::optional<test::Relay> relay_;
};

// ----------------------------------------------------------------------------------- same bits

struct Wire {
  const char* name;
  int hosts, ranks_of_host;
  test::RelayOptions options;
  int megabits_per_s;  // from the third pass on; 0: never narrow
};

class Wires : public HostsOverRelay, public ::testing::WithParamInterface<Wire> {
 protected:
  int size() const { return GetParam().hosts * GetParam().ranks_of_host; }
  std::uint64_t passes() const { return test::number_from("SWITCHYARD_RELAY_PASSES", 8); }

  using BeforePass = std::function<void(int)>;

  // As run(). The body calls what it gets before each pass, with the pass's number: from the third
  // pass on the link is narrow, if it ever is.
  void run_passes(const std::function<void(const World&, const BeforePass&)>& body) {
    const Wire& wire = GetParam();
    ASSERT_NO_FATAL_FAILURE(make_relay(wire.hosts, wire.options));
    if (IsSkipped()) return;
    run(size(), [&](int rank) {
      World world = join(rank, size());
      std::uint64_t bytes = 0;
      test::Clock::time_point since;
      const auto before_pass = [&](int pass) {
        if (rank != 0 || pass != 2 || wire.megabits_per_s == 0) return;
        relay_->set_rate(wire.megabits_per_s);
        bytes = relay_->bytes();
        since = test::Clock::now();
      };
      body(world, before_pass);
      if (rank != 0 || wire.megabits_per_s == 0) return;
      // The relay is as narrow as it says: a host's bytes alone have taken so long.
      const double megabits = static_cast<double>(relay_->bytes() - bytes) * 8e-6 / wire.hosts;
      const double seconds = std::chrono::duration<double>(test::Clock::now() - since).count();
      EXPECT_GT(megabits, 0.5);
      EXPECT_LT(megabits, 1.1 * seconds * wire.megabits_per_s + 1);
    });
    // It was the relay that carried everything.
    EXPECT_GT(relay_->packets(), 1'000U);
    EXPECT_EQ(relay_->lost() > 0, wire.options.lost_of_1000 > 0);
  }
};

TEST_P(Wires, LayersHaveTheBitsOfOneHost) {
  const LayerSpec spec = spec_of(256, 64, 24, 4);
  const MoeWeights weights = make_weights(spec, DType::kBF16, 3, 1);
  const std::int64_t tokens = 96 * size() + 5;
  const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
  const Matrix expected =
      run_batch(spec, weights, batch, Shares::of({tokens}), DType::kBF16).output;
  run_passes([&](const World& world, const BeforePass& before_pass) {
    LayerOptions options;
    options.cpu.num_threads = 1;
    options.max_tokens = static_cast<int>(tokens);
    MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), size()), options);
    const Shares shares = Shares::even(tokens, size());
    for (int pass = 0; pass < static_cast<int>(passes()); ++pass) {
      before_pass(pass);
      BatchResult result = empty_result(spec, batch, size(), DType::kBF16);
      forward_share(layer, batch, shares, world.rank(), result);
      expect_same_rows(result.output, expected, shares, world.rank(), spec.hidden);
    }
  });
}

TEST_P(Wires, ExchangesBringEveryRowAndSum) {
  ExchangeSpec spec;
  spec.hidden = 256;
  spec.num_experts = 24;
  spec.top_k = 4;
  spec.max_tokens = 96;
  spec.combine = DType::kF32;
  spec.weights = CombineWeights::kByReceiver;
  run_passes([&](const World& world, const BeforePass& before_pass) {
    ExchangeOptions options;
    options.num_threads = 1;
    Exchange exchange(world, spec, options);
    ExchangeHandle handle = exchange.make_handle();
    for (int pass = 0; pass < static_cast<int>(passes()); ++pass) {
      before_pass(pass);
      const ExchangeBatch batch(spec, size(), DType::kBF16, static_cast<std::uint64_t>(pass));
      check_round(exchange, handle, batch, world.rank());
    }
  });
}

constexpr std::chrono::microseconds kDelay{2'000}, kJitter{1'000};

INSTANTIATE_TEST_SUITE_P(Namespaces, Wires,
                         ::testing::Values(Wire{"FarAndLossy", 3, 1, {kDelay, kJitter, 10}, 0},
                                           Wire{"TwoRanksAHost", 2, 2, {kDelay, kJitter, 10}, 0},
                                           Wire{"Narrow", 2, 1, {kDelay, {}, 0}, 40}),
                         [](const auto& param) { return std::string(param.param.name); });

// ---------------------------------------------------------------------------------- partitions

// A host cannot be reached any more, and no device says so: packets are lost. It can be reached
// again before the deadline, or not.
class Partition : public HostsOverRelay, public ::testing::WithParamInterface<bool> {};

TEST_P(Partition, IsWaitedForUntilTheDeadline) {
  ASSERT_NO_FATAL_FAILURE(make_relay(3, {kDelay, kJitter, 0}));
  if (IsSkipped()) return;
  const bool heals = GetParam();
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr milliseconds kDeadline{4'000};
#else
  constexpr milliseconds kDeadline{2'000};
#endif
  constexpr int kRanks = 3, kCutOff = 2;
  struct Seen {
    std::atomic<std::uint64_t> epoch;  // of rank 0
    std::atomic<bool> enough;
    std::atomic<std::uint64_t> last;   // pass that all are to play; 0: not known yet
    std::atomic<std::int64_t> cut_at;  // ns
  };
  test::SharedWithChildren<Seen> seen;
  const LayerSpec spec = spec_of(64, 32, 6, 2);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  const Batch batch = random_batch(spec, 60, DType::kF32, 1);
  const Matrix expected = run_batch(spec, weights, batch, Shares::of({60}), DType::kF32).output;
  run(
      kRanks,
      [&](int rank) {
        const World world = join(rank, kRanks);
        LayerOptions options;
        options.max_tokens = 64;
        options.deadline = heals ? test::kGenerous : kDeadline;
        options.cpu.num_threads = 1;
        MoeLayer layer(world, spec, weights, options);
        const Shares shares = Shares::even(60, kRanks);
        BatchResult result = empty_result(spec, batch, kRanks, DType::kF32);
        int blamed = -1;
        std::string words;
        try {
          for (std::uint64_t epoch = 1; seen->last == 0 || epoch <= seen->last; ++epoch) {
            if (rank == 0) seen->epoch = epoch;
            forward_share(layer, batch, shares, rank, result);
            expect_same_rows(result.output, expected, shares, rank, spec.hidden);
            // Others cannot end the next pass without this rank, and so know before the last one.
            if (rank == 0 && seen->enough && seen->last == 0) seen->last = epoch + 2;
          }
        } catch (const TimeoutError& error) {
          const milliseconds took((now_ns() - seen->cut_at) / 1'000'000);
          EXPECT_GE(took, kDeadline / 2) << error.what();
          EXPECT_LT(took, 3 * kDeadline) << error.what();
          blamed = error.failure().peer_rank;
          words = error.what();
        }
        if (heals) {
          EXPECT_EQ(blamed, -1) << words;
        } else if (rank == kCutOff) {
          EXPECT_THAT(blamed, ::testing::AnyOf(0, 1)) << words;  // both are beyond the cut
        } else {
          EXPECT_EQ(blamed, kCutOff) << words;
        }
      },
      [&] {
        EXPECT_TRUE(test::eventually([&] { return seen->epoch >= 3; }));
        seen->cut_at = now_ns();
        relay_->set_connected(kCutOff, false);
        if (!heals) return;
        // Longer than anything takes that was on its way: the pass stands still.
        std::this_thread::sleep_for(milliseconds(700));
        const std::uint64_t before = seen->epoch;
        relay_->set_connected(kCutOff, true);
        EXPECT_TRUE(test::eventually([&] { return seen->epoch > before + 3; }));
        seen->enough = true;
      });
}

INSTANTIATE_TEST_SUITE_P(Namespaces, Partition, ::testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "Heals" : "Stays");
});

// ------------------------------------------------------------------------------------- deaths

// A rank dies while others have half of its chunk, and while credits of theirs are on their way to
// it: a chunk takes longer than anything else here.
TEST_F(HostsOverRelay, ADeathInTheMiddleOfAChunkIsNamed) {
  ASSERT_NO_FATAL_FAILURE(make_relay(3, {}));
  if (IsSkipped()) return;
  constexpr int kRanks = 3, kVictim = 2, kTokens = 512;
  const LayerSpec spec = spec_of(512, 32, 6, 2);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  const Batch batch = random_batch(spec, kTokens * kRanks, DType::kF32, 1);
  relay_->set_rate(16);
  run(
      kRanks,
      [&](int rank) {
        const World world = join(rank, kRanks);
        LayerOptions options;
        options.max_tokens = kTokens;
        options.deadline = test::kGenerous;
        options.cpu.num_threads = 1;
        MoeLayer layer(world, spec, weights, options);
        BatchResult result = empty_result(spec, batch, kRanks, DType::kF32);
        std::thread killer;
        if (rank == kVictim) {
          killer = std::thread([] {
            std::this_thread::sleep_for(milliseconds(300));
            ::kill(::getpid(), SIGKILL);
          });
        }
        try {
          for (;;)
            forward_share(layer, batch, Shares::even(kTokens * kRanks, kRanks), rank, result);
        } catch (const TimeoutError& error) {
          EXPECT_EQ(error.failure().peer_rank, kVictim) << error.what();
        }
        if (killer.joinable()) killer.join();
      },
      [] {}, kVictim);
}

}  // namespace
}  // namespace switchyard::testing
