// The experts, tiles and order of tasks of a rank.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kMaxDeviceRanks = 32;  // see ExpertSource

// The kind of pass that a kernel is compiled for. Small passes have at most a policy's kSmallTokens
// and kSmallLogits; with more logits every block's routing takes longer than the barrier that it
// saves. These limits are measured, see docs/decisions/0020.
enum class PassSize { kSmall, kLarge };
// The most token rows of a tile in a low pass, and in one of higher tiles; see LowPass.
inline constexpr int kLowRows = 16, kTallLowRows = 32;
// The parts of the stages of either; see kStageParts. Higher tiles leave room for fewer.
inline constexpr int kLowParts = 4, kTallLowParts = 2;
// The role that tells other blocks that a block has stored its part of a tile. To tell, it must
// first wait until the part has reached the L2 cache, which takes 1 us.
enum class Publisher {
  kScheduler,  // while the math warps work on the next tile
  kMath,       // each warpgroup for itself, at once: for passes in which another block waits for it
  kMathFirst   // the warpgroups for first GEMMs, whose parts they count; the scheduler for others
};

struct PartitionParams {
  // This rank's experts. Weights and tasks number them from 0.
  int first_expert, local_experts;
  int rank_begin[kMaxDeviceRanks + 1];  // each rank's first expert
  std::uint32_t levels;                 // the most experts that a rank has; 1 for one rank
};

// The order of tasks; see protocol::Workload, and rules.h for how it is chosen.
struct TileOrder {
  std::uint32_t log2_band;      // tiles per band, where an expert has several tiles
  std::uint32_t banded_lag;     // the lag with such bands
  std::uint32_t lag;            // the lag where no expert has more than one tile
  std::uint32_t forced_splits;  // of GEMM2's K in small passes: 0: by the rule, else 1 + their log2
};

// Where a large pass's tables of experts are in a block's shared memory, in bytes. See TileTables
// and RankTables.
struct ExpertTables {
  std::uint32_t expert_rows, tile_begin, row_begin, source_begin, send_begin, end;
};
// The tables of so many experts, one after the other.
constexpr ExpertTables place_tables(std::uint32_t begin, int experts) {
  const auto each = static_cast<std::uint32_t>(experts) * 4;
  // An expert of this rank has a word for each rank. A rank has one expert more than another, at
  // most.
  constexpr std::uint32_t kMore = 4 * kMaxDeviceRanks;
  ExpertTables tables{};
  tables.expert_rows = begin;
  tables.tile_begin = tables.expert_rows + each;
  tables.row_begin = tables.tile_begin + each + 4;
  tables.source_begin = tables.row_begin + each;
  tables.send_begin = tables.source_begin + each + kMore;
  tables.end = tables.send_begin + each + kMore + 4;
  return tables;
}

struct ScheduleParams {
  std::uint32_t max_tiles;
  TileOrder order;
};

}  // namespace switchyard::gpu
