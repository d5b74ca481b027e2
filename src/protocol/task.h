// The tasks that a pass is made of, and the one order in which every role of both engines takes
// them.
#pragma once

#include <cstdint>

#include "protocol/partition.h"

namespace switchyard::protocol {

// kNone: there is no task, or no further one.
enum class TaskKind : std::uint32_t { kDispatch, kGemm1, kGemm2, kCombine, kNone };

struct Task {
  TaskKind kind;
  std::uint16_t peer;   // kDispatch: the destination rank
  std::uint32_t index;  // kDispatch: chunk; kGemm1, kGemm2: tile; kCombine: chunk
  std::uint32_t block;  // kGemm1, kGemm2: block of output rows within the tile
};

// The work of one rank in one pass.
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
  // Tiles are taken up in bands of 1 << log2_band. Within a band all tiles' tasks for one block of
  // weight rows stand together: an expert's weights, which no cache holds, are read once for its
  // tiles.
  std::uint32_t log2_band = 0;
  // GEMM2 of a band follows GEMM1 of the band `lag` places later, so that the first finds its input
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

  // No band contains both shared and routed tiles.
  SWITCHYARD_HOST_DEVICE std::uint32_t num_bands() const {
    return bands_of(num_shared_tiles) + bands_of(num_routed_tiles);
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t first_tile(std::uint32_t of_band) const {
    const std::uint32_t shared = bands_of(num_shared_tiles);
    const std::uint32_t tile = of_band <= shared
                                   ? least(of_band << log2_band, num_shared_tiles)
                                   : num_shared_tiles + ((of_band - shared) << log2_band);
    return least(tile, num_tiles());
  }
  // The order consists of stages. Stage s has GEMM1 of band s, then GEMM2 of band s - lag.
  SWITCHYARD_HOST_DEVICE std::uint32_t num_stages() const { return num_bands() + lag; }
  // The number of tasks in earlier stages.
  SWITCHYARD_HOST_DEVICE std::uint32_t tasks_before(std::uint32_t stage) const {
    const std::uint32_t tiles1 = first_tile(stage);
    const std::uint32_t tiles2 = stage <= lag ? 0 : first_tile(stage - lag);
    const std::uint32_t shared1 = least(tiles1, num_shared_tiles);
    const std::uint32_t shared2 = least(tiles2, num_shared_tiles);
    return shared1 * shared_gemm1_blocks + (tiles1 - shared1) * routed_gemm1_blocks +
           shared2 * shared_gemm2_blocks + (tiles2 - shared2) * routed_gemm2_blocks;
  }
  SWITCHYARD_HOST_DEVICE Task task_of_stage(std::uint32_t stage, std::uint32_t place) const {
    std::uint32_t tile = first_tile(stage), width = first_tile(stage + 1) - tile;
    const std::uint32_t gemm1 = width == 0 ? 0 : width * gemm1_blocks(tile);
    const bool first = place < gemm1;
    if (!first) {
      place -= gemm1;
      tile = first_tile(stage - lag);
      width = first_tile(stage - lag + 1) - tile;
    }
    const TaskKind kind = first ? TaskKind::kGemm1 : TaskKind::kGemm2;
    if (log2_band == 0) return {kind, 0, tile, place};
    return {kind, 0, tile + place % width, place / width};
  }

 private:
  SWITCHYARD_HOST_DEVICE std::uint32_t bands_of(std::uint32_t tiles) const {
    return (tiles + (1u << log2_band) - 1) >> log2_band;
  }
  // (std::min is not for device code.)
  SWITCHYARD_HOST_DEVICE static std::uint32_t least(std::uint32_t a, std::uint32_t b) {
    return a < b ? a : b;
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
  for (std::uint32_t stage = 0; stage < work.num_stages(); ++stage) {
    const std::uint32_t tasks = work.tasks_before(stage + 1) - work.tasks_before(stage);
    for (std::uint32_t i = 0; i < tasks; ++i) visit(work.task_of_stage(stage, i));
  }
  for (std::uint32_t c = 0; c < work.num_combine_chunks; ++c) {
    visit(Task{TaskKind::kCombine, 0, c, 0});
  }
}

// The task of that place in the order of for_each_task, the dispatch tasks not counted, found
// without walking there: for schedulers that hand out numbers. `place` must be less than
// num_gemm_tasks() + num_combine_chunks.
SWITCHYARD_HOST_DEVICE inline Task tile_task_at(const Workload& work, std::uint32_t place) {
  const std::uint32_t gemm_tasks = work.num_gemm_tasks();
  if (place >= gemm_tasks) return {TaskKind::kCombine, 0, place - gemm_tasks, 0};
  if (work.log2_band == 0) {
    // Until second GEMMs begin, a division finds the task. (A pass waits for its first task.)
    const std::uint32_t of_shared = work.num_shared_tiles * work.shared_gemm1_blocks;
    const bool shared = place < of_shared;
    const std::uint32_t blocks = shared ? work.shared_gemm1_blocks : work.routed_gemm1_blocks;
    const std::uint32_t of_kind = shared ? place : place - of_shared;
    const std::uint32_t tile =
        (shared ? 0 : work.num_shared_tiles) + (blocks == 0 ? 0 : of_kind / blocks);
    if (tile < work.lag && tile < work.num_tiles()) {
      return {TaskKind::kGemm1, 0, tile, of_kind % blocks};
    }
  }
  std::uint32_t low = 0, high = work.num_stages();
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (work.tasks_before(middle) <= place ? low : high) = middle;
  }
  return work.task_of_stage(low, place - work.tasks_before(low));
}

}  // namespace switchyard::protocol
