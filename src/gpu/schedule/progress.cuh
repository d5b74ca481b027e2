// What blocks tell each other of tiles: which are packed, and which GEMMs are done.
#pragma once

#include <cstdint>

#include "gpu/pipeline/wait.cuh"
#include "gpu/schedule/rules.h"
#include "gpu/schedule/tiles.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// Additions that tell of a tile when a block has stored its part: see Teller.
template <typename P>
inline constexpr std::uint32_t kTellers = P::kTeller == Teller::kMath ? kMathGroups : 1;

struct alignas(8) WorkState {
  std::uint32_t log2_rows;           // of the weight rows of a task, of a pair's if there are pairs
  std::uint32_t log2_splits;         // of the parts of GEMM2's K, with cells of their own
  std::uint32_t log2_combine_chunk;  // of the tokens of a combine task
};

// Small passes in FP8 of so few rows and columns of h make the codes of h late.
inline constexpr std::uint32_t kLateRows = 8, kLateStages = 8;

template <typename P>
struct Progress {
  Lifetime life;
  const ExpertParams& experts;
  const HiddenParams& hidden;
  const std::uint32_t &tokens, &paired;
  TileTable<P> table;
  const WorkState& work;

  __device__ std::uint32_t* gemm1_done(std::uint32_t tile) const {
    return life.state.words.gemm1_done(table.shape.num_experts) + tile;
  }
  __device__ std::uint32_t* gemm2_done(std::uint32_t tile) const {
    return life.state.words.gemm2_done(table.shape.num_experts, table.layer.max_tiles) + tile;
  }
  // In units of RowPart.
  __device__ std::uint32_t* packed(std::uint32_t tile) const {
    return life.state.words.packed(table.shape.num_experts, table.layer.max_tiles) + tile;
  }
  // In passes whose stored rows become codes, for a group of 128 columns of the tile's h: four bits
  // of the word, which count who has stored a part of it.
  __device__ std::uint32_t* parts_stored(std::uint32_t tile, std::uint32_t group) const {
    return life.state.words.parts_stored(table.shape.num_experts, table.layer.max_tiles) +
           tile * hidden.group_words + group / PassWords::kGroupsOfWord;
  }
  // Tasks that `rows` of weights make for one token tile, of a pair where blocks come in pairs.
  __device__ std::uint32_t tasks(std::uint32_t rows) const {
    return (rows + (1u << work.log2_rows) - 1) >> work.log2_rows;
  }
  __device__ bool gemm1_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm1_done(tile)) >=
           (kTellers<P> * tasks(experts.ffn(table.is_shared(tile)).gemm1_rows)) << paired;
  }
  __device__ bool gemm2_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm2_done(tile)) >=
           (kTellers<P> * tasks(experts.ffn(table.is_shared(tile)).gemm2_rows))
               << paired << work.log2_splits;
  }
  // Whether the tile's h may be written: that of the tile that had its slot is no longer needed.
  __device__ bool h_slot_free(std::uint32_t tile) const {
    return tile < hidden.h_slots || gemm2_complete(tile - hidden.h_slots);
  }
  // Where h is stored in bf16 first: each task of GEMM2 makes its codes for itself, at once. With
  // so few of them that is done before anybody has found out who has stored last.
  __device__ bool quantizes_late() const {
    return kQuantizesStoredRows<P> && tokens <= kLateRows && hidden.h_groups <= kLateStages;
  }
  // The others: the last warpgroup that has stored a part of a group makes its codes, and tells.
  __device__ bool quantizes_together() const {
    return kQuantizesStoredRows<P> && !quantizes_late();
  }
};

// Tells other blocks that this one, or one of its math warpgroups, has stored its part of a tile:
// see kTellers. By a thread that comes after all the stores.
template <typename P>
__device__ __forceinline__ void tell_stored(const Progress<P>& progress, const TileTask& task) {
  add_release_gpu(
      task.work == Work::kGemm1 ? progress.gemm1_done(task.tile) : progress.gemm2_done(task.tile),
      1);
}

// The parts of GEMM2's K in a pass of so many tiles.
template <typename P>
__device__ __forceinline__ std::uint32_t log2_splits(const Progress<P>& progress,
                                                     std::uint32_t tiles,
                                                     std::uint32_t shared_tiles) {
  constexpr int kFewest = 8 * static_cast<int>(kStageColumns<P>);
  const std::uint32_t tasks = tiles * protocol::ceil_div(progress.table.shape.hidden, kTileRows);
  int depth = progress.experts.routed.intermediate;
  if (shared_tiles != 0) depth = min(depth, progress.experts.shared.intermediate);
  return log2_splits(progress.table.layer.order, tasks, depth, kFewest, P::kTile.most_log2_split);
}

}  // namespace switchyard::gpu
