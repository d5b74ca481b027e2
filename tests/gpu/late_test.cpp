// Ranks that come late, on GPUs: that outputs have the same bits, that others work in the meantime,
// and who is named when a rank does not come at all.
//
//   SWITCHYARD_SOAK_FORWARDS=100000   passes of the soak (default 2000)
//   SWITCHYARD_SOAK_SEED=7            other batches and delays
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <ostream>
#include <random>
#include <thread>

#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Longer than any deadline: passes wait for all counts.
constexpr microseconds kForEver = std::chrono::hours(1);

using LateOnGpu = OnGpu<::testing::Test>;

// How late each rank is; ranks that are left out are not.
using Delays = std::vector<microseconds>;

void spin_for(microseconds time) {
  const auto end = Clock::now() + time;
  while (Clock::now() < end) {
  }
}

// A rank's pass, which it begins so late.
void pass_late(DeviceRank& rank, DeviceBatch& share, microseconds late) {
  share.poison(rank.stream());
  rank.stream().synchronize();
  rank.world().barrier();
  spin_for(late);
  share.enqueue(rank.layer(), rank.stream());
  rank.stream().synchronize();
  rank.world().barrier();
}

// Passes with each of these delays, in turns with one in which nobody is late, must have the bits
// and the statistics of passes that wait.
void expect_same_bits(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                      const Shares& shares, const std::vector<Delays>& delays,
                      LayerOptions options = {}) {
  const int ranks = static_cast<int>(shares.count.size());
  const auto max_tokens =
      static_cast<int>(std::max<std::int64_t>(1, *std::ranges::max_element(shares.count)));
  options.patience = kForEver;
  const BatchResult expected = run_on_gpus(spec, weights, batch, shares, DType::kBF16, 1, options);
  for (const microseconds patience : {microseconds(0), microseconds(20)}) {
    options.patience = patience;
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      const auto r = static_cast<std::size_t>(world.rank());
      DeviceRank rank(world, spec, weights, max_tokens, options);
      DeviceBatch share = rank.share(batch, shares);
      for (const Delays& late : delays) {
        for (const microseconds mine : {late[r], microseconds(0)}) {
          pass_late(rank, share, mine);
          EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()))
              << "rank " << r << ", late by " << mine.count() << " us, patience "
              << patience.count();
          const ForwardStats stats = rank.layer().stats();
          EXPECT_EQ(stats.tokens_per_expert, expected.stats[r].tokens_per_expert);
          EXPECT_EQ(stats.tokens, expected.stats[r].tokens);
          EXPECT_EQ(stats.combine_bytes, expected.stats[r].combine_bytes);
          EXPECT_EQ(stats.dispatch_bytes, expected.stats[r].dispatch_bytes);
          rank.world().barrier();
        }
      }
    });
    if (::testing::Test::HasFailure()) return;
  }
}

// Each rank in turn, or all but one, or all by different times.
std::vector<Delays> all_delays(int ranks) {
  std::vector<Delays> delays;
  const auto all = static_cast<std::size_t>(ranks);
  for (const microseconds late : {microseconds(200), microseconds(2000)}) {
    for (std::size_t r = 0; r < all; ++r) {
      delays.emplace_back(all).at(r) = late;
      delays.emplace_back(all, late).at(r) = microseconds(0);
    }
  }
  Delays apart(all);
  for (std::size_t r = 0; r < all; ++r) apart[r] = static_cast<int>(r) * microseconds(300);
  delays.push_back(apart);
  std::ranges::reverse(apart);
  delays.push_back(apart);
  for (int i = 0; i < 4; ++i) {
    for (std::size_t r = 0; r < all; ++r) {
      apart[r] = microseconds((i * 37 + static_cast<int>(r) * 53) % 120);
    }
    delays.push_back(apart);
  }
  return delays;
}

