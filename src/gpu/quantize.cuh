// From bf16 to E4M3 codes with a scale for every group of 128 columns; model/quantize.h has the
// formulas.
#pragma once

#include <cuda_bf16.h>

#include "gpu/storage.cuh"
#include "base/quantize.h"

namespace switchyard::gpu {

// Of two pairs of bf16 numbers, the larger magnitude of each place, with some sign; NaN if one is.
__device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
// Of both places.
__device__ __forceinline__ float largest_magnitude(std::uint32_t pair) {
  return fabsf(low_half(larger_magnitudes(pair, pair >> 16)));
}
__device__ __forceinline__ float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// The codes of two pairs of bf16 numbers.
__device__ __forceinline__ std::uint32_t quantize(std::uint32_t a, std::uint32_t b, float inverse) {
  std::uint32_t codes;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(low_half(a) * inverse), "f"(high_half(a) * inverse), "f"(low_half(b) * inverse),
        "f"(high_half(b) * inverse));
  return codes;
}
__device__ __forceinline__ uint4 quantize(const uint4& first, const uint4& second, float inverse) {
  return {quantize(first.x, first.y, inverse), quantize(first.z, first.w, inverse),
          quantize(second.x, second.y, inverse), quantize(second.z, second.w, inverse)};
}

// The codes of 16 columns, where eight neighbouring lanes have the 128 columns of a group. Called
// by whole warps.
inline constexpr std::uint32_t kLaneColumns = 16, kGroupLanes = kQuantGroup / kLaneColumns;
__device__ __forceinline__ uint4 quantize_together(const uint4& first, const uint4& second,
                                                   float& scale) {
  std::uint32_t most = larger_magnitudes(
      larger_magnitudes(larger_magnitudes(first.x, first.y), larger_magnitudes(first.z, first.w)),
      larger_magnitudes(larger_magnitudes(second.x, second.y),
                        larger_magnitudes(second.z, second.w)));
#pragma unroll
  for (std::uint32_t lanes = 1; lanes < kGroupLanes; lanes *= 2) {
    most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, lanes));
  }
  const GroupScale group = group_scale(largest_magnitude(most));
  scale = group.scale;
  return quantize(first, second, group.inverse);
}

// Where a tile has h in bf16, in slots whose rows are of the policy's elements: in FP8, where small
// passes have it so, behind the rows for its codes.
template <typename P>
__device__ __forceinline__ std::uint32_t first_row_of_h(const Pass<P>& pass, std::uint32_t tile) {
  constexpr std::uint32_t kFirst = P::kScaled ? kMaxHeight<P> : 0;
  static_assert(!P::kScaled || !P::kAlone || 3 * kMaxHeight<P> <= kSlotRows<P>);
  return tile % pass.layer.h_slots * kSlotRows<P> + kFirst;
}
template <typename P>
__device__ __forceinline__ std::uint16_t* rows_of_h(const Pass<P>& pass, std::uint32_t tile) {
  return reinterpret_cast<std::uint16_t*>(pass.layer.h + std::size_t{first_row_of_h(pass, tile)} *
                                                             pass.layer.h_stride *
                                                             P::kElementBytes);
}

// The block's share of the pass's activations, [T, H] bf16, by its math warps.
template <typename P>
__device__ __forceinline__ void quantize_activations(const Pass<P>& pass) {
  constexpr std::uint32_t kWarpColumns = 32 * kLaneColumns;
  constexpr int kAtOnce = 4;
  const LayerParams& layer = pass.layer;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t pieces = protocol::ceil_div(hidden, kWarpColumns);
  const std::uint32_t units = pass.first_token(blockIdx.x + 1) * pieces, lane = threadIdx.x % 32;
  constexpr std::uint32_t step = kMathWarps;
  const std::uint32_t first =
      pass.first_token(blockIdx.x) * pieces + threadIdx.x / 32 - kWarpgroup / 32;
#pragma unroll 1
  for (std::uint32_t unit0 = first; unit0 < units; unit0 += kAtOnce * step) {
    uint4 values[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t unit = unit0 + i * step, token = unit / pieces;
      const std::uint32_t column = unit % pieces * kWarpColumns + lane * kLaneColumns;
      values[i][0] = values[i][1] = uint4{0, 0, 0, 0};
      if (unit < units && column < hidden) {
        const auto* const from =
            reinterpret_cast<const uint4*>(pass.state().x + token * pass.state().x_stride + column);
        values[i][0] = __ldcg(from);
        values[i][1] = __ldcg(from + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t unit = unit0 + i * step, token = unit / pieces;
      const std::uint32_t column = unit % pieces * kWarpColumns + lane * kLaneColumns;
      float scale = 0;
      const uint4 codes = quantize_together(values[i][0], values[i][1], scale);
      if (unit >= units || column >= hidden) continue;
      store_vector(layer.quantized + std::size_t{token} * hidden + column, codes);
      if (lane % kGroupLanes == 0) {
        layer.quantized_scales[token * layer.x_groups + column / kQuantGroup] = scale;
      }
    }
  }
}

}  // namespace switchyard::gpu
