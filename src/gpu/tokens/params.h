// Parameters of activations on their way into first GEMMs. Pointers are device pointers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/tile/params.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// The rows that a pack warp waits for, and packs, together.
inline constexpr std::uint32_t kPackedTogether = 16;

struct TokenParams {
  TokenMaps x_maps;          // over packed
  std::uint16_t* converted;  // [T, H] bf16, for activations of other types
  // [T, H] and [T, x_groups]: the activations as FP8, and the scales of their groups of 128
  // columns.
  std::byte* quantized;
  float* quantized_scales;
  // Slots, each with room for the highest tile. The elements are those of the policy's tokens.
  std::byte* packed;     // [packed_slots, tokens, H]
  float* packed_scales;  // [packed_slots, x_groups, tokens]
  std::uint32_t packed_slots;
  std::uint32_t x_groups;
};

struct InputCall {
  const void* x;          // [T, H] of x_type
  std::int64_t x_stride;  // in elements
  DType x_type;
  // True if the kernel makes bf16 rows of its own: x is not bf16 or, in large passes, its rows
  // overlap.
  bool converts;
  const float* x_scales;  // of FP8 activations: [T, ceil(H / 128)]
  std::int64_t x_scale_stride;
};

}  // namespace switchyard::gpu
