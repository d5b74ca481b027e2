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

}  // namespace switchyard::gpu
