// The progress of tiles that blocks publish to each other: which are packed, and which GEMMs are
// done.
#pragma once

#include <cstdint>

#include "gpu/pipeline/wait.cuh"
#include "gpu/schedule/rules.h"
#include "gpu/schedule/tiles.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// True if math warpgroups tell that they have stored their parts of tiles, and the number of
// additions by which a block tells it: see Publisher.
template <typename P>
__device__ constexpr bool math_publishes(TaskKind kind) {
  return P::kPublisher == Publisher::kMath ||
         (P::kPublisher == Publisher::kMathFirst && kind == TaskKind::kGemm1);
}
template <typename P>
__device__ constexpr std::uint32_t publishers(TaskKind kind) {
  return math_publishes<P>(kind) ? kMathGroups : 1;
}

struct alignas(8) WorkState {
  std::uint32_t log2_rows;           // weight rows of a task, of a pair's task if there are pairs
  std::uint32_t log2_splits;         // parts of GEMM2's K, which have cells of their own
  std::uint32_t log2_combine_chunk;  // tokens of a combine task
};

// The limits of quantizes_late(): most tokens, and most groups of 128 columns of h.
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
  // Counts the packed rows of the tile, in units of RowPart.
  __device__ std::uint32_t* packed(std::uint32_t tile) const {
    return life.state.words.packed(table.shape.num_experts, table.layer.max_tiles) + tile;
  }
  // Counts the stored parts of a group of 128 columns of the tile's h, in four bits of the word; or
  // all parts of the tile's h, in the first group's word, where they share a scale. Only passes
  // that quantize stored rows use it.
  __device__ std::uint32_t* parts_stored(std::uint32_t tile, std::uint32_t group) const {
    return life.state.words.parts_stored(table.shape.num_experts, table.layer.max_tiles) +
           tile * hidden.group_words + group / PassWords::kGroupsOfWord;
  }
  // The tasks that `rows` of weights make for one token tile; with pairs, tasks of a pair.
  __device__ std::uint32_t tasks(std::uint32_t rows) const {
    return (rows + (1u << work.log2_rows) - 1) >> work.log2_rows;
  }
  __device__ bool gemm1_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm1_done(tile)) >=
           (publishers<P>(TaskKind::kGemm1) * tasks(experts.ffn(table.is_shared(tile)).gemm1_rows))
               << paired;
  }
  __device__ bool gemm2_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm2_done(tile)) >=
           (publishers<P>(TaskKind::kGemm2) * tasks(experts.ffn(table.is_shared(tile)).gemm2_rows))
               << paired << work.log2_splits;
  }
  // True if the tile's h may be written: the tile that used the slot before no longer needs it.
  __device__ bool h_slot_free(std::uint32_t tile) const {
    return tile < hidden.h_slots || gemm2_complete(tile - hidden.h_slots);
  }
  // True if each task of GEMM2 quantizes the h that it needs from bf16, for itself and at once.
  // With so little h this takes less time than finding out which warpgroup stored last.
  __device__ bool quantizes_late() const {
    return kQuantizesStoredRows<P> && !kRowScales<P> && kGathers<P> && tokens <= kLateRows &&
           hidden.h_groups <= kLateStages;
  }
  // True if the last warpgroup that stores a part of what shares a scale quantizes all of it, and
  // tells of it.
  __device__ bool quantizes_together() const {
    return kQuantizesStoredRows<P> && !quantizes_late();
  }
};

// Tells other blocks that this one, or one of its math warpgroups, has stored its part of a tile:
// see publishers(). Called by one thread, ordered after all the stores.
template <typename P>
__device__ __forceinline__ void publish_stored(const Progress<P>& progress, const TileTask& task) {
  add_release_gpu(task.kind == TaskKind::kGemm1 ? progress.gemm1_done(task.tile)
                                                : progress.gemm2_done(task.tile),
                  1);
}

// log2 of the parts of GEMM2's K in a pass of so many tiles.
template <typename P>
__device__ __forceinline__ std::uint32_t log2_splits(const Progress<P>& progress,
                                                     std::uint32_t tiles,
                                                     std::uint32_t shared_tiles) {
  constexpr int kFewest = 8 * static_cast<int>(kPartColumns<P>);
  const std::uint32_t tasks = tiles * protocol::ceil_div(progress.table.shape.hidden, kTileRows);
  int depth = progress.experts.routed.intermediate;
  if (shared_tiles != 0) depth = min(depth, progress.experts.shared.intermediate);
  return log2_splits(progress.table.layer.order, tasks, depth, kFewest, P::kTile.most_log2_split);
}

}  // namespace switchyard::gpu
