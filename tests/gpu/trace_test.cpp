// Traced kernels record all they do, once, in a possible order, and compute the same bits as
// others.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "gpu/device.h"
#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/numbers.h"
#include "trace/clock.h"

namespace switchyard::testing {
namespace {

using TraceTest = OnGpu<::testing::Test>;

LayerSpec traced_spec(int experts, bool shared) {
  LayerSpec spec = spec_of(1024, 768, experts, 4);
  if (shared) spec.shared_intermediate = 384;
  return spec;
}

// [tile, block of weight rows] of a role's tasks of a kind.
std::multiset<std::pair<int, int>> tasks_of(const PassTrace& trace, TraceRole role,
                                            TraceKind kind) {
  std::multiset<std::pair<int, int>> tasks;
  for (const TraceEvent& event : trace.events) {
    if (event.role == role && event.kind == kind) tasks.insert({event.tile, event.block});
  }
  return tasks;
}

// Checks one rank's trace by itself.
void expect_consistent(const PassTrace& trace, std::int64_t not_before, std::int64_t not_after) {
  EXPECT_EQ(trace.dropped, 0);
  ASSERT_FALSE(trace.events.empty());
  // The error of the host's clock against the device's, in ns; see device_clock.h.
  constexpr std::int64_t kTolerance = 5'000;
  std::map<std::pair<int, TraceRole>, std::int64_t> busy_until;
  std::map<int, std::int64_t> first_done, second_done, packed;  // of a tile, the last
  for (const TraceEvent& event : trace.events) {
    EXPECT_LE(event.ready_ns, event.begin_ns);
    EXPECT_LE(event.begin_ns, event.end_ns);
    EXPECT_GE(event.ready_ns, not_before - kTolerance);
    EXPECT_LE(event.end_ns, not_after + kTolerance);
    const auto [at, fresh] = busy_until.insert({{event.unit, event.role}, event.end_ns});
    if (!fresh) {
      EXPECT_GE(event.ready_ns, at->second)
          << "block " << event.unit << ", " << to_string(event.role) << ": "
          << to_string(event.kind);
      at->second = event.end_ns;
    }
    if (event.kind == TraceKind::kPack && event.tile >= 0) {
      packed[event.tile] = std::max(packed[event.tile], event.begin_ns);
    }
    if (event.role != TraceRole::kMath) continue;
    const bool first = event.kind == TraceKind::kGemm1;
    if (!first && event.kind != TraceKind::kGemm2) continue;
    EXPECT_GE(event.products_ns, event.begin_ns);
    EXPECT_LE(event.products_ns, event.end_ns);
    std::int64_t& done = (first ? first_done : second_done)[event.tile];
    done = std::max(done, event.products_ns);
  }
  for (const TraceEvent& event : trace.events) {
    if (event.role != TraceRole::kMath) continue;
    if (event.kind == TraceKind::kGemm1 && packed.contains(event.tile)) {
      EXPECT_GE(event.begin_ns, packed.at(event.tile)) << "tile " << event.tile;
    }
    if (event.kind == TraceKind::kGemm2) {
      ASSERT_TRUE(first_done.contains(event.tile)) << "tile " << event.tile;
      EXPECT_GE(event.begin_ns, first_done.at(event.tile)) << "tile " << event.tile;
    }
  }
}

// Every role went through the same tasks, none of them twice; `rows` of the routed experts' tiles.
void expect_complete(const PassTrace& trace, std::int64_t rows) {
  std::map<int, int> rows_of;  // tiles of routed experts
  for (const TraceKind kind : {TraceKind::kGemm1, TraceKind::kGemm2}) {
    SCOPED_TRACE(to_string(kind));
    const auto done = tasks_of(trace, TraceRole::kMath, kind);
    EXPECT_EQ(std::set(done.begin(), done.end()).size(), done.size()) << "a task was done twice";
    for (const TraceRole role : {TraceRole::kScheduler, TraceRole::kWeights, TraceRole::kTokens}) {
      EXPECT_EQ(tasks_of(trace, role, kind), done) << to_string(role);
    }
  }
  EXPECT_EQ(tasks_of(trace, TraceRole::kScheduler, TraceKind::kCombine),
            tasks_of(trace, TraceRole::kMath, TraceKind::kCombine));
  for (const TraceEvent& event : trace.events) {
    if (event.role == TraceRole::kMath && event.kind == TraceKind::kGemm2 && event.expert >= 0) {
      rows_of[event.tile] = event.rows;
    }
  }
  std::int64_t sum = 0;
  for (const auto& [tile, count] : rows_of) sum += count;
  EXPECT_EQ(sum, rows);
}

TEST_F(TraceTest, EveryTaskOnceInOrderAndTheSameBits) {
  for (const bool fp8 : {false, true}) {
    for (const bool shared : {false, true}) {
      const LayerSpec spec = traced_spec(16, shared);
      const MoeWeights w = generate_weights(spec, fp8 ? kFp8 : DType::kBF16, 3, {});
      for (const int tokens : {1, 20, 900}) {
        SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8" : "bf16") << (shared ? ", shared" : "")
                                          << ", " << tokens << " tokens");
        const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
        const Shares all = Shares::even(tokens, 1);
        const BatchResult plain = run_on_gpus(spec, w, batch, all, DType::kBF16, 1);
        BatchResult traced = empty_result(spec, batch, 1, DType::kBF16);
        run_all_ranks(World::threads(1), [&](const World& world) {
          DeviceRank rank(world, spec, w, 1000, {.diagnostics = {.trace = true}});
          for (std::uint64_t pass = 1; pass <= 3; ++pass) {
            const std::int64_t before = trace::now_ns();
            rank.run(batch, all, traced);
            const std::int64_t after = trace::now_ns();
            EXPECT_TRUE(traced.output == plain.output);
            const PassTrace trace = rank.layer().trace();
            EXPECT_EQ(trace.epoch, pass);
            EXPECT_EQ(trace.rank, 0);
            expect_consistent(trace, before, after);
            expect_complete(trace, std::int64_t{tokens} * spec.top_k);
          }
        });
      }
    }
  }
}

// A rank packs the rows that another rank sends, and not before they were sent. Times are those of
// each rank's own clock.
TEST_F(TraceTest, RowsArePackedAfterTheyAreSent) {
  constexpr int kTokens = 3000;
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks");
    const LayerSpec spec = traced_spec(16, false);
    const MoeWeights w = generate_weights(spec, DType::kBF16, 3, {});
    const Batch batch = random_batch(spec, kTokens, DType::kBF16, 6);
    const Shares shares = Shares::even(kTokens, ranks);
    std::vector<PassTrace> traces(static_cast<std::size_t>(ranks));
    BatchResult result = empty_result(spec, batch, ranks, DType::kBF16);
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      DeviceRank rank(world, spec, w, kTokens, {.diagnostics = {.trace = true}});
      rank.run(batch, shares, result);
      const std::int64_t before = trace::now_ns();
      rank.run(batch, shares, result);
      const std::int64_t after = trace::now_ns();
      PassTrace& trace = traces[static_cast<std::size_t>(world.rank())];
      trace = rank.layer().trace();
      expect_consistent(trace, before, after);
      std::int64_t rows = 0;
      const auto& per_expert = rank.layer().stats().tokens_per_expert;
      const int own = spec.num_experts / ranks;
      for (int e = own * world.rank(); e < own * (world.rank() + 1); ++e) {
        rows += per_expert[static_cast<std::size_t>(e)];
      }
      expect_complete(trace, rows);
    });
    // [source, expert]: the first rows sent, the first packed.
    std::map<std::pair<int, int>, std::int64_t> sent, packed;
    const auto earliest = [](auto& map, std::pair<int, int> key, std::int64_t time) {
      const auto [at, fresh] = map.insert({key, time});
      if (!fresh) at->second = std::min(at->second, time);
    };
    for (const PassTrace& trace : traces) {
      for (const TraceEvent& event : trace.events) {
        if (event.peer < 0) continue;
        if (event.kind == TraceKind::kSend) {
          EXPECT_NE(event.peer, trace.rank);
          earliest(sent, {trace.rank, event.peer}, event.begin_ns);
        } else if (event.kind == TraceKind::kPack) {
          earliest(packed, {event.peer, trace.rank}, event.begin_ns);
        }
      }
    }
    EXPECT_FALSE(packed.empty());
    for (const auto& [ends, time] : packed) {
      SCOPED_TRACE(::testing::Message() << ends.first << " to " << ends.second);
      // (The math warps send the first rows, without saying to whom.)
      if (sent.contains(ends)) {
        EXPECT_LT(sent.at(ends), time);
      }
    }
    EXPECT_FALSE(sent.empty());
  }
}

