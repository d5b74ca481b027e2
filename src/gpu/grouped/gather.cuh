// Rows through an index: two warps of a block that stands alone copy them from where they are, 16
// bytes per lane at a time. (A box of one row takes the copy engine as long as a box of many: with
// such boxes calls took two to three times as long, see docs/lab/packing.md.)
#pragma once

#include "gpu/grouped/params.h"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/load.cuh"

namespace switchyard::gpu {

inline constexpr std::uint32_t kIndexWarps = 2, kIndexThreads = 32 * kIndexWarps;
// The arrivals at a full stage, beside those of packed rows: one for each thread's copies.
inline constexpr std::uint32_t kIndexArrivals = kIndexThreads;

// The rows of x that a tile's entries of the index name, or -1. Each warp keeps its half of them.
struct IndexMemory {
  std::int32_t rows[kIndexWarps][kMostTileRows / kIndexWarps];
};

// A tile's entries of the index. One that names no row of x, such as -1, stands for zeros.
struct IndexedRows {
  const GroupedCall& call;
  std::uint32_t first;  // the tile's first entry in the index

  // Entries past the tile's end take the last one's row: behind it there may be nothing.
  __device__ std::int32_t entry(const TileTask& task, std::uint32_t row) const {
    const std::int32_t named = __ldg(call.index_in + first + min(row, task.rows - 1));
    return static_cast<std::uint32_t>(named) < call.x_rows ? named : -1;
  }

  template <typename C>
  struct Scales {
    const float* at[4];
    std::uint32_t absent = 0;  // a bit for each entry that names no row
    __device__ float4 next() {
      const float4 four{__ldg(at[0]++), __ldg(at[1]++), __ldg(at[2]++), __ldg(at[3]++)};
      return {(absent & 1) != 0 ? 0 : four.x, (absent & 2) != 0 ? 0 : four.y,
              (absent & 4) != 0 ? 0 : four.z, (absent & 8) != 0 ? 0 : four.w};
    }
  };
  template <typename C>
  __device__ Scales<C> scales_of(const TileTask& task, std::uint32_t token) const {
    Scales<C> scales;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::int32_t row = entry(task, token + i);
      scales.absent |= std::uint32_t{row < 0} << i;
      scales.at[i] = call.x_scales + max(row, 0) * call.scale_stride + task.first_k_block;
    }
    return scales;
  }
};
template <typename C>
class TileRows<C, IndexedRows> {
 public:
  static constexpr bool kScalesAlone = true;
  __device__ TileRows(const TilePipeline<C>&, const IndexedRows&, const TileTask&) {}
  __device__ void load(std::uint32_t, std::uint32_t, std::uint32_t) const {}
};

// Copies this warp's half of a tile's rows, of all stages. `own`: this warp's rows in IndexMemory.
// Returns false if the call was given up.
template <typename C>
__device__ __forceinline__ bool gather_rows(const TilePipeline<C>& pipeline,
                                            const IndexedRows& tokens, std::uint32_t columns,
                                            const TileTask& task, RingPlace& place,
                                            std::uint32_t warp, std::int32_t* own) {
  // A lane has 16 of the 128 bytes that a row has in a stage.
  constexpr std::uint32_t kLanesOfRow = kStageRowBytes / 16, kRowsAtOnce = 32 / kLanesOfRow;
  static_assert(C::kTile.max_height() <= kMostTileRows);
  // The swizzle repeats after eight rows, so a lane has two places in it.
  static_assert(kRowsAtOnce == 4 && kUnitRows / kIndexWarps % (2 * kRowsAtOnce) == 0);
  const Ring<StageLayout<C>> ring = pipeline.ring();
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t count = task.units * kUnitRows / kIndexWarps, begin = count * warp;
  __syncwarp();  // the previous tile's entries have been used
  for (std::uint32_t i = lane; i < count; i += 32) own[i] = tokens.entry(task, begin + i);
  __syncwarp();
  const std::uint32_t chunk = lane % kLanesOfRow, row = lane / kLanesOfRow;
  const std::uint32_t first_place = swizzled_place(begin + row, chunk);
  const std::uint32_t second_place = swizzled_place(begin + row + kRowsAtOnce, chunk);
  const std::int64_t row_bytes = tokens.call.x_row_bytes;
  const std::uint32_t bytes = columns * C::kNumerics.token_bytes();
  std::uint32_t column = task.first_k_block * kStageRowBytes + 16 * chunk;
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!ring.template await_free<true>(pipeline.waiter(), place)) return false;
    const std::uint32_t full = ring.full_barrier(place.stage);
    const bool inside = column < bytes;
    const auto* const from = static_cast<const std::byte*>(tokens.call.x) + (inside ? column : 0);
    std::uint32_t to = ring.tokens(place.stage);
#pragma unroll 2
    for (std::uint32_t i = row; i < count; i += 2 * kRowsAtOnce) {
      const std::int32_t one = own[i], other = own[i + kRowsAtOnce];
      copy_async(to + first_place, from + max(one, 0) * row_bytes, inside && one >= 0);
      copy_async(to + second_place, from + max(other, 0) * row_bytes, inside && other >= 0);
      to += 2 * kRowsAtOnce * kStageRowBytes;
    }
    arrive_after_copies(full);
    // Arrives for the thread that announces packed rows. In FP8 the thread of the scales does that.
    if (!kJoinedScales<C> && warp == 0 && lane == 0) arrive(full);
    column += kStageRowBytes;
    place.advance(ring.stages);
  }
  return true;
}

}  // namespace switchyard::gpu
