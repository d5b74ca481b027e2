// The all-to-all problem on CPU ranks: every rung and every combination of its steps, by which the
// kernels' logic is checked, too: both backends compile the same stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>

#include "all_to_all/rank.h"
#include "all_to_all/stages.h"
#include "base/convert.h"
#include "support/ranks.h"

namespace switchyard::all_to_all {
namespace {

using test::error_of;
using test::kAtOnce;
using test::kGenerous;
using test::kShort;
using test::run_threads;
using test::with_deadline;
using ::testing::HasSubstr;
using ::testing::TestWithParam;
using ::testing::Values;

// ---------------------------------------------------------------------------------------- problem

TEST(AllToAllProblem, HasTheProblemsCases) {
  EXPECT_EQ(test_cases().size(), 9u);
  EXPECT_EQ(benchmark_cases().size(), 5u);
  std::vector<Case> all = test_cases();
  all.insert(all.end(), benchmark_cases().begin(), benchmark_cases().end());
  for (const Case& problem : all) {
    for (const int ranks : {1, 2, 4, 8}) EXPECT_NO_THROW(require_playable(problem, ranks));
    for (int rank = 0; rank < 8; ++rank) {
      const Routing routing = routing_of(problem, rank);
      EXPECT_GE(routing.num_tokens, 1);
      EXPECT_LT(routing.num_tokens, problem.max_tokens);
      ASSERT_EQ(routing.ids.size(), static_cast<std::size_t>(routing.num_tokens * problem.top_k));
      for (int t = 0; t < routing.num_tokens; ++t) {
        const auto begin = routing.ids.begin() + t * problem.top_k;
        const std::set<int> distinct(begin, begin + problem.top_k);
        EXPECT_EQ(distinct.size(), static_cast<std::size_t>(problem.top_k));
        EXPECT_GE(*distinct.begin(), 0);
        EXPECT_LT(*distinct.rbegin(), problem.num_experts);
      }
      EXPECT_EQ(tokens_of(problem, rank).size(),
                static_cast<std::size_t>(routing.num_tokens * problem.hidden));
    }
  }
}

TEST(AllToAllProblem, CountsItsTraffic) {
  const Case problem = benchmark_cases()[2];
  const Traffic traffic = traffic_of(problem, 4);
  std::int64_t rows = 0, slots = 0, of_experts = 0;
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) rows += traffic.between(from, to);
    slots += static_cast<std::int64_t>(routing_of(problem, from).ids.size());
  }
  for (const std::int64_t count : traffic.expert_rows) of_experts += count;
  EXPECT_EQ(rows, slots);
  EXPECT_EQ(of_experts, slots);
  EXPECT_GT(traffic.busiest(), slots / 4 / 2);
  EXPECT_LT(traffic.busiest(), slots);
  EXPECT_EQ(traffic_of(problem, 1).busiest(), 0);
}

TEST(AllToAllProblem, RefusesWhatCannotBePlayed) {
  const auto invalid = ErrorCode::kInvalidArgument;
  EXPECT_THAT(error_of(invalid, [] { require_playable(test_cases()[0], 3); }),
              HasSubstr("3 ranks do not divide 8 experts"));
  EXPECT_THAT(error_of(invalid,
                       [] {
                         require_playable({8, 9, 64, 4, 1}, 2);
                       }),
              HasSubstr("9 of 8 experts"));
  EXPECT_THAT(error_of(invalid,
                       [] {
                         require_playable({8, 2, 60, 4, 1}, 2);
                       }),
              HasSubstr("H is 60"));
}

TEST(AllToAllProblem, KnowsARightResultFromWrongOnes) {
  const Case problem{8, 2, 16, 6, 11};
  const Routing routing = routing_of(problem, 1);
  const std::vector<std::uint16_t> x = tokens_of(problem, 1);
  // 16 experts' shares of 2 ranks: every expert multiplies by 1 or 2.
  std::vector<std::uint16_t> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    float sum = 0;
    for (std::size_t k = 0; k < 2; ++k) {
      const std::size_t slot = i / 16 * 2 + k;
      sum += routing.weights[slot] * (routing.ids[slot] < 4 ? 1.0f : 2.0f) * f16_to_f32(x[i]);
    }
    y[i] = f32_to_f16(sum);
  }
  EXPECT_EQ(fault_of(problem, 1, 2, StandIn::kRank, y), "");
  EXPECT_NE(fault_of(problem, 1, 2, StandIn::kRandom, y), "");
  EXPECT_NE(fault_of(problem, 0, 2, StandIn::kRank, y), "");
  std::vector<std::uint16_t> wrong = y;
  wrong.back() = 0xffff;
  EXPECT_THAT(fault_of(problem, 1, 2, StandIn::kRank, wrong), HasSubstr("column 15"));
  wrong = y;
  wrong[3] = f32_to_f16(f16_to_f32(wrong[3]) * 1.02f + 0.01f);
  EXPECT_THAT(fault_of(problem, 1, 2, StandIn::kRank, wrong), HasSubstr("token 0, column 3"));
}

// ------------------------------------------------------------------------------------------ rungs

