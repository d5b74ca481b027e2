// Rows in any order, by Blackwell's copy engine: a token source for load_tile() and a row sink for
// gemm_tile(). Never run: see blackwell/gather4.cuh. gemm_tile() itself is Hopper's, because its
// matrix instruction (WGMMA) is not there on Blackwell.
#pragma once

#include "blackwell/gather4.cuh"
#include "gpu/ptx/convert.cuh"
#include "gpu/tile/load.cuh"
#include "gpu/tile/store.cuh"

namespace switchyard::gpu {

inline constexpr std::uint32_t kRowsOfGather = 4;

// Tokens where they are, in the order of an index. They need no copy in that order.
struct IndexedTokens {
  const CUtensorMap& map;     // rows_map() over all tokens, in boxes of one row
  const std::int32_t* index;  // of the tile's first row: the token that each row is

  // Rows past the tile's end take the last one's token: behind it there may be no index.
  __device__ int4 four(std::uint32_t row, std::uint32_t rows) const {
    const auto at = [&](std::uint32_t i) { return __ldg(index + min(row + i, rows - 1)); };
    return {at(0), at(1), at(2), at(3)};
  }
};

// Loads tokens for load_tile(), without scales, and only for blocks that stand alone: in pairs
// gather4 would have to load into both.
template <typename C>
class TileRows<C, IndexedTokens> {
 public:
  __device__ TileRows(const TilePipeline<C>&, const IndexedTokens& tokens, const TileTask& task)
      : tokens_(tokens), units_(task.units), rows_(task.rows) {
    static_assert(!kScaled<C>, "scales of tokens would have to be gathered, too");
    static_assert(C::kTile.cluster == 1, "pairs load for each other");
  }
  __device__ void load(std::uint32_t to, std::uint32_t full, std::uint32_t k) const {
#pragma unroll 1
    for (std::uint32_t row = 0; row < units_ * kUnitRows; row += kRowsOfGather) {
      gather4(tokens_.map, to, full, static_cast<int>(k), tokens_.four(row, rows_));
      to += kRowsOfGather * kStageRowBytes;
    }
  }

 private:
  const IndexedTokens tokens_;
  std::uint32_t units_, rows_;
};

// Stores each row of a weight-major tile in a place of its own, in bf16.
template <typename C>
struct ScatteredRows {
  const CUtensorMap& map;     // rows_map() over the output, in boxes of one row
  const std::int32_t* index;  // of the tile's first row: each row's place; -1: it is not stored
  std::int32_t nowhere;       // a row of the map for what is not stored
  std::uint32_t columns;      // of the output
  std::byte (*staging)[kStagingBytes<C>];
  const TileTask& task;

  __device__ void started() {}
  __device__ void multiplied() {}

  template <int N>
  __device__ __forceinline__ void finish(float (&acc)[N / 2]) {
    constexpr std::uint32_t kTokens = C::kStagedTokens, kVectors = 8;
    static_assert(kTokens % 16 == 0 && N % kTokens == 0);
    const std::uint32_t group = math_group(), base = shared_address(staging[group]);
    const Staging<kTokens, kVectors> staged{base};
    const std::uint32_t thread = reread_thread_index<kWarpgroup>();
    const std::uint32_t warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    const std::uint32_t column = (task.block * kMathGroups + group) * kInstructionRows;
#pragma unroll
    for (std::uint32_t first = 0; first < N; first += kTokens) {
      if (first >= task.rows) break;
      const std::uint32_t buffer = first / kTokens % 2;
      // One thread issues all stores, in a group for each step. Steps take the two buffers in turn,
      // so this step's was last stored by the group before the newest; but every tile begins with
      // the first buffer.
      if (warp == 0 && elect()) {
        if (first == 0) {
          await_all_stores_but<0>();
        } else {
          await_all_stores_but<1>();
        }
      }
      named_barrier<kWarpgroup>(group_barrier(group));
#pragma unroll
      for (std::uint32_t j = 0; j < kTokens; j += 16) {
        const float* const sums = acc + (first + j) / 2;
        store_matrices(staged.place(buffer, j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                       pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]),
                       pack_bf16(sums[4], sums[5]), pack_bf16(sums[6], sums[7]));
      }
      fence_async_proxy_shared();
      named_barrier<kWarpgroup>(group_barrier(group));
      if (column < columns && warp == 0 && elect()) {
#pragma unroll 1
        for (std::uint32_t token = 0; token < kTokens && first + token < task.rows;
             token += kRowsOfGather) {
          scatter4(map, base + (buffer * kTokens + token) * kSwizzleRowBytes,
                   static_cast<int>(column), places(first + token));
        }
        commit_stores();
      }
    }
  }
  // Waits for all stores: before the block ends, whose memory they read.
  __device__ void end() const {
    if (__shfl_sync(~0u, reread_thread_index<kWarpgroup>() / 32, 0) == 0 && elect()) {
      await_all_stores_but<0>();
    }
  }

 private:
  __device__ int4 places(std::uint32_t row) const {
    const auto at = [&](std::uint32_t i) {
      const std::int32_t place = row + i < task.rows ? __ldg(index + row + i) : -1;
      return place < 0 ? nowhere : place;
    };
    return {at(0), at(1), at(2), at(3)};
  }
};

}  // namespace switchyard::gpu
