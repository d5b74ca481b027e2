// Rows through an index, by the copy engine: a box of one row for each. The swizzle goes by the
// address in shared memory, so a row comes to lie as it would in a box of many.
#pragma once

#include "gpu/grouped/params.h"
#include "gpu/tile/load.cuh"

namespace switchyard::gpu {

// Two warps ask for the rows of a tile, each for half of those that the block loads: asking is what
// takes time. The first one announces the bytes and, in FP8, stores the scales.
inline constexpr std::uint32_t kIndexWarps = 2;

struct IndexMemory {
  std::int32_t rows[kIndexWarps][kMostTileRows / kIndexWarps];
};

// The rows that a tile's entries of the index name. An entry that names no row of x, such as -1,
// stands for zeros.
struct IndexedRows {
  const GroupedCall& call;
  std::uint32_t first;  // the tile's first entry in the index
  std::uint32_t warp;   // below kIndexWarps
  std::int32_t* own;    // in shared memory, of this warp

  // Entries past the tile's end take the last one's row: behind it there may be nothing.
  __device__ std::int32_t entry(const TileTask& task, std::uint32_t row) const {
    return __ldg(call.index_in + first + min(row, task.rows - 1));
  }

  template <typename C>
  struct Scales {
    const float* at[4];
    std::uint32_t absent = 0;  // a bit for each entry that names no row
    __device__ float4 next() {
      const auto scale = [&](int i) {
        const float value = __ldg(at[i]++);
        return (absent >> i & 1) != 0 ? 0.0f : value;
      };
      return {scale(0), scale(1), scale(2), scale(3)};
    }
  };
  template <typename C>
  __device__ Scales<C> scales_of(const TileTask& task, std::uint32_t token) const {
    Scales<C> scales;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::int32_t row = entry(task, token + i);
      const bool absent = static_cast<std::uint32_t>(row) >= call.x_rows;
      scales.absent |= std::uint32_t{absent} << i;
      scales.at[i] = call.x_scales + (absent ? 0 : row) * call.scale_stride + task.first_k_block;
    }
    return scales;
  }
};

// Made by a whole warp; load() is called by one thread of it.
template <typename C>
class TileRows<C, IndexedRows> {
 public:
  __device__ TileRows(const TilePipeline<C>& pipeline, const IndexedRows& tokens,
                      const TileTask& task)
      : map_(tokens.call.row_map),
        paired_(C::kTile.cluster != 1 && pipeline.paired != 0 && !with_two_tiles<C>(task)),
        own_(shared_address(tokens.own)) {
    static_assert(C::kTile.max_height() <= kMostTileRows);
    const std::uint32_t share = paired_ ? rank_in_pair() : 0, shares = paired_ ? kPair : 1;
    const std::uint32_t begin = task.units * share / shares * kUnitRows;
    const std::uint32_t rows = task.units * (share + 1) / shares * kUnitRows - begin;
    begin_ = begin + rows / kIndexWarps * tokens.warp;
    count_ = rows / kIndexWarps;
    __syncwarp();  // the previous tile's entries have been used
    for (std::uint32_t i = threadIdx.x % 32; i < count_; i += 32) {
      tokens.own[i] = tokens.entry(task, begin_ + i);
    }
    __syncwarp();
  }
  __device__ void load(std::uint32_t to, std::uint32_t full, std::uint32_t k) const {
    static_assert(kUnitRows / kIndexWarps % 4 == 0);
    to += begin_ * kStageRowBytes;
#pragma unroll 1
    for (std::uint32_t i = 0; i < count_; i += 4) {
      const uint4 rows = load_shared_vector(own_ + 4 * i);
      const std::uint32_t four[] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (const std::uint32_t row : four) {
        load_rows(map_, to, full, static_cast<int>(k), static_cast<int>(row), paired_);
        to += kStageRowBytes;
      }
    }
  }

 private:
  const CUtensorMap& map_;
  bool paired_;
  std::uint32_t own_;
  std::uint32_t begin_, count_;  // this warp's rows of the tile
};

// Loads this warp's rows of all stages of a tile. Returns false if the call was given up.
template <typename C>
__device__ __forceinline__ bool load_indexed_tile(const TilePipeline<C>& pipeline,
                                                  const IndexedRows& tokens, const TileTask& task,
                                                  RingPlace& place) {
  const Ring<StageLayout<C>> ring = pipeline.ring();
  const TileRows<C, IndexedRows> rows(pipeline, tokens, task);
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!ring.template await_free<true>(pipeline.waiter(), place)) return false;
    if (elect()) {
      const std::uint32_t full = ring.full_barrier(place.stage);
      if (tokens.warp == 0) {
        arrive_expect_bytes(full, task.units * kUnitBytes);
      } else {
        arrive(full);
      }
      rows.load(ring.tokens(place.stage), full, (task.first_k_block + kb) * kStageColumns<C>);
    }
    __syncwarp();
    place.advance(ring.stages);
  }
  return true;
}

}  // namespace switchyard::gpu