TEST(AllToAllRungs, AreNamedAndEachTakesOneStepMore) {
  std::vector<std::string> names;
  for (const Rung& rung : find_rungs("all")) names.push_back(rung.name);
  EXPECT_THAT(names, ::testing::ElementsAre("host", "flag_per_rank", "flag_per_token", "fused",
                                            "epochs", "flattened", "tuned"));
  EXPECT_EQ(find_rungs("fused,epochs_alone").size(), 2u);
  EXPECT_FALSE(find_rungs("epochs_alone")[0].features.fused);
  EXPECT_TRUE(find_rungs("epochs")[0].features.fused);
  EXPECT_EQ(find_rungs("alone").size(), 6u);
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [] { find_rungs("fused,quick"); }),
              ::testing::AllOf(HasSubstr("'quick' is no rung"), HasSubstr("flattened_alone")));
}

// --------------------------------------------------------------------------- how work is dealt out

struct Place {
  int block, blocks, warp, warps;
};

// Every row of every group falls to one worker, for any grid.
TEST(AllToAllWork, EveryRowIsOneWorkers) {
  const std::vector<std::uint32_t> counts = {5, 0, 17, 1, 0, 64, 3};
  const int groups = static_cast<int>(counts.size());
  for (const int blocks : {1, 2, 3, 6, 7, 8, 13, 14, 40}) {
    for (const int warps : {1, 4}) {
      std::vector<std::vector<int>> grouped(counts.size()), listed(counts.size());
      for (std::size_t g = 0; g < counts.size(); ++g) {
        grouped[g].resize(counts[g]);
        listed[g].resize(counts[g]);
      }
      std::uint32_t most = 0;
      for (int block = 0; block < blocks; ++block) {
        for (int warp = 0; warp < warps; ++warp) {
          const Place place{block, blocks, warp, warps};
          const auto count_of = [&](int g) { return counts[static_cast<std::size_t>(g)]; };
          std::uint32_t mine = 0;
          deal_rows(place, false, groups, count_of, [&](int g, std::uint32_t i) {
            return ++grouped[static_cast<std::size_t>(g)][i], true;
          });
          deal_rows(place, true, groups, count_of, [&](int g, std::uint32_t i) {
            ++mine;
            return ++listed[static_cast<std::size_t>(g)][i], true;
          });
          most = std::max(most, mine);
        }
      }
      for (std::size_t g = 0; g < counts.size(); ++g) {
        EXPECT_THAT(grouped[g], ::testing::Each(1)) << blocks << " blocks, group " << g;
        EXPECT_THAT(listed[g], ::testing::Each(1)) << blocks << " blocks, group " << g;
      }
      // In equal parts.
      EXPECT_EQ(most, static_cast<std::uint32_t>((90 + blocks * warps - 1) / (blocks * warps)));
    }
  }
}

// ------------------------------------------------------------------------------------------- ranks

void play(const Case& problem, int ranks, const std::vector<Features>& all, StandIn stand_in,
          int calls, int blocks) {
  std::vector<World> worlds = World::threads(ranks, with_deadline(kGenerous));
  // Each rank's: rungs differ in what they do, not in what comes out.
  std::vector<std::vector<std::uint16_t>> first(static_cast<std::size_t>(ranks));
  run_threads(worlds, [&](World& world) {
    RankOptions options;
    options.stand_in = stand_in;
    const std::unique_ptr<Rank> rank = make_rank(world, problem, options);
    Grids grids;
    grids.fill(blocks);
    for (const Features& features : all) {
      rank->start(features, grids);
      for (int i = 0; i < calls; ++i) {
        rank->poison();
        rank->call();
        const std::vector<std::uint16_t> y = rank->result();
        EXPECT_EQ(fault_of(problem, world.rank(), world.size(), stand_in, y), "");
        std::vector<std::uint16_t>& expected = first[static_cast<std::size_t>(world.rank())];
        if (expected.empty()) expected = y;
        EXPECT_EQ(y, expected) << "call " << i;
      }
    }
    world.barrier();
  });
}

std::vector<Features> features_of(const std::vector<Rung>& rungs) {
  std::vector<Features> all;
  for (const Rung& rung : rungs) all.push_back(rung.features);
  return all;
}

TEST(AllToAllRanks, EveryRungOnTheProblemsTests) {
  int i = 0;
  for (const Case& problem : test_cases()) {
    SCOPED_TRACE(name_of(problem));
    const int ranks[] = {8, 4, 2, 1};
    play(problem, ranks[i % 4], features_of(ladder()),
         i % 2 == 0 ? StandIn::kRank : StandIn::kRandom, 2, 1 + i % 3);
    ++i;
  }
}

// Calls follow each other without any barrier between, so windows are used again and again.
class AllToAllSteps : public TestWithParam<int> {};
TEST_P(AllToAllSteps, EveryCombinationOfSteps) {
  std::vector<Features> all = {ladder()[0].features};
  for (unsigned bits = 0; bits < 16; ++bits) {
    Features features;
    features.flag_per_token = (bits & 1) != 0;
    features.fused = (bits & 2) != 0;
    features.epochs = (bits & 4) != 0;
    features.flattened = (bits & 8) != 0;
    all.push_back(features);
  }
  play({16, 3, 72, 12, 77}, GetParam(), all, StandIn::kRandom, 5, 2);
}
INSTANTIATE_TEST_SUITE_P(Sizes, AllToAllSteps, Values(1, 2, 4, 8),
                         [](const auto& of) { return std::to_string(of.param) + "_ranks"; });