// A rank that starts late delays the others by as much, and by nothing more.
TEST_F(TraceTest, AStragglerCostsOnlyWhatItIsLate) {
  if (gpu::device_count() < 2) GTEST_SKIP() << "needs two GPUs: ranks on one delay each other";
  constexpr int kRanks = 2, kTokens = 1024;
  constexpr std::chrono::microseconds kLate{2000};
  LayerSpec spec = traced_spec(32, false);
  spec.hidden = spec.intermediate = 2048;
  const MoeWeights w = generate_weights(spec, DType::kBF16, 3, {});
  const Batch batch = random_batch(spec, kTokens, DType::kBF16, 8);
  const Shares shares = Shares::even(kTokens, kRanks);
  // [repeat][late or not][rank]
  constexpr int kRepeats = 5;
  std::array<std::array<std::array<PassTrace, kRanks>, 2>, kRepeats> traces;
  run_all_ranks(World::threads(kRanks), [&](const World& world) {
    DeviceRank rank(world, spec, w, kTokens, {.diagnostics = {.trace = true}});
    DeviceBatch share = rank.share(batch, shares);
    rank.forward(share);
    for (auto& repeat : traces) {
      for (const bool late : {false, true}) {
        // Behind another pass: GPUs or links that have been idle for milliseconds, as while traces
        // are read, take 0.2 ms longer, and so might one of the two.
        rank.forward(share);
        rank.world().barrier();
        const auto start = std::chrono::steady_clock::now() +
                           (late && world.rank() == 1 ? kLate : std::chrono::microseconds(0));
        while (std::chrono::steady_clock::now() < start) {
        }
        share.enqueue(rank.layer(), rank.stream());
        rank.stream().synchronize();
        repeat[late ? 1 : 0][static_cast<std::size_t>(world.rank())] = rank.layer().trace();
      }
    }
  });
  const auto begin_of = [](const PassTrace& trace) {
    return std::ranges::min(trace.events, {}, &TraceEvent::ready_ns).ready_ns;
  };
  const auto end_of = [](const PassTrace& trace) {
    return std::ranges::max(trace.events, {}, &TraceEvent::end_ns).end_ns;
  };
  // From when the last rank has started to when the first is done.
  std::vector<std::int64_t> prompt, behind;
  for (const auto& repeat : traces) {
    for (const bool late : {false, true}) {
      const std::array<PassTrace, kRanks>& ranks = repeat[late ? 1 : 0];
      const std::int64_t started = std::max(begin_of(ranks[0]), begin_of(ranks[1]));
      (late ? behind : prompt).push_back(end_of(ranks[0]) - started);
      if (late) {
        EXPECT_GT(begin_of(ranks[1]) - begin_of(ranks[0]), 1'000'000);
      }
    }
  }
  std::ranges::sort(prompt);
  std::ranges::sort(behind);
  EXPECT_LT(behind[kRepeats / 2], prompt[kRepeats / 2] * 115 / 100 + 10'000);
  RecordProperty("prompt_ns", std::to_string(prompt[kRepeats / 2]));
  RecordProperty("behind_ns", std::to_string(behind[kRepeats / 2]));
}

// Whichever role is slow, on whichever rank: the same bits.
TEST_F(TraceTest, SlowRolesChangeNothing) {
  constexpr TraceRole kRoles[] = {TraceRole::kPass,   TraceRole::kScheduler, TraceRole::kWeights,
                                  TraceRole::kTokens, TraceRole::kSend,      TraceRole::kPack,
                                  TraceRole::kMath};
  constexpr int kRanks = 4, kTokens = 700;
  for (const bool fp8 : {false, true}) {
    const LayerSpec spec = traced_spec(16, true);
    const MoeWeights w = generate_weights(spec, fp8 ? kFp8 : DType::kBF16, 3, {});
    const Batch batch = random_batch(spec, kTokens, DType::kBF16, 7);
    const Shares shares = Shares::of({400, 0, 1, 299});
    const BatchResult plain = run_on_gpus(spec, w, batch, shares, DType::kBF16, 1);
    for (const TraceRole role : kRoles) {
      for (int slow = 0; slow < kRanks; ++slow) {
        SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8, " : "bf16, ") << to_string(role)
                                          << " is slow on rank " << slow);
        BatchResult result = empty_result(spec, batch, kRanks, DType::kBF16);
        run_all_ranks(World::threads(kRanks), [&](const World& world) {
          LayerOptions options{.diagnostics = {.trace = true}};
          if (world.rank() == slow) options.diagnostics.slow_role = SlowRole{role, 200'000};
          DeviceRank rank(world, spec, w, kTokens, options);
          for (int pass = 0; pass < 5; ++pass) rank.run(batch, shares, result);
        });
        EXPECT_TRUE(result.output == plain.output);
      }
    }
  }
}

constexpr TraceRole kStallingRoles[] = {
    TraceRole::kPass, TraceRole::kScheduler, TraceRole::kWeights, TraceRole::kTokens,
    TraceRole::kSend, TraceRole::kPack,      TraceRole::kMath};

// Returns how many ranks report an error in a world in whose rank 0 a role stalls. Three passes are
// enqueued one behind the other: none may begin on what a lost one left. A rank without an error
// must have the results of `right`.
int failed_ranks(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                 const Shares& shares, const BatchResult& right, SlowRole slow,
                 std::chrono::milliseconds deadline) {
  const auto most = static_cast<int>(*std::ranges::max_element(shares.count));
  std::atomic<int> errors = 0;
  run_all_ranks(World::threads(static_cast<int>(shares.count.size())), [&](const World& world) {
    const int r = world.rank();
    LayerOptions options{.deadline = deadline, .diagnostics = {.trace = true}};
    if (r == 0) options.diagnostics.slow_role = slow;
    DeviceRank rank(world, spec, w, most, options);
    DeviceBatch share = rank.share(batch, shares);
    try {
      for (int pass = 0; pass < 3; ++pass) share.enqueue(rank.layer(), rank.stream());
      rank.stream().synchronize();
      rank.layer().stats();
      EXPECT_TRUE(has_rows_of(share.fetch(), right, shares, r));
    } catch (const TimeoutError& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kAborted);
      ++errors;
    }
  });
  return errors;
}

