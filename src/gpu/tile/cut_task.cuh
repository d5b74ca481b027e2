// Cuts tasks out of an expert's products, for the layer's scheduler and for GroupedGemm.
#pragma once

#include "gpu/ptx/cluster.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// A tile of an expert, and the part of its products that a task computes.
struct TileCut {
  protocol::TokenTiles tiles;  // of the expert
  std::uint32_t first_tile;    // the number of the expert's first tile
  std::uint32_t tile;          // among the expert's
  std::uint32_t of_band;       // the tile's place in its band
  std::uint32_t band;          // the tiles of a band
  // The block of weight rows (in pairs, of the pair's weight rows) << log2_splits | the part of K.
  std::uint32_t part;
  std::uint32_t k_blocks;  // stages of the whole K
  std::uint32_t log2_splits;
  std::uint32_t k_parts = 0;  // parts of all stages, where stages have several
};

// Gives a task the rows, the weight rows and the part of K that this block computes. The kind, the
// expert and the list of rows are the caller's. Without pairs, or in the first block of a pair,
// `share` is 0, in the second it is 1.
//
// A gradient of weights sums over rows of tokens, so its tasks would cut `k_blocks` out of them.
template <typename C>
__device__ __forceinline__ void cut_task(TileTask& task, const TileCut& cut, std::uint32_t paired,
                                         std::uint32_t share) {
  std::uint32_t tile = cut.tile;
  task.split = cut.part & ((1u << cut.log2_splits) - 1);
  task.block = (cut.part >> cut.log2_splits << paired) + share;
  if constexpr (kPairsTiles<C>) {
    const protocol::TilePair pair(cut.tiles, tile, cut.of_band, cut.band, kInstructionRows + 1);
    // Two tiles together load 64 KB a stage for the pair. One tile with twice the weight rows would
    // load 80 KB.
    if (paired != 0 && pair.two) {
      // This block of weight rows has a task for each of the two tiles. Each of these tasks now
      // does half of the rows for both tiles, one tile per block of the pair.
      task.two_tiles = 1;
      task.block += tile - pair.first - share;
      tile = pair.first + share;
    }
  }
  task.tile = cut.first_tile + tile;
  task.first_row = cut.tiles.begin(tile);
  task.rows = cut.tiles.end(tile) - task.first_row;
  task.units = protocol::ceil_div(task.rows, kUnitRows);
  task.one_tile = cut.tiles.count == 1 ? 1 : 0;
  task.first_k_block = cut.k_blocks * task.split >> cut.log2_splits;
  const std::uint32_t end = cut.k_blocks * (task.split + 1) >> cut.log2_splits;
  task.k_blocks = end - task.first_k_block;
  if constexpr (kStageParts<C> != 1) {
    task.last_parts = min(cut.k_parts - (end - 1) * kStageParts<C>, kStageParts<C>);
  }
}

}  // namespace switchyard::gpu