struct LateCase {
  const char* name;
  bool fp8, shared, weighs_input;
  int hidden, intermediate, experts, top_k;
  std::int64_t tokens;
};
void PrintTo(const LateCase& c, std::ostream* out) { *out << c.name; }
constexpr LateCase kCases[] = {
    {"Bf16", false, false, false, 584, 360, 27, 4, 1500},
    {"Bf16Shared", false, true, false, 584, 360, 27, 4, 1500},
    {"Fp8Shared", true, true, false, 592, 360, 27, 4, 1500},
    {"Bf16Weighted", false, true, true, 584, 360, 16, 4, 700},
    {"Fp8Weighted", true, false, true, 592, 360, 16, 4, 700},
    {"Few", false, true, false, 256, 128, 64, 6, 9},
    // Tiles in bands, in pairs of blocks, many per expert.
    {"Bf16Deep", false, false, false, 80, 4112, 3, 1, 2900},
    {"Fp8Deep", true, true, false, 80, 4112, 3, 1, 2900},
    // Tables in the end of the ring.
    {"Many", false, true, false, 192, 72, 1024, 8, 900},
};

using EveryLateCase = OnGpu<::testing::TestWithParam<LateCase>>;

TEST_P(EveryLateCase, HasTheSameBits) {
  const LateCase& c = GetParam();
  LayerSpec spec = spec_of(c.hidden, c.intermediate, c.experts, c.top_k);
  if (c.shared) spec.shared_intermediate = 136;
  spec.weight_on_input = c.weighs_input;
  const MoeWeights w = make_weights(spec, c.fp8 ? kFp8 : DType::kBF16);
  const Batch batch = routed(spec, c.tokens, 0.7);
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks");
    expect_same_bits(spec, w, batch, Shares::even(c.tokens, ranks), all_delays(ranks));
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, EveryLateCase, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<LateCase>& c) {
                           return std::string(c.param.name);
                         });

// With the gate, and ranks without tokens or with most of them.
TEST_F(LateOnGpu, WithTheGateAndUnevenShares) {
  LayerSpec spec = spec_of(256, 192, 24, 3);
  spec.shared_intermediate = 64;
  spec.shared_sigmoid_gate = true;
  const MoeWeights w = make_weights(spec, DType::kBF16);
  for (const Shares& shares :
       {Shares::of({600, 0}), Shares::of({0, 600}), Shares::of({40, 900, 0, 5})}) {
    const std::int64_t tokens =
        std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
    expect_same_bits(spec, w, batch, shares, all_delays(static_cast<int>(shares.count.size())));
    if (HasFailure()) return;
  }
}

// More ranks than experts: some have none.
TEST_F(LateOnGpu, RanksWithoutExperts) {
  const LayerSpec spec = spec_of(256, 192, 3, 2);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  expect_same_bits(spec, w, routed(spec, 500, 0.9), Shares::even(500, 4), all_delays(4));
}

TEST_F(LateOnGpu, WithACapacity) {
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(fp8 ? 592 : 584, 360, 27, 3);
    spec.capacity_factor = 1;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    for (const CapacityRule rule : {CapacityRule::kSlots, CapacityRule::kTokens}) {
      spec.capacity_rule = rule;
      expect_same_bits(spec, w, routed(spec, 1500, 0.6), Shares::even(1500, 2), all_delays(2));
      if (HasFailure()) return;
    }
  }
}

// Schedules that a caller chooses: pairs of blocks or none, bands, splits (which large passes do
// not have, whatever is asked for).
TEST_F(LateOnGpu, WithSchedulesOfTheCaller) {
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(fp8 ? 592 : 584, 360, 12, 3);
    spec.shared_intermediate = 136;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    const Batch batch = routed(spec, 1200, 0.8);
    for (const Schedule& schedule :
         {Schedule{.paired_rows = 0, .band = 4}, Schedule{.paired_rows = -1, .lag = 1},
          Schedule{.lag = 40, .splits = 4}}) {
      expect_same_bits(spec, w, batch, Shares::even(1200, 2), all_delays(2),
                       {.cuda = {.schedule = schedule}});
      if (HasFailure()) return;
    }
  }
}