TEST(AllToAllRanks, CallsDoNotLapEachOther) {
  const Case problem{8, 2, 40, 9, 5};
  run_threads(World::threads(4, with_deadline(kGenerous)), [&](World& world) {
    const std::unique_ptr<Rank> rank = make_rank(world, problem, {});
    for (const char* name : {"flag_per_rank", "flattened", "flag_per_token_alone"}) {
      rank->start(find_rungs(name)[0].features, rank->default_grids());
      for (int i = 0; i < 200; ++i) {
        rank->call();
        if (i % 20 != 0) continue;
        ASSERT_EQ(fault_of(problem, world.rank(), 4, StandIn::kRank, rank->result()), "")
            << name << ", call " << i;
      }
    }
    world.barrier();
  });
}

TEST(AllToAllRanks, TraceTellsWhatEveryWorkerDid) {
  const Case problem = test_cases()[5];
  std::vector<World> worlds = World::threads(2, with_deadline(kGenerous));
  const Traffic traffic = traffic_of(problem, 2);
  run_threads(worlds, [&](World& world) {
    const std::unique_ptr<Rank> rank = make_rank(world, problem, {});
    Grids grids;
    grids.fill(4);
    rank->start(ladder()[5].features, grids);
    CallRecords records;
    const CallTimes times = rank->call(&records);
    EXPECT_GT(times.total_us, 0);
    EXPECT_EQ(times.stage_us[static_cast<std::size_t>(Stage::kExperts)], 0);
    const auto rows_of = [&](Stage stage) {
      std::int64_t rows = 0;
      for (const Record& record : records[static_cast<std::size_t>(stage)].of_worker) {
        EXPECT_EQ(record.valid, 1u);
        EXPECT_LE(record.begin_ns, record.end_ns);
        rows += record.rows;
      }
      return rows;
    };
    const int me = world.rank();
    EXPECT_EQ(rows_of(Stage::kDispatchSend), traffic.between(me, 0) + traffic.between(me, 1));
    EXPECT_EQ(rows_of(Stage::kDispatchReceive), traffic.between(0, me) + traffic.between(1, me));
    EXPECT_EQ(rows_of(Stage::kCombineSend), traffic.between(0, me) + traffic.between(1, me));
    EXPECT_EQ(rows_of(Stage::kCombineReceive), routing_of(problem, me).num_tokens);
    // Flattened: no worker receives a row more than another.
    std::uint32_t least = ~0u, most = 0;
    for (const Record& record :
         records[static_cast<std::size_t>(Stage::kDispatchReceive)].of_worker) {
      least = std::min(least, record.rows);
      most = std::max(most, record.rows);
    }
    EXPECT_LE(most - least, 1u);
    world.barrier();
  });
}

// ------------------------------------------------------------------------------------------ faults

class AllToAllFault : public TestWithParam<const char*> {};
TEST_P(AllToAllFault, ARankThatDoesNotCallIsNamed) {
  const Case problem{8, 2, 64, 9, 5};
  std::vector<World> worlds = World::threads(3 + 1, with_deadline(kGenerous));
  std::atomic<int> failed{0};
  run_threads(worlds, [&](World& world) {
    const std::unique_ptr<Rank> rank = make_rank(world, problem, {.deadline = kShort});
    rank->start(find_rungs(GetParam())[0].features, rank->default_grids());
    world.barrier();
    const auto start = test::Clock::now();
    if (world.rank() == 2) {
      while (failed < 3 && test::since(start) < kGenerous) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } else {
      test::blame_of(
          2, [&] { rank->call(); }, "signal");
      EXPECT_LT(test::since(start), kAtOnce);
      ++failed;
    }
    world.barrier();
  });
  EXPECT_EQ(failed, 3);
}
INSTANTIATE_TEST_SUITE_P(Rungs, AllToAllFault,
                         Values("flag_per_rank", "flag_per_token", "epochs", "tuned"));

TEST(AllToAllRanks, RefusesBadUse) {
  std::vector<World> worlds = World::threads(1);
  const std::unique_ptr<Rank> rank = make_rank(worlds[0], Case{8, 2, 64, 9, 5}, RankOptions{});
  const auto invalid = ErrorCode::kInvalidArgument;
  EXPECT_THAT(error_of(invalid, [&] { rank->call(); }), HasSubstr("start()"));
  Grids grids = rank->default_grids();
  grids[3] = 0;
  EXPECT_THAT(error_of(invalid, [&] { rank->start({}, grids); }),
              ::testing::AllOf(HasSubstr("0 blocks"), HasSubstr("1 to 4")));
  grids[3] = 5;
  EXPECT_THAT(error_of(invalid, [&] { rank->start({}, grids); }), HasSubstr("5 blocks"));
}

}  // namespace
}  // namespace switchyard::all_to_all
