// Makes the pass's activations in the types that the gate and the experts take.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/ptx/memory.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/tile/quantize.cuh"
#include "gpu/tokens/params.h"
#include "gpu/tokens/quantize_row.cuh"

namespace switchyard::gpu {

// Converts activations to contiguous bf16 rows.
__device__ __forceinline__ void convert_activations(const ModelShape& shape,
                                                    const TokenParams& tokens,
                                                    const InputCall& call,
                                                    std::uint32_t num_tokens) {
  const auto hidden = static_cast<std::uint32_t>(shape.hidden);
  const std::size_t count = static_cast<std::size_t>(num_tokens) * (hidden / 2);
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * kThreads) {
    const std::size_t row = i / (hidden / 2), column = i % (hidden / 2) * 2;
    const std::size_t at = row * call.x_stride + column;
    float2 pair;
    if (call.x_type == DType::kF32) {
      pair = *reinterpret_cast<const float2*>(static_cast<const float*>(call.x) + at);
    } else if (call.x_type == DType::kF16) {
      pair = __half22float2(
          *reinterpret_cast<const __half2*>(static_cast<const __half*>(call.x) + at));
    } else {
      pair = __bfloat1622float2(
          *reinterpret_cast<const __nv_bfloat162*>(static_cast<const std::uint16_t*>(call.x) + at));
    }
    reinterpret_cast<std::uint32_t*>(tokens.converted)[i] = pack_bf16(pair.x, pair.y);
  }
}

// Quantizes the block's share of the pass's activations to codes and scales. Called by its math
// warps.
__device__ __forceinline__ void quantize_activations(const ModelShape& shape,
                                                     const TokenParams& tokens,
                                                     const RouteState& state,
                                                     std::uint32_t num_tokens) {
  constexpr std::uint32_t kWarpColumns = 32 * kLaneColumns;
  constexpr int kAtOnce = 4;
  const auto hidden = static_cast<std::uint32_t>(shape.hidden);
  const std::uint32_t pieces = protocol::ceil_div(hidden, kWarpColumns);
  const std::uint32_t units = first_token_of(num_tokens, blockIdx.x + 1) * pieces,
                      lane = threadIdx.x % 32;
  constexpr std::uint32_t step = kMathWarps;
  const std::uint32_t first =
      first_token_of(num_tokens, blockIdx.x) * pieces + threadIdx.x / 32 - kWarpgroup / 32;
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
            reinterpret_cast<const uint4*>(state.x + token * state.x_stride + column);
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
      store_vector(tokens.quantized + std::size_t{token} * hidden + column, codes);
      if (lane % kGroupLanes == 0) {
        tokens.quantized_scales[token * tokens.x_groups + column / kQuantGroup] = scale;
      }
    }
  }
}

// Makes codes of the block's share of the pass's activations, with one scale for each token, which
// all groups of columns get. Called by its math warps.
template <typename P>
__device__ __forceinline__ void quantize_activations_by_row(const ModelShape& shape,
                                                            const TokenParams& tokens,
                                                            const InputCall& call,
                                                            const RouteState& state,
                                                            std::uint32_t num_tokens) {
  constexpr std::uint32_t kRowLanes = 16, kRows = kMathThreads / kRowLanes,
                          kAtOnce = kFewRegisters<P> ? 4 : 8;
  const std::uint32_t thread = threadIdx.x - kWarpgroup;
  const std::uint32_t end = first_token_of(num_tokens, blockIdx.x + 1);
#pragma unroll 1
  for (std::uint32_t token0 = first_token_of(num_tokens, blockIdx.x); token0 < end;
       token0 += kRows) {
    const std::uint32_t token = token0 + thread / kRowLanes;
    const std::uint32_t hidden = token < end ? static_cast<std::uint32_t>(shape.hidden) : 0;
    std::byte* const to = tokens.quantized + token * static_cast<std::size_t>(shape.hidden);
    const float scale =
        call.x_type == DType::kF8E4M3
            ? rescale_row<kRowLanes>(static_cast<const std::byte*>(call.x) + token * call.x_stride,
                                     call.x_scales + token * call.x_scale_stride, to, hidden)
            : quantize_row<kRowLanes, kAtOnce>(state.x + token * state.x_stride, to, hidden);
    for (std::uint32_t group = thread % kRowLanes; token < end && group < tokens.x_groups;
         group += kRowLanes) {
      tokens.quantized_scales[token * tokens.x_groups + group] = scale;
    }
  }
}

}  // namespace switchyard::gpu
