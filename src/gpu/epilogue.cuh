// What happens to a tile's accumulators: bias, activation and rounding, then through shared memory
// into rows of tokens.
//
// A math warpgroup holds D[64 weight rows, N tokens]. Warp w has rows 16 w to 16 w + 15; its lane
// 4 g + t holds rows g and g + 8 of them, of tokens 8 n + 2 t and the next, in acc[4 n .. 4 n + 3].
#pragma once

#include <cuda_bf16.h>

#include "gpu/quantize.cuh"

namespace switchyard::gpu {

// Each is v (1 + tanh(u)) / 2 for some u: in as few instructions as can be, because every tile
// height has its own copy of the epilogue, unrolled over all accumulators, and what does not fit
// the instruction cache is fetched again for every tile. `slope` is alpha / 2.
template <ActivationKind kKind>
__device__ __forceinline__ float activate(float v, float slope) {
  const float half = 0.5f * v;
  if constexpr (kKind == ActivationKind::kSilu) {
    return half * fast_tanh(slope * v) + half;
  } else if constexpr (kKind == ActivationKind::kGelu) {
    // A minimax fit for v^2 up to 20: the result is within 2.5e-5, with an exact tanh.
    const float square = at_most(v * v, 20.0f);
    const float u = v * ((-3.51516815e-4f * square + 3.70056462e-2f) * square + 0.797507884f);
    return half * fast_tanh(u) + half;
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    return half * fast_tanh(v * (0.035677408f * v * v + 0.79788456f)) + half;
  } else if constexpr (kKind == ActivationKind::kRelu) {
    return at_least(v, 0.0f);
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    const float r = at_least(v, 0.0f);
    return r * r;
  } else {
    return v;
  }
}

// Where a warpgroup turns its tile, kTokens at a time, in two buffers in turn, so that one is
// stored while the other is filled: 4 or 8 vectors of each token, in rows of 128 bytes whose
// vectors are swizzled, so that eight tokens' vectors of one column lie in different banks.
template <std::uint32_t kTokens, std::uint32_t kVectors>
struct Staging {
  std::uint32_t base;
  __device__ std::uint32_t place(std::uint32_t buffer, std::uint32_t token,
                                 std::uint32_t vector) const {
    constexpr std::uint32_t kOfRow = 8 / kVectors;  // tokens
    const std::uint32_t row = token / kOfRow;
    vector += token % kOfRow * kVectors;
    return base + (buffer * (kTokens / kOfRow) + row) * kSwizzleRowBytes +
           ((vector ^ (row & 7)) << 4);
  }
};

// A warpgroup stages and stores its part of the tile's `rows` tokens. Nobody may be in here with
// the tile before. A warp's 16 weight rows make one 16-byte vector of a token's row if kMerged
// (gate and up have met), else two.
//   elements     of a token's row that exist, from the warpgroup's first on
//   pair(n)   -> the packed values of tokens 8 n + 2 t and the next: {first rows, second rows}
//   row(token) -> where the warpgroup's elements of the token go
template <typename P, int N, bool kMerged, typename Pair, typename Row>
__device__ __forceinline__ void store_tile(std::uint32_t staging_base, std::uint32_t barrier_id,
                                           std::uint32_t rows, std::uint32_t elements, Pair&& pair,
                                           Row&& row) {
  constexpr std::uint32_t kVectors = kMerged ? 4 : 8;  // of a token's row
  constexpr int kTokens = kMerged ? 32 : P::kStagedTokens;
  static_assert(2 * kTokens * kVectors * 16 <= kStagingBytes<P>);
  const Staging<kTokens, kVectors> staging{staging_base};
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int first = 0; first < N; first += kTokens) {
    if (static_cast<std::uint32_t>(first) >= rows) break;
    const std::uint32_t buffer = first / kTokens % 2;
    if constexpr (kMerged) {
      const auto merged = [&](int i) { return first + 8 * i < N ? pair(first / 8 + i).x : 0u; };
      store_matrices(staging.place(buffer, lane, warp), merged(0), merged(1), merged(2), merged(3));
    } else {
#pragma unroll
      for (int j = 0; j < kTokens && first + j < N; j += 16) {
        const uint2 low = pair((first + j) / 8), high = pair((first + j) / 8 + 1);
        store_matrices(staging.place(buffer, j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                       low.x, low.y, high.x, high.y);
      }
    }
    named_barrier<kWarpgroup>(barrier_id);
#pragma unroll
    for (std::uint32_t i = 0; i < kTokens * kVectors / kWarpgroup; ++i) {
      const std::uint32_t at = i * kWarpgroup + thread;
      const std::uint32_t token = at / kVectors, vector = at % kVectors;
      if (first + token >= rows || 8 * vector >= elements) continue;
      store_vector(row(first + token) + 8 * vector,
                   load_shared_vector(staging.place(buffer, token, vector)));
    }
  }
}

}  // namespace switchyard::gpu
