// The all-to-all problem on GPUs, which ranks share if there are fewer: every rung, and a rank that
// does not come. The stages are those that tests/all_to_all checks on CPU ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "all_to_all/rank.h"
#include "support/on_gpu.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using all_to_all::Case;
using all_to_all::Grids;
using all_to_all::Rank;
using all_to_all::RankOptions;
using all_to_all::StandIn;
using test::kGenerous;
using test::kShort;
using test::run_threads;
using test::with_deadline;

// Streams of ranks that share a GPU need queues of their own. Before the first call of CUDA.
const bool kManyQueues = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

std::unique_ptr<Rank> gpu_rank(const World& world, const Case& problem, RankOptions options = {}) {
  const int gpus = gpu::device_count();
  options.backend = Backend::kCuda;
  options.device = world.rank() % gpus;
  options.ranks_on_device = (world.size() + gpus - 1) / gpus;
  return make_rank(world, problem, options);
}

class GpuAllToAll : public OnGpu<::testing::TestWithParam<int>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GpuAllToAll, ::testing::Values(1, 2, 4, 8));

TEST_P(GpuAllToAll, EveryRungIsRight) {
  const int ranks = GetParam();
  // The smallest and the largest of the test cases, and one whose rows are no power of two.
  for (const std::size_t i : {0u, 3u, 8u}) {
    const Case& problem = all_to_all::test_cases()[i];
    SCOPED_TRACE(name_of(problem));
    run_threads(World::threads(ranks, with_deadline(kGenerous)), [&](World& world) {
      RankOptions options;
      options.stand_in = i == 3 ? StandIn::kRandom : StandIn::kRank;
      const std::unique_ptr<Rank> rank = gpu_rank(world, problem, options);
      std::vector<std::uint16_t> first;
      std::vector<all_to_all::Rung> rungs = all_to_all::ladder();
      rungs.insert(rungs.end(), all_to_all::steps_alone().begin(), all_to_all::steps_alone().end());
      Grids most;
      most.fill(rank->most_blocks());
      for (const all_to_all::Rung& rung : rungs) {
        for (const Grids& grids : {rank->default_grids(), Grids{1, 2, 3, 4, 5}, most}) {
          rank->start(rung.features, grids);
          for (int n = 0; n < 3; ++n) {
            rank->poison();
            if (n == 0) rank->get_ready();
            rank->call();
            const std::vector<std::uint16_t> y = rank->result();
            ASSERT_EQ(fault_of(problem, world.rank(), ranks, options.stand_in, y), "")
                << rung.name << ", call " << n;
            if (first.empty()) first = y;
            ASSERT_EQ(y, first) << rung.name << ", call " << n;
          }
        }
      }
      world.barrier();
    });
  }
}

TEST_P(GpuAllToAll, CallsDoNotLapEachOther) {
  const int ranks = GetParam();
  const Case problem{16, 3, 72, 12, 77};
  run_threads(World::threads(ranks, with_deadline(kGenerous)), [&](World& world) {
    const std::unique_ptr<Rank> rank = gpu_rank(world, problem);
    for (const char* name : {"flag_per_rank", "flag_per_token", "flattened"}) {
      rank->start(all_to_all::find_rungs(name)[0].features, rank->default_grids());
      for (int n = 0; n < 200; ++n) rank->call();
      ASSERT_EQ(fault_of(problem, world.rank(), ranks, StandIn::kRank, rank->result()), "") << name;
    }
    world.barrier();
  });
}

TEST_P(GpuAllToAll, TracesEveryRow) {
  const int ranks = GetParam();
  const Case& problem = all_to_all::test_cases()[6];
  const all_to_all::Traffic traffic = traffic_of(problem, ranks);
  run_threads(World::threads(ranks, with_deadline(kGenerous)), [&](World& world) {
    const std::unique_ptr<Rank> rank = gpu_rank(world, problem);
    rank->start(all_to_all::find_rungs("flattened")[0].features, rank->default_grids());
    all_to_all::CallRecords records;
    rank->call(&records);
    std::int64_t rows = 0, expected = 0;
    for (const all_to_all::Record& record :
         records[static_cast<std::size_t>(all_to_all::Stage::kDispatchReceive)].of_worker) {
      EXPECT_EQ(record.valid, 1u);
      EXPECT_LE(record.begin_ns, record.end_ns);
      rows += record.rows;
    }
    for (int from = 0; from < ranks; ++from) expected += traffic.between(from, world.rank());
    EXPECT_EQ(rows, expected);
    world.barrier();
  });
}

class GpuAllToAllFault : public OnGpu<::testing::TestWithParam<const char*>> {};
INSTANTIATE_TEST_SUITE_P(Rungs, GpuAllToAllFault,
                         ::testing::Values("flag_per_rank", "flag_per_token", "tuned"));

TEST_P(GpuAllToAllFault, ARankThatDoesNotCallIsNamed) {
  const Case problem{8, 2, 64, 9, 5};
  std::vector<World> worlds = World::threads(4, with_deadline(kGenerous));
  std::atomic<int> failed{0};
  run_threads(worlds, [&](World& world) {
    RankOptions options;
    options.deadline = kShort;
    const std::unique_ptr<Rank> rank = gpu_rank(world, problem, options);
    rank->start(all_to_all::find_rungs(GetParam())[0].features, rank->default_grids());
    world.barrier();
    if (world.rank() == 2) {
      test::eventually([&] { return failed == 3; });
    } else {
      test::blame_of(2, [&] { rank->call(); });
      ++failed;
    }
    world.barrier();
  });
  EXPECT_EQ(failed, 3);
}

}  // namespace
}  // namespace switchyard::testing