// The rank that stalls is named by all, whatever they wait for as a consequence.
// SWITCHYARD_STOP_TRIALS says how often, SWITCHYARD_STOP_SEED with what.
TEST_F(TraceTest, AStalledRoleIsOfTheRankThatIsNamed) {
  const std::uint64_t trials = test::number_from("SWITCHYARD_STOP_TRIALS", 14);
  const std::uint64_t seed = test::number_from("SWITCHYARD_STOP_SEED", 1);
  const LayerSpec spec = traced_spec(4, true);
  const MoeWeights weights[] = {generate_weights(spec, DType::kBF16, 3, {}),
                                generate_weights(spec, kFp8, 3, {})};
  std::atomic<int> named = 0;
  for (std::uint64_t trial = 0; trial < trials; ++trial) {
    test::Numbers numbers(seed * 1'000'000 + trial);
    const int ranks = numbers.between(2, 4);
    const int victim = numbers.between(0, ranks - 1);
    const bool fp8 = numbers.between(0, 1) == 1;
    const int tokens = numbers.between(ranks, 64);
    const TraceRole role =
        kStallingRoles[numbers.between(0, static_cast<int>(std::size(kStallingRoles)) - 1)];
    SCOPED_TRACE(::testing::Message()
                 << "trial " << trial << " of seed " << seed << ": " << (fp8 ? "fp8, " : "bf16, ")
                 << tokens << " tokens, rank " << victim << " of " << ranks << " stalls in "
                 << to_string(role));
    const Batch batch = random_batch(spec, tokens, DType::kBF16, seed + trial);
    const Shares shares = Shares::even(tokens, ranks);
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      const int r = world.rank();
      LayerOptions options{.deadline = std::chrono::milliseconds(20),
                           .diagnostics = {.trace = true}};
      if (r == victim) options.diagnostics.slow_role = SlowRole{role, 150'000'000};
      DeviceRank rank(world, spec, weights[fp8], tokens, options);
      DeviceBatch share = rank.share(batch, shares);
      rank.world().barrier();
      try {
        share.enqueue(rank.layer(), rank.stream());
        rank.stream().synchronize();
        rank.layer().check();
      } catch (const TimeoutError& error) {
        EXPECT_EQ(error.failure().peer_rank, victim) << error.what();
        EXPECT_EQ(error.failure().epoch, 1u) << error.what();
        ++named;
      }
      rank.world().barrier();
    });
  }
  // One task in sixteen stalls, so in a pass of few tokens often none does: measured, 10 ranks
  // heard of a stall in 14 trials.
  EXPECT_GT(named, static_cast<int>(trials / 4));
}

