// The CPU engine's record of a pass, compared with what the pass had to do.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "cpu/thread_trace.h"
#include "model/errors.h"
#include "protocol/partition.h"
#include "protocol/task.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

constexpr int kTokens = 523;

LayerSpec spec_with_shared_expert() {
  LayerSpec spec = spec_of(96, 600, 12, 3);  // more than one block of weight rows
  spec.shared_intermediate = 80;
  return spec;
}

struct Traced {
  std::vector<PassTrace> traces;  // of the last of two passes
  std::vector<ForwardStats> stats;
  std::vector<std::int32_t> ids;
};

Traced run_traced(const LayerSpec& spec, int ranks, int threads) {
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 3, {.num_threads = 1});
  const Batch batch{Matrix::random(kTokens, spec.hidden, DType::kBF16, 5), {}, {}, {}};
  const Shares shares = Shares::even(kTokens, ranks);
  BatchResult result = empty_result(spec, batch, ranks, DType::kBF16);
  Traced traced;
  traced.traces.resize(static_cast<std::size_t>(ranks));
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    LayerOptions options{.cpu = {.num_threads = threads}, .diagnostics = {.trace = true}};
    options.patience = std::chrono::hours(1);  // every expert's rows are placed together
    MoeLayer layer(world, spec, weights, options);
    for (int pass = 0; pass < 2; ++pass) {
      forward_share(layer, batch, shares, world.rank(), result);
    }
    traced.traces[static_cast<std::size_t>(world.rank())] = layer.trace();
  });
  traced.stats = result.stats;
  traced.ids = result.ids;
  return traced;
}

std::vector<TraceEvent> of_kind(const PassTrace& trace, TraceKind kind) {
  std::vector<TraceEvent> events;
  for (const TraceEvent& e : trace.events) {
    if (e.kind == kind) events.push_back(e);
  }
  return events;
}

struct WorldShape {
  int ranks, threads;
};

class EveryWorld : public ::testing::TestWithParam<WorldShape> {
 protected:
  int ranks() const { return GetParam().ranks; }
  std::int64_t tokens_of(int rank) const {
    return Shares::even(kTokens, ranks()).count[static_cast<std::size_t>(rank)];
  }
  protocol::ExpertPartition experts() const { return {spec_.num_experts, ranks()}; }
  // Tokens of `source` with an expert on `target`.
  std::int64_t tokens_for(int source, int target) const {
    const Shares shares = Shares::even(kTokens, ranks());
    const std::int64_t first = shares.first[static_cast<std::size_t>(source)];
    std::int64_t tokens = 0;
    for (std::int64_t t = first; t < first + tokens_of(source); ++t) {
      const auto begin = traced_.ids.begin() + t * spec_.top_k;
      tokens += std::any_of(begin, begin + spec_.top_k,
                            [&](std::int32_t e) { return experts().owner(e) == target; });
    }
    return tokens;
  }

  // Experts on `target` that tokens of `source` have.
  std::set<std::int32_t> experts_for(int source, int target) const {
    const Shares shares = Shares::even(kTokens, ranks());
    const std::int64_t first = shares.first[static_cast<std::size_t>(source)] * spec_.top_k;
    std::set<std::int32_t> found;
    for (std::int64_t i = first; i < first + tokens_of(source) * spec_.top_k; ++i) {
      const std::int32_t e = traced_.ids[static_cast<std::size_t>(i)];
      if (experts().owner(e) == target) found.insert(e);
    }
    return found;
  }

  LayerSpec spec_ = spec_with_shared_expert();
  Traced traced_ = run_traced(spec_, GetParam().ranks, GetParam().threads);
};

TEST_P(EveryWorld, TellsThePass) {
  for (int r = 0; r < ranks(); ++r) {
    const PassTrace& trace = traced_.traces[static_cast<std::size_t>(r)];
    EXPECT_EQ(trace.rank, r);
    EXPECT_EQ(trace.num_ranks, ranks());
    EXPECT_EQ(trace.epoch, 2u);
    EXPECT_EQ(trace.dropped, 0);
    std::int64_t gated = 0;
    for (const TraceEvent& e : of_kind(trace, TraceKind::kGate)) gated += e.rows;
    EXPECT_EQ(gated, tokens_of(r));
    std::int64_t last = 0;
    for (const TraceKind kind : {TraceKind::kRoute, TraceKind::kCounts, TraceKind::kPlan}) {
      const std::vector<TraceEvent> events = of_kind(trace, kind);
      ASSERT_EQ(events.size(), 1u) << to_string(kind);
      EXPECT_EQ(events[0].role, TraceRole::kPass);
      EXPECT_GE(events[0].begin_ns, last) << to_string(kind);
      last = events[0].end_ns;
    }
  }
}

