#include "protocol/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace switchyard::protocol {
namespace {

TEST(TaskOrder, EveryTaskOnceAndNoneBeforeWhatItWaitsFor) {
  for (std::uint32_t shared = 0; shared < 3; ++shared) {
    for (std::uint32_t routed = 0; routed < 6; ++routed) {
      for (const auto& [lag, log2_band] : {std::pair(0u, 0u),
                                           {1u, 0u},
                                           {2u, 0u},
                                           {50u, 0u},
                                           {0u, 1u},
                                           {1u, 1u},
                                           {2u, 1u},
                                           {1u, 2u},
                                           {3u, 3u}}) {
        const std::vector<std::uint32_t> chunks = {2, 0, 3};
        const Workload work{.rank = 1,
                            .num_ranks = 3,
                            .dispatch_chunks = chunks.data(),
                            .num_shared_tiles = shared,
                            .num_routed_tiles = routed,
                            .shared_gemm1_blocks = 3,
                            .shared_gemm2_blocks = 2,
                            .routed_gemm1_blocks = 4,
                            .routed_gemm2_blocks = 5,
                            .num_combine_chunks = 4,
                            .log2_band = log2_band,
                            .lag = lag};
        std::map<std::tuple<TaskKind, int, std::uint32_t, std::uint32_t>, int> position;
        int count = 0;
        for_each_task(work, [&](const Task& task) {
          ASSERT_TRUE(
              position
                  .emplace(std::tuple(task.kind, int{task.peer}, task.index, task.block), count++)
                  .second);
        });
        ASSERT_EQ(count, static_cast<int>(5 + shared * 5 + routed * 9 + 4));
        ASSERT_EQ(work.num_gemm_tasks(), shared * 5 + routed * 9);
        for (const auto& [key, at] : position) {
          if (at < 5) continue;  // dispatch
          const Task task = tile_task_at(work, static_cast<std::uint32_t>(at) - 5);
          ASSERT_EQ(std::tuple(task.kind, int{task.peer}, task.index, task.block), key) << at;
        }
        int last_dispatch = -1, first_combine = count, last_gemm2 = -1;
        std::map<std::uint32_t, int> last_gemm1, first_gemm2;
        for (const auto& [key, at] : position) {
          const auto [kind, peer, index, block] = key;
          if (kind == TaskKind::kDispatch) last_dispatch = std::max(last_dispatch, at);
          if (kind == TaskKind::kCombine) first_combine = std::min(first_combine, at);
          if (kind == TaskKind::kGemm1) last_gemm1[index] = std::max(last_gemm1[index], at);
          if (kind == TaskKind::kGemm2) {
            last_gemm2 = std::max(last_gemm2, at);
            const auto [where, fresh] = first_gemm2.emplace(index, at);
            if (!fresh) where->second = std::min(where->second, at);
          }
        }
        for (const auto& [tile, at] : last_gemm1) {
          ASSERT_GT(at, last_dispatch);
          ASSERT_GT(first_gemm2.at(tile), at);
        }
        ASSERT_GT(first_combine, last_gemm2);
      }
    }
  }
}

TEST(TaskOrder, TilesOfABandShareWeightRows) {
  const std::uint32_t no_chunks = 0;
  Workload work;
  work.dispatch_chunks = &no_chunks;
  work.num_shared_tiles = 3;
  work.num_routed_tiles = 5;
  work.shared_gemm1_blocks = work.routed_gemm1_blocks = 2;
  work.shared_gemm2_blocks = work.routed_gemm2_blocks = 1;
  work.log2_band = 1;
  const std::vector<std::pair<std::uint32_t, std::uint32_t>> tiles_and_blocks = {
      {0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {4, 0},
      {3, 1}, {4, 1}, {5, 0}, {6, 0}, {5, 1}, {6, 1}, {7, 0}, {7, 1}};
  std::vector<std::pair<std::uint32_t, std::uint32_t>> seen;
  for_each_task(work, [&](const Task& task) {
    if (task.kind == TaskKind::kGemm1) seen.emplace_back(task.index, task.block);
  });
  EXPECT_EQ(seen, tiles_and_blocks);
}

TEST(TaskOrder, DispatchStartsAtHomeAndIsStaggered) {
  const std::vector<std::uint32_t> chunks = {1, 1, 1, 1};
  for (int rank = 0; rank < 4; ++rank) {
    const Workload work{.rank = rank, .num_ranks = 4, .dispatch_chunks = chunks.data()};
    std::vector<int> peers;
    for_each_task(work, [&](const Task& task) { peers.push_back(task.peer); });
    EXPECT_EQ(peers, (std::vector<int>{rank, (rank + 1) % 4, (rank + 2) % 4, (rank + 3) % 4}));
  }
}

}  // namespace
}  // namespace switchyard::protocol
