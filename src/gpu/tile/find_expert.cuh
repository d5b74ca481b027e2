// Finds the expert of a tile or a row.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// Returns the e with begin[e] <= i < begin[e + 1]. (An expert without any begins where the next one
// does, so it is never returned.)
template <typename Word>
__device__ __forceinline__ std::uint32_t find_expert(const Word* begin, std::uint32_t num_experts,
                                                     std::uint32_t i) {
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

// Does the same by a whole warp, in two steps. All lanes pass the same, but for their own number.
template <typename Word>
__device__ __forceinline__ std::uint32_t find_expert_together(const Word* begin,
                                                              std::uint32_t num_experts,
                                                              std::uint32_t i, std::uint32_t lane) {
  // Each lane looks at one expert in either step: at every 32nd, then at 32 neighbours.
  constexpr std::uint32_t kStep = 32;
  const auto last_not_after = [&](std::uint32_t e) {
    return static_cast<std::uint32_t>(__popc(__ballot_sync(~0u, e < num_experts && begin[e] <= i)) -
                                      1);
  };
  const std::uint32_t first = kStep * last_not_after(kStep * lane);
  return first + last_not_after(first + lane);
}
inline constexpr int kMostFoundTogether = 32 * 32;

}  // namespace switchyard::gpu