TEST_P(EveryWorld, EveryTaskIsThereOnce) {
  const protocol::TileShape shape = protocol::TileShape{};
  for (int r = 0; r < ranks(); ++r) {
    const PassTrace& trace = traced_.traces[static_cast<std::size_t>(r)];
    using Key = std::tuple<TraceKind, std::int32_t, std::int32_t>;
    std::map<Key, int> times;
    std::map<std::int32_t, std::set<std::int32_t>> blocks1, blocks2;
    std::map<std::int32_t, std::pair<std::int32_t, std::int32_t>> tiles;  // expert and rows
    for (const TraceEvent& e : trace.events) {
      if (e.role != TraceRole::kMath || e.kind == TraceKind::kSignal) continue;
      ++times[{e.kind, e.tile, e.block}];
      if (e.kind == TraceKind::kCombine) continue;
      (e.kind == TraceKind::kGemm1 ? blocks1 : blocks2)[e.tile].insert(e.block);
      const auto [at, first] = tiles.try_emplace(e.tile, e.expert, e.rows);
      EXPECT_EQ(at->second, std::pair(e.expert, e.rows)) << "tile " << e.tile;
    }
    for (const auto& [key, count] : times) EXPECT_EQ(count, 1) << to_string(std::get<0>(key));

    // The tiles that follow from the routing.
    std::vector<std::pair<std::int32_t, std::int32_t>> expected;
    const protocol::TokenTiles shared(static_cast<std::uint32_t>(tokens_of(r)), {32, 32});
    for (std::uint32_t j = 0; j < shared.count; ++j) {
      expected.emplace_back(-1, shared.end(j) - shared.begin(j));
    }
    for (int e = experts().begin(r); e < experts().end(r); ++e) {
      const auto rows = static_cast<std::uint32_t>(
          traced_.stats[0].tokens_per_expert[static_cast<std::size_t>(e)]);
      const protocol::TokenTiles of_expert(rows, shape);
      for (std::uint32_t j = 0; j < of_expert.count; ++j) {
        expected.emplace_back(e, of_expert.end(j) - of_expert.begin(j));
      }
    }
    ASSERT_EQ(tiles.size(), expected.size());
    std::size_t routed_blocks = 0;
    for (const auto& [tile, what] : tiles) {
      EXPECT_EQ(what, expected[static_cast<std::size_t>(tile)]) << "tile " << tile;
      // Blocks are numbered from 0, and there are as many for every tile of a kind.
      EXPECT_EQ(*blocks1[tile].rbegin() + 1, static_cast<int>(blocks1[tile].size()));
      EXPECT_EQ(blocks2[tile], std::set<std::int32_t>{0});  // 96 weight rows
      if (what.first >= 0) {
        EXPECT_GE(blocks1[tile].size(), 2u);
        if (routed_blocks == 0) routed_blocks = blocks1[tile].size();
        EXPECT_EQ(blocks1[tile].size(), routed_blocks);
      }
    }
    std::int64_t combined = 0;
    for (const TraceEvent& e : of_kind(trace, TraceKind::kCombine)) combined += e.rows;
    EXPECT_EQ(combined, tokens_of(r));
  }
}

TEST_P(EveryWorld, SendsAreTheRowsOfTheRouting) {
  for (int r = 0; r < ranks(); ++r) {
    std::map<std::int32_t, std::int64_t> rows;
    for (const TraceEvent& e :
         of_kind(traced_.traces[static_cast<std::size_t>(r)], TraceKind::kSend)) {
      EXPECT_EQ(e.role, TraceRole::kSend);
      EXPECT_LE(e.rows, 64);
      rows[e.peer] += e.rows;
      EXPECT_EQ(e.rows == 0, e.expert >= 0);
      if (e.rows == 0) {
        EXPECT_EQ(experts().owner(e.expert), e.peer);
      }
    }
    // A rank's own tokens stay where they are.
    for (int d = 0; d < ranks(); ++d) {
      EXPECT_EQ(rows[d], d == r ? 0 : tokens_for(r, d)) << r << " to " << d;
    }
  }
}

