// Copying rows of tokens by warps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/ptx/memory.cuh"

namespace switchyard::gpu {

// The pass's activations in the policy's elements: [T, H], and [T, x_groups] scales.
struct TokenRows {
  const std::byte* rows;
  std::int64_t row_bytes;
  const float* row_scales;
  std::int64_t row_scale_stride;
};

// One part of a row that 1 << log2 warps copy together.
struct RowPart {
  std::uint32_t index = 0, log2 = 0;

  // Finished parts are counted in units. All parts of a row together make kUnits.
  static constexpr std::uint32_t kLog2Most = 3, kUnits = 1 << kLog2Most;
  __device__ std::uint32_t units() const { return kUnits >> log2; }
  // Returns log2 of the parts to cut each of `rows` rows into: one for each of `warps` warps, but
  // no part below 512 bytes.
  __device__ static std::uint32_t log2_of(std::uint32_t rows, std::uint32_t warps,
                                          std::uint32_t row_bytes) {
    std::uint32_t log2 = 0;
    while (log2 < kLog2Most && rows << (log2 + 1) <= warps && row_bytes >> (log2 + 1) >= 512) {
      ++log2;
    }
    return log2;
  }
};

// Copies a part of a row of `bytes` bytes, a multiple of 16. Called by one warp. Loads bypass the
// L1 cache, which may still hold data of an earlier pass.
template <std::uint32_t kVectors>
__device__ __forceinline__ void copy_row(std::byte* to, const std::byte* from, std::uint32_t bytes,
                                         const RowPart& part) {
  constexpr std::uint32_t kStep = 16 * 32;
  const std::uint32_t chunk = (bytes / 16 + (1u << part.log2) - 1 >> part.log2) * 16;
  const std::uint32_t first = part.index * chunk;
  bytes = min(bytes, first + chunk);
#pragma unroll 1
  for (std::uint32_t byte0 = first + 16 * (threadIdx.x % 32); byte0 < bytes;
       byte0 += kVectors * kStep) {
    uint4 values[kVectors];
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      const std::uint32_t byte = byte0 + v * kStep;
      if (byte < bytes) values[v] = __ldcg(reinterpret_cast<const uint4*>(from + byte));
    }
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      const std::uint32_t byte = byte0 + v * kStep;
      if (byte < bytes) store_vector(to + byte, values[v]);
    }
  }
}

}  // namespace switchyard::gpu
