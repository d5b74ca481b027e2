// The one vocabulary of work, and the one order in which every role of both engines walks it.
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace switchyard::protocol {

enum class TaskKind : std::uint8_t { kDispatch, kGemm1, kGemm2, kCombine };

struct Task {
  TaskKind kind;
  std::uint16_t peer;   // kDispatch: the destination rank
  std::uint32_t index;  // kDispatch: chunk; kGemm1, kGemm2: tile; kCombine: chunk
  std::uint32_t block;  // kGemm1, kGemm2: block of output rows within the tile
};

// What one rank has to do in one pass.
struct Workload {
  int rank = 0;
  int num_ranks = 1;
  const std::uint32_t* dispatch_chunks = nullptr;  // [num_ranks], per destination
  // Tiles of the shared expert come first: they need no other rank, so they cover the time until
  // the first packets arrive.
  std::uint32_t num_shared_tiles = 0;
  std::uint32_t num_routed_tiles = 0;
  std::uint32_t shared_gemm1_blocks = 0, shared_gemm2_blocks = 0;  // per tile
  std::uint32_t routed_gemm1_blocks = 0, routed_gemm2_blocks = 0;
  std::uint32_t num_combine_chunks = 0;
  // GEMM2 of a tile follows GEMM1 of the tile `lag` places later, so that the first finds its input
  // complete while the weights of the second are on their way.
  std::uint32_t lag = 1;

  SWITCHYARD_HOST_DEVICE std::uint32_t num_tiles() const {
    return num_shared_tiles + num_routed_tiles;
  }
  SWITCHYARD_HOST_DEVICE bool is_shared(std::uint32_t tile) const {
    return tile < num_shared_tiles;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t gemm1_blocks(std::uint32_t tile) const {
    return is_shared(tile) ? shared_gemm1_blocks : routed_gemm1_blocks;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t gemm2_blocks(std::uint32_t tile) const {
    return is_shared(tile) ? shared_gemm2_blocks : routed_gemm2_blocks;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t num_gemm_tasks() const {
    return num_shared_tiles * (shared_gemm1_blocks + shared_gemm2_blocks) +
           num_routed_tiles * (routed_gemm1_blocks + routed_gemm2_blocks);
  }

  // In stage s of the order, GEMM1 of tile s is followed by GEMM2 of tile s - lag.
  SWITCHYARD_HOST_DEVICE std::uint32_t gemm1_tasks_of_stage(std::uint32_t stage) const {
    return stage < num_tiles() ? gemm1_blocks(stage) : 0;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t gemm2_tasks_of_stage(std::uint32_t stage) const {
    return stage >= lag && stage - lag < num_tiles() ? gemm2_blocks(stage - lag) : 0;
  }
};

// Calls visit(Task) for every task of the rank in an order in which no task waits for a later one:
// dispatch (to itself first, then to peers staggered so that no rank is everybody's first target),
// then tiles, with GEMM2 trailing, then combine.
template <typename Visit>
SWITCHYARD_HOST_DEVICE void for_each_task(const Workload& work, Visit&& visit) {
  for (int i = 0; i < work.num_ranks; ++i) {
    const int peer = (work.rank + i) % work.num_ranks;
    for (std::uint32_t c = 0; c < work.dispatch_chunks[peer]; ++c) {
      visit(Task{TaskKind::kDispatch, static_cast<std::uint16_t>(peer), c, 0});
    }
  }
  const std::uint32_t stages = work.num_tiles() + work.lag;
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    for (std::uint32_t b = 0; b < work.gemm1_tasks_of_stage(stage); ++b) {
      visit(Task{TaskKind::kGemm1, 0, stage, b});
    }
    for (std::uint32_t b = 0; b < work.gemm2_tasks_of_stage(stage); ++b) {
      visit(Task{TaskKind::kGemm2, 0, stage - work.lag, b});
    }
  }
  for (std::uint32_t c = 0; c < work.num_combine_chunks; ++c) {
    visit(Task{TaskKind::kCombine, 0, c, 0});
  }
}

// The task of that place in the order of for_each_task, the dispatch tasks not counted, found
// without walking there: for schedulers that hand out numbers. `place` must be less than
// num_gemm_tasks() + num_combine_chunks.
SWITCHYARD_HOST_DEVICE inline Task tile_task_at(const Workload& work, std::uint32_t place) {
  const std::uint32_t tiles = work.num_tiles(), lag = work.lag;
  // All stages between two of these have the same numbers of tasks.
  const std::uint32_t bounds[] = {work.num_shared_tiles, lag, work.num_shared_tiles + lag, tiles,
                                  tiles + lag};
  for (std::uint32_t begin = 0; begin < tiles + lag;) {
    std::uint32_t end = tiles + lag;
    for (const std::uint32_t bound : bounds) end = bound > begin && bound < end ? bound : end;
    const std::uint32_t gemm1 = work.gemm1_tasks_of_stage(begin);
    const std::uint32_t per_stage = gemm1 + work.gemm2_tasks_of_stage(begin);
    if (place < per_stage * (end - begin)) {
      const std::uint32_t stage = begin + place / per_stage, block = place % per_stage;
      if (block < gemm1) return {TaskKind::kGemm1, 0, stage, block};
      return {TaskKind::kGemm2, 0, stage - lag, block - gemm1};
    }
    place -= per_stage * (end - begin);
    begin = end;
  }
  return {TaskKind::kCombine, 0, place, 0};
}

}  // namespace switchyard::protocol