TEST_P(EveryWorld, OthersAreToldOnceOfWhatIsTheirs) {
  for (int r = 0; r < ranks(); ++r) {
    const PassTrace& trace = traced_.traces[static_cast<std::size_t>(r)];
    std::map<std::int32_t, std::set<std::int32_t>> sent, finished;  // experts, by rank
    std::set<std::pair<std::int32_t, std::int32_t>> words;
    for (const TraceEvent& e : of_kind(trace, TraceKind::kSend)) {
      if (e.rows == 0) sent[e.peer].insert(e.expert);
    }
    for (const TraceEvent& e : of_kind(trace, TraceKind::kSignal)) {
      EXPECT_EQ(e.role, TraceRole::kMath);
      EXPECT_TRUE(words.emplace(e.peer, e.tile).second) << "twice of tile " << e.tile;
      finished[e.peer].insert(e.expert);
    }
    EXPECT_FALSE(sent.contains(r));
    EXPECT_FALSE(finished.contains(r));
    for (int other = 0; other < ranks(); ++other) {
      if (other == r) continue;
      EXPECT_EQ(sent[other], experts_for(r, other)) << r << " to " << other;
      EXPECT_EQ(finished[other], experts_for(other, r)) << r << " to " << other;
    }
  }
}

TEST_P(EveryWorld, EventsOfAUnitAndRoleAreInOrder) {
  for (const PassTrace& trace : traced_.traces) {
    std::map<std::pair<std::int32_t, TraceRole>, std::int64_t> end_of_role;
    for (const TraceEvent& e : trace.events) {
      EXPECT_GE(e.unit, 0);
      EXPECT_LT(e.unit, GetParam().threads);
      EXPECT_LE(e.ready_ns, e.begin_ns);
      EXPECT_LE(e.begin_ns, e.end_ns);
      std::int64_t& end = end_of_role[{e.unit, e.role}];
      EXPECT_GE(e.ready_ns, end) << to_string(e.kind);
      end = e.end_ns;
    }
    // A thread plays all roles, and one at a time.
    std::map<std::int32_t, std::vector<TraceEvent>> threads;
    for (const TraceEvent& e : trace.events) threads[e.unit].push_back(e);
    for (const auto& [unit, events] : threads) {
      for (std::size_t i = 1; i < events.size(); ++i) {
        EXPECT_GE(events[i].ready_ns, events[i - 1].end_ns);
      }
    }
  }
}

TEST_P(EveryWorld, NothingBeginsBeforeWhatItNeeds) {
  for (int r = 0; r < ranks(); ++r) {
    const PassTrace& trace = traced_.traces[static_cast<std::size_t>(r)];
    std::map<std::int32_t, std::int64_t> first_gemm1, last_gemm1, last_begin_gemm1;
    std::map<std::int32_t, std::int32_t> expert_of;
    for (const TraceEvent& e : of_kind(trace, TraceKind::kGemm1)) {
      const auto [at, first] = first_gemm1.try_emplace(e.tile, e.begin_ns);
      at->second = std::min(at->second, e.begin_ns);
      last_gemm1[e.tile] = std::max(last_gemm1[e.tile], e.end_ns);
      expert_of[e.tile] = e.expert;
    }
    for (const auto& [tile, begin] : first_gemm1) {
      std::int64_t& last = last_begin_gemm1[expert_of[tile]];
      last = std::max(last, begin);
    }
    for (const TraceEvent& e : of_kind(trace, TraceKind::kGemm2)) {
      EXPECT_GE(e.begin_ns, last_gemm1[e.tile]) << "tile " << e.tile;
    }
    for (int s = 0; s < ranks(); ++s) {
      if (s == r) continue;
      std::map<std::int32_t, std::int64_t> told;  // of an expert: the last time
      std::int64_t first_send = 0;
      for (const TraceEvent& e :
           of_kind(traced_.traces[static_cast<std::size_t>(s)], TraceKind::kSend)) {
        if (e.peer != r) continue;
        if (e.rows > 0 && first_send == 0) first_send = e.begin_ns;
        if (e.rows == 0) told[e.expert] = std::max(told[e.expert], e.end_ns);
      }
      for (const auto& [expert, time] : told) {
        EXPECT_GT(time, first_send);
        // The last tile of an expert needs the last of the rows.
        EXPECT_GE(last_begin_gemm1[expert], time) << "expert " << expert << " of rank " << s;
      }
      // 32 tokens have experts on every rank.
      std::int64_t first_word = std::numeric_limits<std::int64_t>::max();
      for (const TraceEvent& e :
           of_kind(traced_.traces[static_cast<std::size_t>(s)], TraceKind::kSignal)) {
        if (e.peer == r) first_word = std::min(first_word, e.end_ns);
      }
      for (const TraceEvent& e : of_kind(trace, TraceKind::kCombine)) {
        if (e.rows == 32) {
          EXPECT_GE(e.begin_ns, first_word);
        }
      }
    }
  }
}

