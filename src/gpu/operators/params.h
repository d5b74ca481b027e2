// The host's parameters for the kernels of permute, unpermute and topk, and the one that quantises
// rows. Trivially copyable; pointers are device pointers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/partition.h"
#include "routing/route_warp.cuh"
#include "switchyard/grouped_gemm.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

inline constexpr std::uint32_t kMostPermutedExperts = 1024;

// How permute() shares slots out: each block has a chunk of them, each warp an equal part of that,
// in order. A chunk's counts fit in 16 bits.
struct PermutePlan {
  static constexpr std::uint32_t kWarps = 16, kStep = 32 * kWarps;
  static constexpr std::uint32_t kAloneSlots = 4096;    // one block takes so many in one kernel
  static constexpr std::uint32_t kFewestSlots = 2048;   // of a chunk otherwise
  static constexpr std::uint32_t kMostSlots = 1 << 15;  // of a chunk
  static constexpr std::uint32_t kChunks = 128;  // about an H200's SMs; more where slots are many

  std::uint32_t chunks, chunk;  // their number, and the slots of each

  explicit constexpr PermutePlan(std::uint32_t slots) : chunks(1), chunk(kAloneSlots) {
    if (slots <= kAloneSlots) return;
    chunk = protocol::ceil_div(slots, kChunks);
    chunk = chunk < kFewestSlots ? kFewestSlots : chunk > kMostSlots ? kMostSlots : chunk;
    chunk = protocol::ceil_div(chunk, kStep) * kStep;
    chunks = protocol::ceil_div(slots, chunk);
  }
  // Bytes for counts [E, chunks] and totals [E].
  constexpr std::size_t workspace_bytes(int num_experts) const {
    return static_cast<std::size_t>(num_experts) * (chunks + std::size_t{1}) *
           sizeof(std::uint32_t);
  }
};

struct PermuteCall {
  const void* ids;  // [T, K] i32 or, if wide_ids, i64
  bool wide_ids;
  std::uint32_t slots, top_k, num_experts;
  RowLayout layout;
  std::uint32_t chunks, chunk;
  std::int32_t* ends;       // [E]
  std::int32_t* positions;  // [T, K]
  std::int32_t* tokens;     // [rows] or null
  std::int64_t rows;
  std::int32_t* dropped;  // [1] or null
  std::uint32_t* counts;  // [E, chunks]: first of a chunk's slots, then of all chunks before it
  std::uint32_t* totals;  // [E]
};

struct UnpermuteCall {
  const void* rows;  // [num_rows, columns]
  DType in;
  std::int64_t num_rows, columns, row_stride;
  const std::int32_t* positions;  // [T, K]
  const void* weights;            // [T, K] f32 or, if bf16_weights, bf16; or null
  bool bf16_weights;
  std::uint32_t tokens, top_k;
  void* out;  // [tokens, columns]
  DType to;
  std::int64_t out_stride;
  float scale;
  bool accumulate;
};

// Rows of codes are `to_bytes` apart, each with a scale for every kQuantGroup columns behind its
// codes. `to_bytes`, `to` and `columns` are multiples of 16.
struct QuantizeCall {
  const void* x;  // [rows, columns]
  DType type;     // kBF16, kF16 or kF32
  std::int64_t rows;
  std::uint32_t columns;
  std::int64_t x_stride;  // in elements
  std::uint8_t* to;
  std::int64_t to_bytes;
  bool by_row;  // all groups of a row have the same scale
};

struct TopkCall {
  routing::DeviceRouting routing;
  const void* logits;  // [T, E]
  DType logits_type;
  std::int64_t logits_stride;    // in elements
  const float* correction_bias;  // [E] or null
  std::uint32_t tokens;
  std::int32_t* ids;  // [T, K]
  float* weights;     // [T, K]
};

}  // namespace switchyard::gpu