// Two ranks, the second 20 ms late: the first does its own rows in the meantime, and the second
// then does the first one's rows before its own. (Ranks on one device may wait for each other's
// launches, so each needs its own.)
TEST_F(LateOnGpu, WorksBeforeTheLateRankComes) {
  if (gpu::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  constexpr std::int64_t kTokens = 2000;
  constexpr std::int64_t kApart = 5'000'000;  // ns, longer than a round
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(512, 512, 16, 2);
    spec.shared_intermediate = 256;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    const Batch batch = routed(spec, kTokens, 1.0);
    const Shares shares = Shares::even(kTokens, 2);
    LayerOptions options{.diagnostics = {.trace = true}};
    for (const bool waits : {false, true}) {
      SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8" : "bf16") << ", waits " << waits);
      options.patience = waits ? kForEver : microseconds(20);
      run_all_ranks(World::threads(2), [&](const World& world) {
        DeviceRank rank(world, spec, w, kTokens, options);
        DeviceBatch share = rank.share(batch, shares);
        pass_late(rank, share, microseconds(0));
        pass_late(rank, share, milliseconds(world.rank() == 1 ? 20 : 0));
        const PassTrace trace = rank.layer().trace();
        std::int64_t first = INT64_MAX, last = 0;
        for (const TraceEvent& event : trace.events) {
          if (event.role != TraceRole::kMath) continue;
          first = std::min(first, event.end_ns);
          last = std::max(last, event.end_ns);
        }
        std::int64_t early_rows = 0, late_rows = 0;  // of second GEMMs
        for (const TraceEvent& event : trace.events) {
          if (event.role != TraceRole::kMath || event.kind != TraceKind::kGemm2) continue;
          if (event.block != 0 || event.expert < 0) continue;
          (event.end_ns < first + kApart ? early_rows : late_rows) += event.rows;
        }
        if (world.rank() == 0) {
          EXPECT_GT(last - first, 2 * kApart);
          EXPECT_EQ(early_rows > 0, !waits);
          EXPECT_GT(late_rows, 0);
        }
        rank.world().barrier();
      });
      if (HasFailure()) return;
    }
  }
}

// A graph keeps its patience, and ranks replay it as they come.
TEST_F(LateOnGpu, InAGraph) {
  LayerSpec spec = spec_of(584, 360, 16, 4);
  spec.shared_intermediate = 136;
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Shares shares = Shares::of({400, 320});
  const Batch batch = random_batch(spec, 720, DType::kBF16, 4);
  LayerOptions options{.patience = kForEver};
  const BatchResult expected = run_on_gpus(spec, w, batch, shares, DType::kBF16, 1, options);
  options.patience = microseconds(20);
  run_all_ranks(World::threads(2), [&](const World& world) {
    DeviceRank rank(world, spec, w, 400, options);
    DeviceBatch share = rank.share(batch, shares);
    gpu::Graph graph =
        gpu::Graph::capture(rank.stream(), [&] { share.enqueue(rank.layer(), rank.stream()); });
    EXPECT_EQ(graph.num_kernel_nodes(), 1);
    share.poison(rank.stream());
    rank.stream().synchronize();
    rank.world().barrier();
    std::mt19937 random(static_cast<unsigned>(world.rank()));
    for (int i = 0; i < 60; ++i) {
      if (random() % 3 == 0) spin_for(microseconds(random() % 800));
      graph.launch(rank.stream());
    }
    rank.stream().synchronize();
    rank.world().barrier();
    EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()));
    EXPECT_EQ(rank.layer().stats().epoch, 60u);
    rank.world().barrier();
  });
}

// A rank that never comes is named, although the others have done what they could.
TEST_F(LateOnGpu, ADeadRankIsNamed) {
  LayerSpec spec = spec_of(584, 360, 16, 4);
  spec.shared_intermediate = 136;
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = random_batch(spec, 600, DType::kBF16, 4);
  const LayerOptions options{.deadline = milliseconds(200), .patience = microseconds(0)};
  for (const int ranks : {2, 3}) {
    const Shares shares = Shares::even(600, ranks);
    for (const int absent : {0, ranks - 1}) {
      SCOPED_TRACE(::testing::Message() << "rank " << absent << " of " << ranks << " is absent");
      expect_absent_is_named(spec, w, batch, shares, absent, options);
      if (HasFailure()) return;
    }
  }
}

