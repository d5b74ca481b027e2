// Rows of E4M3 codes with one scale for all columns.
#pragma once

#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {

// The codes of a row of bf16, and one scale for all of its columns, of which there are a multiple
// of kLaneColumns. kRowLanes neighbouring lanes make a row, each with kAtOnce times kLaneColumns in
// registers. Called by whole warps; a row without columns is none.
template <std::uint32_t kRowLanes, std::uint32_t kAtOnce>
__device__ __forceinline__ float quantize_row(const std::uint16_t* from, std::byte* to,
                                              std::uint32_t columns) {
  constexpr std::uint32_t kPieceColumns = kRowLanes * kLaneColumns;
  constexpr std::uint32_t kStep = kAtOnce * kPieceColumns;
  const std::uint32_t lane_column = reread_thread_index<kRowLanes>() * kLaneColumns;
  uint4 values[kAtOnce][2];
  const auto load = [&](std::uint32_t column0) {
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t column = column0 + i * kPieceColumns + lane_column;
      values[i][0] = values[i][1] = uint4{0, 0, 0, 0};
      if (column < columns) {
        const auto* const vectors = reinterpret_cast<const uint4*>(from + column);
        values[i][0] = __ldcg(vectors);
        values[i][1] = __ldcg(vectors + 1);
      }
    }
  };
  std::uint32_t most = 0, column0 = 0;
#pragma unroll 1
  for (;;) {
    load(column0);
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      most = larger_magnitudes(
          most, larger_magnitudes(largest_pair(values[i][0]), largest_pair(values[i][1])));
    }
    if (column0 + kStep >= columns) break;
    column0 += kStep;
  }
#pragma unroll
  for (std::uint32_t lanes = 1; lanes < kRowLanes; lanes *= 2) {
    most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, lanes));
  }
  const GroupScale scale = group_scale(largest_magnitude(most));
  // Backwards, because the last columns are at hand.
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t column = column0 + i * kPieceColumns + lane_column;
      if (column < columns) {
        store_vector(to + column, quantize(values[i][0], values[i][1], scale.inverse));
      }
    }
    if (column0 == 0) break;
    column0 -= kStep;
    load(column0);
  }
  return scale.scale;
}

// Brings a token's E4M3 codes, with a scale for each 128 columns, to one scale, and returns that.
// If all are the same, it is that one. Else the largest number gets the largest code: this rounds
// codes again, unless scales are powers of two of each other; then only those that become
// subnormal. Called as quantize_row().
template <std::uint32_t kRowLanes>
__device__ __forceinline__ float rescale_row(const std::byte* from, const float* scales,
                                             std::byte* to, std::uint32_t columns) {
  const std::uint32_t lane = reread_thread_index<kRowLanes>();
  constexpr std::uint32_t kStep = kRowLanes * kLaneColumns;
  const auto codes_at = [&](std::uint32_t column) {
    return __ldcg(reinterpret_cast<const uint4*>(from + column));
  };
  const auto scale_at = [&](std::uint32_t column) { return __ldcg(scales + column / kQuantGroup); };
  const float first = columns == 0 ? 0 : scale_at(0);
  float most = 0, apart = 0;
#pragma unroll 1
  for (std::uint32_t column = lane * kLaneColumns; column < columns; column += kStep) {
    const float scale = scale_at(column);
    most = at_least(most, fabsf(scale) * largest_code(codes_at(column)));
    apart = at_least(apart, fabsf(scale - first));
  }
#pragma unroll
  for (std::uint32_t lanes = 1; lanes < kRowLanes; lanes *= 2) {
    most = at_least(most, __shfl_xor_sync(~0u, most, lanes));
    apart = at_least(apart, __shfl_xor_sync(~0u, apart, lanes));
  }
  const GroupScale scale = group_scale(most);
#pragma unroll 1
  for (std::uint32_t column = lane * kLaneColumns; column < columns; column += kStep) {
    const float ratio = apart == 0 ? 1 : scale_at(column) * scale.inverse;
    store_vector(to + column, rescale(codes_at(column), ratio));
  }
  return apart == 0 ? first : scale.scale;
}

}  // namespace switchyard::gpu
