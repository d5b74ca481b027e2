// Chooses how a call's work is cut by the rows that its experts have: selection inside the launch.
// Every block does it for itself, with one warp, from the same words, so all come to the same
// choice. No block waits for another, and the host reads nothing.
#pragma once

#include "gpu/grouped/rows.cuh"

namespace switchyard::gpu {

// Halves the height of tiles if takes_half() says so, in calls without candidates. Called by one
// warp; afterwards all of it sees `cut`, which is in shared memory.
__device__ __forceinline__ void halve_tiles(const GroupedRows& call, std::uint32_t experts,
                                            std::uint32_t tasks_of_tile, GroupedCut& cut) {
  const protocol::TileShape half = half_as_high(cut.tile);
  std::uint32_t tiles = 0;
#pragma unroll 1
  for (std::uint32_t e = threadIdx.x % 32; e < experts; e += 32) {
    const std::uint32_t before = e == 0 ? 0 : end_of_rows(call, e - 1);
    tiles += protocol::TokenTiles(end_of_rows(call, e) - before, half).count;
  }
  tiles = __reduce_add_sync(~0u, tiles);
  __syncwarp();  // all lanes have read the old height
  if (takes_half(tiles, tasks_of_tile, gridDim.x) && threadIdx.x % 32 == 0) cut.tile = half;
  __syncwarp();
}

// Chooses the cut from the call's candidates. Called by one warp; afterwards all of it sees `cut`,
// which is in shared memory. Lanes first take the experts, each for all heights, and then the
// candidates. A lane's first candidate is loaded before the rows are: neither is in this block's
// cache yet, so the two waits become one.
__device__ __forceinline__ void choose_cut(const GroupedCall& call, const ChoiceRule& rule,
                                           int experts, GroupedCut& cut) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(experts);
  const auto load = [&](std::uint32_t i) {
    const auto* const words =
        reinterpret_cast<const uint4*>(call.candidates + min(i, call.num_candidates - 1));
    struct alignas(16) Words {
      uint4 of[3];
    };
    return __builtin_bit_cast(Candidate, Words{{__ldg(words), __ldg(words + 1), __ldg(words + 2)}});
  };
  Candidate mine = load(lane);
  std::uint32_t tiles[kMostHeights], experts_with_rows = 0, most_rows = 0;
#pragma unroll
  for (std::uint32_t h = 0; h < kMostHeights; ++h) tiles[h] = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < num_experts; first += 32) {
    const std::uint32_t e = first + lane;
    const std::uint32_t end = e < num_experts ? end_of_rows(call, e) : 0;
    std::uint32_t before = __shfl_up_sync(~0u, end, 1);
    if (lane == 0) before = e == 0 ? 0 : end_of_rows(call, e - 1);
    const std::uint32_t rows = e < num_experts ? end - before : 0;
    experts_with_rows += rows != 0 ? 1 : 0;
    most_rows = max(most_rows, rows);
#pragma unroll
    for (std::uint32_t h = 0; h < kMostHeights; ++h) tiles[h] += rule.heights.tiles(h, rows);
  }
  experts_with_rows = __reduce_add_sync(~0u, experts_with_rows);
  most_rows = __reduce_max_sync(~0u, most_rows);
  // Lane h gets the tiles of height h and the rows of the highest. (A register cannot be indexed, a
  // lane can.)
  std::uint32_t of_lane = 0, highest_of_lane = 0;
#pragma unroll
  for (std::uint32_t h = 0; h < kMostHeights; ++h) {
    const std::uint32_t all = __reduce_add_sync(~0u, tiles[h]);
    if (lane == h) {
      of_lane = all;
      highest_of_lane = min(most_rows, rule.heights.rows[h]);
    }
  }
  Candidate best = mine;
  float least = INFINITY;
#pragma unroll 1
  for (std::uint32_t first = 0; first < call.num_candidates; first += 32) {
    if (first != 0) mine = load(first + lane);
    const ExpertWork work{__shfl_sync(~0u, of_lane, mine.height), experts_with_rows,
                          __shfl_sync(~0u, highest_of_lane, mine.height)};
    const float time = predicted_us(mine, work, rule);
    // (Past the last candidate a lane has that one again, which changes nothing.)
    if (!is_better(time, mine.entry, least, best.entry)) continue;
    best = mine;
    least = time;
  }
  std::uint32_t entry = best.entry, from = lane;
#pragma unroll 1
  for (std::uint32_t offset = 16; offset != 0; offset /= 2) {
    const float other_time = __shfl_xor_sync(~0u, least, offset);
    const std::uint32_t other_entry = __shfl_xor_sync(~0u, entry, offset),
                        other_from = __shfl_xor_sync(~0u, from, offset);
    if (!is_better(other_time, other_entry, least, entry)) continue;
    least = other_time;
    entry = other_entry;
    from = other_from;
  }
  if (lane == 0 && blockIdx.x == 0 && call.chosen != nullptr) {
    *call.chosen = static_cast<std::int32_t>(entry);
  }
  if (lane == from) cut = best.cut();
  __syncwarp();
}

}  // namespace switchyard::gpu
