// Quantizes bf16 to E4M3 codes with a scale for every group of 128 columns. base/quantize.h has the
// formulas.
#pragma once

#include "base/quantize.h"
#include "gpu/ptx/convert.cuh"

namespace switchyard::gpu {

// quantize_together() makes the codes of 16 columns per lane and the scale of a group of 128
// columns, which eight neighbouring lanes share. Whole warps call it.
inline constexpr std::uint32_t kLaneColumns = 16, kGroupLanes = kQuantGroup / kLaneColumns;
__device__ __forceinline__ uint4 quantize_together(const uint4& first, const uint4& second,
                                                   float& scale) {
  std::uint32_t most = larger_magnitudes(largest_pair(first), largest_pair(second));
#pragma unroll
  for (std::uint32_t lanes = 1; lanes < kGroupLanes; lanes *= 2) {
    most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, lanes));
  }
  const GroupScale group = group_scale(largest_magnitude(most));
  scale = group.scale;
  return quantize(first, second, group.inverse);
}

// The largest number of those that a block's threads have, none of which is negative; NaN if one
// is.
template <int kThreads>
__device__ __forceinline__ float largest_of_block(float most) {
  __shared__ float of_warps[kThreads / 32];
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    most = at_least(most, __shfl_xor_sync(~0u, most, lanes));
  }
  __syncthreads();  // the numbers of the call before are read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  for (const float of_warp : of_warps) most = at_least(most, of_warp);
  return most;
}

}  // namespace switchyard::gpu
