// Computes a rank's tiles from the rows per expert.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/route/params.h"
#include "gpu/schedule/params.h"
#include "gpu/tile/config.h"
#include "gpu/tile/find_expert.cuh"
#include "gpu/tile/params.h"

namespace switchyard::gpu {

// The numbers of a small pass's rows and tiles, which are at most kMaxOwnSlots and those of the
// shared expert, fit in half a word.
template <typename P>
using TableWord = std::conditional_t<kOwnStart<P>, std::uint16_t, std::uint32_t>;

// Tables in the block's shared memory.
template <typename P>
struct TileTables {
  TableWord<P>* expert_rows;  // [E]
  // [E + 1] the first tile of each of this rank's experts, after the shared expert's tiles. (The
  // experts of other ranks have none here.)
  TableWord<P>* tile_begin;
  TableWord<P>* row_begin;  // [E] the first row of the same, after the shared expert's rows
};
// A pass in which a rank's counts are late may have two rounds. The first has the rows of the
// sources whose counts are here, the second all others; each has tiles, rows and tickets of its
// own, numbered on from the first round's. Between the two, a block's tables are made anew: by
// then its tasks are done, and its pack warp has packed and signalled what it has to. The rows of a
// source are in one round, so all else goes on as if there were one: the ring, slots, flags. Which
// sources are in the first round is the same for all blocks of a rank (PassWords::first_sources()),
// but not for all ranks. Late ranks do others' rows first, which others wait for.
//
// Passes of one rank and passes that wait for all ranks have one round.
struct RoundState {
  std::uint32_t sources;  // a bit for each rank
  std::uint32_t number;   // 0 or 1
  std::uint32_t first_tile, first_row;
  std::uint32_t shared_tile, shared_row;  // the first ones of the shared expert
  bool last;
  bool failed;  // the second was given up before it began
};

struct TileTableState {
  protocol::TokenTiles shared_tiles;
  std::uint32_t max_height;  // of any tile
  std::uint32_t log2_band;   // tiles per band
  std::uint32_t num_rows;    // in this rank's tiles
  RoundState round;
};

template <typename P>
struct TileTable {
  const ModelShape& shape;
  const PartitionParams& partition;
  const ScheduleParams& layer;
  TileTables<P> block;
  TileTableState& state;

  // This rank's experts, tiles and rows. The shared expert's tiles and rows come first.
  __device__ std::uint32_t first_expert() const {
    return P::kOneRank ? 0 : static_cast<std::uint32_t>(partition.first_expert);
  }
  __device__ std::uint32_t local_experts() const {
    return static_cast<std::uint32_t>(P::kOneRank ? shape.num_experts : partition.local_experts);
  }
  __device__ std::uint32_t num_tiles() const {
    return block.tile_begin[first_expert() + local_experts()];
  }
  __device__ std::uint32_t num_rows() const { return state.num_rows; }
  __device__ bool is_shared(std::uint32_t tile) const {
    return tile - shared_tile() < state.shared_tiles.count;
  }
  __device__ bool last_round() const { return P::kOneRank || state.round.last; }
  __device__ std::uint32_t round() const { return P::kOneRank ? 0 : state.round.number; }
  __device__ std::uint32_t first_tile() const { return P::kOneRank ? 0 : state.round.first_tile; }
  __device__ std::uint32_t first_row() const { return P::kOneRank ? 0 : state.round.first_row; }
  __device__ std::uint32_t shared_tile() const { return P::kOneRank ? 0 : state.round.shared_tile; }
  __device__ std::uint32_t shared_row() const { return P::kOneRank ? 0 : state.round.shared_row; }
  // The shared expert's tiles of this round; they come before all others.
  __device__ std::uint32_t shared_of_round() const {
    return shared_tile() == first_tile() ? state.shared_tiles.count : 0;
  }
  // The tiles of an expert, by its number among all ranks' experts.
  __device__ protocol::TokenTiles tiles_of(std::uint32_t expert) const {
    return protocol::TokenTiles(block.expert_rows[expert], P::kTile.token_rows);
  }
  // The place of an expert's row at `position`, if every tile had kMaxHeight rows.
  __device__ static std::uint32_t place_of(const protocol::TokenTiles& cut,
                                           std::uint32_t first_tile, std::uint32_t position) {
    return (first_tile + position / cut.height) * kMaxHeight<P> + position % cut.height;
  }
};

// Computes tile_begin, row_begin and the table's state from the experts' rows of a round. The
// shared expert has `shared_rows` in it. Called by one warp. Loops are not unrolled: the code runs
// once in a pass, and fetching it takes longer than running it.
template <typename P>
__device__ __forceinline__ void place_tiles(const TileTable<P>& table, std::uint32_t shared_rows) {
  using Word = TableWord<P>;
  const TileTables<P>& block = table.block;
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(table.shape.num_experts);
  const std::uint32_t per_lane = protocol::ceil_div(num_experts, 32u);
  const std::uint32_t begin = min(lane * per_lane, num_experts);
  const std::uint32_t end = min(begin + per_lane, num_experts);
  const protocol::TokenTiles shared_tiles(shared_rows, P::kTile.token_rows);
  const auto own_begin = static_cast<std::uint32_t>(table.partition.first_expert);
  const auto own_end = own_begin + static_cast<std::uint32_t>(table.partition.local_experts);
  const auto is_own = [&](std::uint32_t e) {
    return P::kOneRank || (e >= own_begin && e < own_end);
  };
  std::uint32_t tiles = 0, rows = 0, most = shared_tiles.count;
  std::uint32_t height = max(shared_tiles.height, P::kTile.token_rows.least);
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const std::uint32_t rows_here = is_own(e) ? std::uint32_t{block.expert_rows[e]} : 0;
    const protocol::TokenTiles cut(rows_here, P::kTile.token_rows);
    tiles += cut.count;
    rows += cut.rows;
    height = max(height, cut.height);
    most = max(most, cut.count);
    // Store the count for the loop below, so that it need not divide again.
    block.tile_begin[e] = static_cast<Word>(cut.count);
  }
  std::uint32_t tiles_to = tiles, rows_to = rows;  // sums up to this lane's last expert
#pragma unroll 1
  for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other_tiles = __shfl_up_sync(~0u, tiles_to, offset);
    const std::uint32_t other_rows = __shfl_up_sync(~0u, rows_to, offset);
    if (lane >= offset) {
      tiles_to += other_tiles;
      rows_to += other_rows;
    }
  }
  std::uint32_t tile = table.first_tile() + shared_tiles.count + tiles_to - tiles;
  std::uint32_t row = table.first_row() + shared_tiles.rows + rows_to - rows;
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const std::uint32_t count = block.tile_begin[e];
    block.tile_begin[e] = static_cast<Word>(tile);
    tile += count;
    if (is_own(e)) {
      block.row_begin[e] = static_cast<Word>(row);
      row += block.expert_rows[e];
    }
  }
  height = __reduce_max_sync(~0u, height);
  most = __reduce_max_sync(~0u, most);
  if (lane == 31) {
    block.tile_begin[num_experts] = static_cast<Word>(tile);
    table.state.num_rows = row;
    if (P::kOneRank || shared_tiles.count != 0 || table.round() == 0) {
      table.state.shared_tiles = shared_tiles;
      if constexpr (!P::kOneRank) {
        table.state.round.shared_tile = table.first_tile();
        table.state.round.shared_row = table.first_row();
      }
    }
    table.state.max_height = height;
    table.state.log2_band = most > 1 ? table.layer.order.log2_band : 0;
  }
}

}  // namespace switchyard::gpu
