// A task as the scheduler hands it to the other roles.
#pragma once

#include <cstdint>

#include "protocol/task.h"

namespace switchyard::gpu {

using protocol::TaskKind;

struct TileTask {
  TaskKind kind;           // never kDispatch; kNone past the last task
  std::uint32_t units;     // height of the tile in steps of kUnitRows
  std::uint32_t k_blocks;  // stages of the K loop
  std::uint32_t first_k_block;
  std::uint32_t split;      // the part of K, where GEMM2 is split
  std::uint32_t tile;       // for a combine task, the chunk
  std::uint32_t block;      // of output rows
  std::uint32_t rows;       // of the tile
  std::uint32_t first_row;  // of the tile, in its expert
  std::uint32_t expert;     // of this rank
  std::uint32_t shared;     // 1: of the shared expert
  std::uint32_t one_tile;   // 1: no other tile reads these weights
  // 1: the blocks of a pair have different tiles and the same weight rows; 0: they have the same
  // tile.
  std::uint32_t two_tiles;
  std::uint32_t last_parts;  // of the last stage, where stages have several
  // The entries of the tile's rows if there is one rank; null: the rows are the tokens in order.
  const std::uint32_t* list;
};

// The task that roles rehearse before their first: one stage of the first tile's first GEMM, which
// waits for nothing.
constexpr TileTask rehearsed_task() {
  TileTask task{};
  task.kind = TaskKind::kGemm1;
  task.k_blocks = task.last_parts = 1;
  return task;
}

}  // namespace switchyard::gpu