// Ranks that differ in patience: some wait, some do not.
TEST_F(LateOnGpu, RanksThatDifferInPatience) {
  const LayerSpec spec = spec_of(584, 360, 16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = routed(spec, 900, 0.8);
  const Shares shares = Shares::even(900, 3);
  const LayerOptions options{.patience = kForEver};
  const BatchResult expected = run_on_gpus(spec, w, batch, shares, DType::kBF16, 1, options);
  for (int patient = 0; patient < 3; ++patient) {
    run_all_ranks(World::threads(3), [&](const World& world) {
      LayerOptions mine = options;
      if (world.rank() != patient) mine.patience = microseconds(10);
      DeviceRank rank(world, spec, w, 300, mine);
      DeviceBatch share = rank.share(batch, shares);
      for (const Delays& late : all_delays(3)) {
        pass_late(rank, share, late[static_cast<std::size_t>(world.rank())]);
        EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()));
        rank.world().barrier();
      }
    });
    if (HasFailure()) return;
  }
}

// Passes of random sizes back to back, in which every rank comes a random time late.
TEST_F(LateOnGpu, SoakOfRandomLatenessAndSizes) {
  constexpr int kRanks = 2, kBatches = 24;
  const std::uint64_t passes = test::number_from("SWITCHYARD_SOAK_FORWARDS", 2000);
  const std::uint64_t seed = test::soak_seed();
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(fp8 ? 592 : 584, 360, 24, 4);
    spec.shared_intermediate = 136;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    std::mt19937_64 random(seed);
    std::vector<Batch> batches;
    std::vector<Shares> shares;
    std::vector<BatchResult> expected;
    const LayerOptions options{.patience = kForEver};
    constexpr int kMostTokens = 900;
    for (int b = 0; b < kBatches; ++b) {
      std::vector<std::int64_t> counts;
      for (int r = 0; r < kRanks; ++r) {
        counts.push_back(random() % 6 == 0 ? 0 : static_cast<std::int64_t>(random() % kMostTokens));
      }
      if (counts[0] + counts[1] == 0) counts[0] = 1;
      shares.push_back(Shares::of(counts));
      batches.push_back(random_batch(spec, counts[0] + counts[1], DType::kBF16,
                                     seed + static_cast<std::uint64_t>(b)));
      expected.push_back(
          run_on_gpus(spec, w, batches.back(), shares.back(), DType::kBF16, 1, options));
    }
    std::atomic<int> different{0};
    run_all_ranks(World::threads(kRanks), [&](const World& world) {
      DeviceRank rank(world, spec, w, kMostTokens, {.patience = microseconds(20)});
      std::vector<std::unique_ptr<DeviceBatch>> mine_of;
      for (int b = 0; b < kBatches; ++b) {
        const auto i = static_cast<std::size_t>(b);
        mine_of.push_back(std::make_unique<DeviceBatch>(rank.share(batches[i], shares[i])));
      }
      rank.world().barrier();
      std::mt19937_64 which(seed), delay(seed + 1 + static_cast<std::uint64_t>(world.rank()));
      for (std::uint64_t n = 0; n < passes; ++n) {
        const std::size_t b = which() % kBatches;
        mine_of[b]->poison(rank.stream());
        if (delay() % 2 == 0) spin_for(microseconds(delay() % 300));
        mine_of[b]->enqueue(rank.layer(), rank.stream());
        if (n % 7 != 0 && n + 1 != passes) continue;
        rank.stream().synchronize();
        rank.world().barrier();  // nobody copies while another's pass is under way
        if (!has_rows_of(mine_of[b]->fetch(), expected[b], shares[b], world.rank())) {
          ++different;
        }
        rank.world().barrier();
      }
      rank.world().barrier();
    });
    EXPECT_EQ(different, 0) << (fp8 ? "fp8" : "bf16");
  }
}

}  // namespace
}  // namespace switchyard::testing
