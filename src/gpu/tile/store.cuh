// Stores register tiles through shared memory into rows of tokens.
#pragma once

#include "gpu/ptx/mma.cuh"
#include "gpu/tile/epilogue.cuh"

namespace switchyard::gpu {

// The place where a warpgroup transposes weight rows into rows of tokens, kTokens at a time. There
// are two buffers: one is stored while the other is filled. A token has 4 or 8 vectors, in rows of
// 128 bytes whose vectors are swizzled, so that eight tokens' vectors of one column lie in
// different banks.
template <std::uint32_t kTokens, std::uint32_t kVectors>
struct Staging {
  std::uint32_t base;
  __device__ std::uint32_t place(std::uint32_t buffer, std::uint32_t token,
                                 std::uint32_t vector) const {
    constexpr std::uint32_t kRowTokens = 8 / kVectors;
    const std::uint32_t row = token / kRowTokens;
    vector += token % kRowTokens * kVectors;
    return base + (buffer * (kTokens / kRowTokens) + row) * kSwizzleRowBytes +
           ((vector ^ (row & 7)) << 4);
  }
};

// Stages and stores a warpgroup's part of a weight-major tile of `rows` tokens. All its warps must
// have finished the previous tile. A warp's 16 weight rows make one 16-byte vector of a token's row
// if kMerged (gate and up have met), else two.
//   elements     elements of a token's row that exist, from the warpgroup's first on
//   pair(n)   -> the packed values of tokens 8 n + 2 t and the next: {first rows, second rows}
//   row(token) -> where the warpgroup's elements of the token go
template <typename C, int N, bool kMerged, typename Pair, typename Row>
__device__ __forceinline__ void store_tile(std::uint32_t staging_base, std::uint32_t barrier_id,
                                           std::uint32_t rows, std::uint32_t elements, Pair&& pair,
                                           Row&& row) {
  constexpr std::uint32_t kVectors = kMerged ? 4 : 8;  // of a token's row
  constexpr int kTokens = kMerged ? 32 : C::kStagedTokens;
  static_assert(2 * kTokens * kVectors * 16 <= kStagingBytes<C>);
  const Staging<kTokens, kVectors> staging{staging_base};
  const std::uint32_t thread = reread_thread_index<kWarpgroup>();
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

// The tokens that a warp of a token-major tile stages together: half of its 16, the lanes' first or
// second, 128 bytes of each at a time.
inline constexpr std::uint32_t kWarpStagedTokens = 8;
struct WarpStaging {
  std::uint32_t base;
  template <typename C>
  __device__ WarpStaging(const Epilogue<C>& epilogue, std::uint32_t group)
      : base(shared_address(epilogue.staging[group]) +
             reread_thread_index<kWarpgroup>() / 32 * kWarpStagedTokens * kSwizzleRowBytes) {
    static_assert(kWarpStagedTokens * kSwizzleRowBytes * 4 <= kStagingBytes<C>);
  }
  __device__ std::uint32_t place(std::uint32_t token, std::uint32_t vector) const {
    return base + token * kSwizzleRowBytes + ((vector ^ (token & 7)) << 4);
  }
  // Stores the staged vectors of 16 bytes for which keep(token, vector) holds to to(token, vector).
  template <typename Keep, typename To>
  __device__ void drain(Keep&& keep, To&& to) const {
    __syncwarp();
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpStagedTokens / 4; ++i) {
      const std::uint32_t token = 4 * i + reread_thread_index<32>() / 8;
      const std::uint32_t vector = reread_thread_index<8>();
      if (keep(token, vector))
        store_vector(to(token, vector), load_shared_vector(place(token, vector)));
    }
    __syncwarp();
  }
};

}  // namespace switchyard::gpu