// Whichever role stalls for longer than the deadline: who waits for it gives up, nobody waits for
// ever, and the process lives. (Nobody may have waited so long for the role that was late.)
TEST_F(TraceTest, AStalledRoleIsAnErrorAndTheProcessLives) {
  for (const bool fp8 : {false, true}) {
    const LayerSpec spec = traced_spec(4, true);
    const MoeWeights w = generate_weights(spec, fp8 ? kFp8 : DType::kBF16, 3, {});
    // Small, large, and large in pairs of blocks; on a rank and on two.
    for (const auto& [tokens, ranks] : {std::pair{24, 1}, {60, 1}, {1500, 1}, {60, 2}, {1500, 2}}) {
      const Batch batch = random_batch(spec, tokens, DType::kBF16, 7);
      const Shares shares = Shares::even(tokens, ranks);
      const BatchResult plain = run_on_gpus(spec, w, batch, shares, DType::kBF16, 1);
      int errors = 0;
      for (const TraceRole role : kStallingRoles) {
        SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8, " : "bf16, ") << tokens << " tokens on "
                                          << ranks << " ranks, " << to_string(role));
        errors += failed_ranks(spec, w, batch, shares, plain, {role, 30'000'000},
                               std::chrono::milliseconds(4));
      }
      EXPECT_GT(errors, 0) << tokens << " tokens on " << ranks << " ranks";
      EXPECT_TRUE(run_on_gpus(spec, w, batch, shares, DType::kBF16, 1).output == plain.output);
    }
  }
}

