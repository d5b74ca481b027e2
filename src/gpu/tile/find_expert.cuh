// Which expert a tile or a row is of.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// Returns the e with begin[e] <= i < begin[e + 1]. (An expert without any begins where the next one
// does, so it is never returned.)
__device__ __forceinline__ std::uint32_t find_expert(const std::uint32_t* begin,
                                                     std::uint32_t num_experts, std::uint32_t i) {
  std::uint32_t low = 0, high = num_experts;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (begin[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace switchyard::gpu
