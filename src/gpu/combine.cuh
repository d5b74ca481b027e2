// The weighted sum of a token's cells, in the order of its slots, in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/plan.cuh"

namespace switchyard::gpu {

// Tokens of one combine task: one for each math warp, unless that would leave blocks idle.
__device__ __forceinline__ std::uint32_t combine_chunk(std::uint32_t tokens, std::uint32_t blocks) {
  return tokens >= kMathWarps * blocks ? kMathWarps : 1;
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
  *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(call.y) + at) = packed;
}

__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& cell, float weight) {
  const std::uint32_t words[4] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
  }
}

// One warp, 256 columns of one token. Lane c < cells_per_token holds slot c's weight, 0 for a slot
// without an expert, whose cell nobody wrote.
__device__ __forceinline__ void combine_columns(const LayerParams& layer, const CallParams& call,
                                                std::uint32_t token, std::uint32_t column,
                                                float weight, std::uint32_t present) {
  constexpr std::uint32_t kAtOnce = 8;  // loads in flight per lane
  const auto cells = static_cast<std::uint32_t>(layer.cells_per_token);
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint16_t* from =
      layer.cells + static_cast<std::size_t>(token) * cells * hidden + column;
  float sum[8] = {};
  for (std::uint32_t first = 0; first < cells; first += kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      values[i] = uint4{0, 0, 0, 0};
      if (first + i < cells && (present >> (first + i) & 1) != 0 && column < hidden) {
        values[i] = __ldcg(
            reinterpret_cast<const uint4*>(from + static_cast<std::size_t>(first + i) * hidden));
      }
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      add_weighted(sum, values[i], __shfl_sync(~0u, weight, (first + i) % 32));
    }
  }
  if (column < hidden) store_output(call, token, column, sum);
}

}  // namespace switchyard::gpu
