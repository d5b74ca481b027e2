// The weighted sum of a token's cells, in the order of its slots, in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/plan.cuh"

namespace switchyard::gpu {

// Of the tokens of one combine task: as many as give every block one, but no more than one for each
// math warp.
__device__ __forceinline__ std::uint32_t log2_combine_chunk(std::uint32_t tokens,
                                                            std::uint32_t blocks) {
  std::uint32_t log2 = 0;
  while (1 << log2 < kMathWarps && blocks << log2 < tokens) ++log2;
  return log2;
}

__device__ __forceinline__ void store_output(const CallParams& call, std::uint32_t token,
                                             std::uint32_t column, const float (&v)[8]) {
  const std::int64_t at = token * call.y_stride + column;
  if (call.y_type == DType::kF32) {
    auto* const to = reinterpret_cast<float4*>(static_cast<float*>(call.y) + at);
    to[0] = float4{v[0], v[1], v[2], v[3]};
    to[1] = float4{v[4], v[5], v[6], v[7]};
    return;
  }
  uint4 packed;
  auto* const words = reinterpret_cast<std::uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (call.y_type == DType::kBF16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
  store_vector(static_cast<std::uint16_t*>(call.y) + at, packed);
}

__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& cell, float weight) {
  const std::uint32_t words[4] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
  }
}

// One warp, kCombinedColumns columns of one token: lane l has 8 from column 8 l on (`column`), and
// 8 from 256 further on. Lane c < cells_per_token holds slot c's weight, 0 for a slot without an
// expert, whose cells nobody wrote. A slot has a cell for each part of GEMM2's K. `rehearsal`:
// nothing is loaded or stored.
inline constexpr std::uint32_t kCombinedColumns = 512;
__device__ __forceinline__ void combine_columns(const LayerParams& layer, const CallParams& call,
                                                std::uint32_t token, std::uint32_t column,
                                                float weight, std::uint32_t present,
                                                std::uint32_t log2_splits, bool rehearsal) {
  constexpr std::uint32_t kAtOnce = 9;  // cells whose loads are in flight together: 8 and a shared
  constexpr std::uint32_t kGroups = 2, kGroup = kCombinedColumns / kGroups;
  if (rehearsal) present = 0;
  const std::uint32_t cells = static_cast<std::uint32_t>(layer.cells_per_token) << log2_splits;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint16_t* from =
      layer.cells + static_cast<std::size_t>(token) * cells * hidden + column;
  float sum[kGroups][8] = {};
#pragma unroll 1
  for (std::uint32_t first = 0; first < cells; first += kAtOnce) {
    uint4 values[kAtOnce][kGroups];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const bool there = first + i < cells && (present >> (first + i >> log2_splits) & 1) != 0;
#pragma unroll
      for (std::uint32_t g = 0; g < kGroups; ++g) {
        values[i][g] = uint4{0, 0, 0, 0};
        if (there && column + g * kGroup < hidden) {
          values[i][g] = __ldcg(reinterpret_cast<const uint4*>(
              from + static_cast<std::size_t>(first + i) * hidden + g * kGroup));
        }
      }
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const float factor = __shfl_sync(~0u, weight, (first + i >> log2_splits) % 32);
#pragma unroll
      for (std::uint32_t g = 0; g < kGroups; ++g) add_weighted(sum[g], values[i][g], factor);
    }
  }
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    if (column + g * kGroup < hidden && !rehearsal) {
      store_output(call, token, column + g * kGroup, sum[g]);
    }
  }
}

}  // namespace switchyard::gpu