// Stalls shorter and longer than the deadline, so that roles come back while others are giving up:
// a right result or an error. SWITCHYARD_SOAK_STALLS says how many.
TEST_F(TraceTest, StallsOfAnyLength) {
  const auto stalls = static_cast<int>(test::number_from("SWITCHYARD_SOAK_STALLS", 60));
  const LayerSpec spec = traced_spec(4, true);
  const MoeWeights weights[] = {generate_weights(spec, DType::kBF16, 3, {}),
                                generate_weights(spec, kFp8, 3, {})};
  std::mt19937 random(static_cast<std::mt19937::result_type>(test::soak_seed()));
  int failed = 0, fine = 0;
  for (int i = 0; i < stalls; ++i) {
    const bool fp8 = random() % 2 != 0;
    const int ranks = static_cast<int>(random() % 2) + 1;
    const int tokens = (2 << random() % 10) + static_cast<int>(random() % 100);
    const TraceRole role = kStallingRoles[random() % std::size(kStallingRoles)];
    const std::uint32_t stall = 300'000u << random() % 6;
    const std::chrono::milliseconds deadline(1 << random() % 4);
    SCOPED_TRACE(::testing::Message()
                 << "stall " << i << ": " << (fp8 ? "fp8, " : "bf16, ") << tokens << " tokens on "
                 << ranks << " ranks, " << to_string(role) << " late by " << stall
                 << " ns, deadline " << deadline.count() << " ms");
    const Batch batch = random_batch(spec, tokens, DType::kBF16, random());
    const Shares shares = Shares::even(tokens, ranks);
    const BatchResult plain = run_on_gpus(spec, weights[fp8], batch, shares, DType::kBF16, 1);
    const int errors =
        failed_ranks(spec, weights[fp8], batch, shares, plain, {role, stall}, deadline);
    ++(errors != 0 ? failed : fine);
  }
  if (stalls >= 20) {
    EXPECT_GT(failed, 0);
    EXPECT_GT(fine, 0);
  }
}

TEST_F(TraceTest, OnlyWhatWasAskedForAndCompiled) {
  LayerSpec spec = traced_spec(8, false);
  MoeWeights w = generate_weights(spec, DType::kBF16, 3, {});
  run_all_ranks(World::threads(1), [&](const World& world) {
    const DeviceRank rank(world, spec, w, 10);
    try {
      const_cast<DeviceRank&>(rank).layer().trace();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  });
  spec.activation.kind = ActivationKind::kRelu2;
  w = generate_weights(spec, DType::kBF16, 3, {});
  const LayerOptions options{.backend = Backend::kCuda, .diagnostics = {.trace = true}};
  try {
    const MoeLayer layer(World::threads(1)[0], spec, w, options);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
  }
}

}  // namespace
}  // namespace switchyard::testing