TEST_P(EveryWorld, WaitsAreForWhomTheyMayBe) {
  for (const PassTrace& trace : traced_.traces) {
    for (const TraceEvent& e : trace.events) {
      const bool remote = e.wait == TraceWait::kCounts || e.wait == TraceWait::kDispatch ||
                          e.wait == TraceWait::kCombine;
      if (!remote || e.kind == TraceKind::kSend) continue;
      EXPECT_GE(e.peer, 0);
      EXPECT_LT(e.peer, ranks());
      // Another thread may have placed the rows that this one waited for.
      if (e.wait == TraceWait::kCounts && GetParam().threads == 1) {
        EXPECT_EQ(e.kind, TraceKind::kPlan);
      }
    }
    if (ranks() == 1) {
      EXPECT_TRUE(of_kind(trace, TraceKind::kSignal).empty());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Trace, EveryWorld,
                         ::testing::Values(WorldShape{1, 1}, WorldShape{1, 3}, WorldShape{2, 2},
                                           WorldShape{4, 1}, WorldShape{4, 2}),
                         [](const ::testing::TestParamInfo<WorldShape>& world) {
                           return std::to_string(world.param.ranks) + "_ranks_of_" +
                                  std::to_string(world.param.threads);
                         });

TEST(CpuTrace, WithoutTheOptionIsRefused) {
  LayerSpec spec = spec_with_shared_expert();
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 3, {.num_threads = 1});
  MoeLayer layer(World::single(), spec, weights, {.max_tokens = 8, .cpu = {.num_threads = 1}});
  EXPECT_ERROR(layer.trace(), kInvalidArgument, "the option trace");
  MoeLayer traced(World::single(), spec, weights,
                  {.max_tokens = 8, .cpu = {.num_threads = 1}, .diagnostics = {.trace = true}});
  EXPECT_TRUE(traced.trace().events.empty());  // no pass yet
}

TEST(CpuTrace, WhatHasNoRoomIsCounted) {
  cpu::ThreadTrace trace(4, 3);
  for (int i = 0; i < 5; ++i) {
    trace.begin({TraceKind::kGemm1, TraceRole::kMath});
    trace.end(i);
  }
  ASSERT_EQ(trace.events().size(), 3u);
  EXPECT_EQ(trace.events().back().rows, 2);
  EXPECT_EQ(trace.events().back().unit, 4);
  EXPECT_EQ(trace.dropped(), 2);
  trace.clear();
  EXPECT_EQ(trace.dropped(), 0);
  EXPECT_TRUE(trace.events().empty());
}

TEST(CpuTrace, WordsEndTheEventOfTheirTask) {
  cpu::ThreadTrace trace(0, 10);
  TraceEvent gemm2{TraceKind::kGemm2, TraceRole::kMath, TraceWait::kInput};
  gemm2.tile = 3;
  gemm2.rows = 70;
  trace.set_free();
  trace.begin(gemm2);
  trace.complete();
  trace.set_subject(TraceKind::kSignal, 1, 3, 9, 70);
  trace.set_subject(TraceKind::kSignal, 2, 3, 9, 70);
  trace.end();
  ASSERT_EQ(trace.events().size(), 3u);
  const TraceEvent &task = trace.events()[0], &first = trace.events()[1],
                   &second = trace.events()[2];
  EXPECT_EQ(task.kind, TraceKind::kGemm2);
  EXPECT_EQ(task.rows, 70);
  EXPECT_EQ(task.wait, TraceWait::kInput);
  EXPECT_GE(task.end_ns, task.begin_ns);
  EXPECT_EQ(first.begin_ns, task.end_ns);
  EXPECT_EQ(first.peer, 1);
  EXPECT_EQ(first.wait, TraceWait::kNothing);
  EXPECT_EQ(second.begin_ns, first.end_ns);
  EXPECT_EQ(second.peer, 2);
  EXPECT_GE(trace.free_since_ns(), second.end_ns);
}

}  // namespace
}  // namespace switchyard::testing
