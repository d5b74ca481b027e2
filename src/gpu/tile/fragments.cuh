// Fragments of four-bit weights in bf16: from a stage of the ring to registers.
#pragma once

#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/four_bit.h"

namespace switchyard::gpu {

// The operands of a stage's instructions: four registers for each.
inline constexpr int kStageSteps = 4;
using Fragments = std::uint32_t[kStageSteps][4];

__device__ __forceinline__ std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ std::uint32_t subtract_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// The scales of this thread's two rows for one group of columns, each as a pair of equal numbers.
template <DType kType>
struct RowScales {
  std::uint32_t of[2];

  // `words`: the thread's scales of the box; `group`: 0 or 1.
  __device__ __forceinline__ RowScales(const uint2& words, int group) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if constexpr (kType == DType::kF4E2M1) {
        // The byte is the exponent of bf16, which begins at bit 7.
        const std::uint32_t byte = static_cast<std::uint32_t>(2 * group + row);
        of[row] = __byte_perm(words.x, 0, 0x4040 | byte | byte << 8) << 7;
      } else {
        const std::uint32_t pair = group == 0 ? words.x : words.y;
        of[row] = __byte_perm(pair, 0, row == 0 ? 0x1010 : 0x3232);
      }
    }
  }
};

// This thread's codes and scales of a box.
struct BoxWords {
  uint4 codes;
  uint2 scales;
};
template <DType kType>
__device__ __forceinline__ BoxWords load_box_words(std::uint32_t box, std::uint32_t group) {
  using Box = FourBitBox<kType>;
  const std::uint32_t thread = reread_thread_index<kWarpgroup>();
  BoxWords words{load_shared_vector(box + (group * kWarpgroup + thread) * Box::kLaneBytes), {}};
  const std::uint32_t scales_at =
      box + Box::kScalesAt +
      (group * (kWarpgroup / 4) + thread / 32 * 8 + thread % 32 / 4) * Box::kScaleBytes;
  if constexpr (Box::kIsFloat) {
    words.scales.x = __float_as_uint(load_shared_float(scales_at));
  } else {
    const float2 both = load_shared_floats(scales_at);
    words.scales = {__float_as_uint(both.x), __float_as_uint(both.y)};
  }
  return words;
}

template <DType kType>
__device__ __forceinline__ void make_fragments(const BoxWords& words, Fragments& to) {
  const std::uint32_t codes[kStageSteps] = {words.codes.x, words.codes.y, words.codes.z,
                                            words.codes.w};
#pragma unroll
  for (int columns = 0; columns < 2; ++columns) {
    const RowScales<kType> scale(words.scales, columns);
#pragma unroll
    for (int step = 2 * columns; step < 2 * columns + 2; ++step) {
#pragma unroll
      for (std::uint32_t reg = 0; reg < 4; ++reg) {
        std::uint32_t value = fragment<kType>(codes[step], reg);
        // 136: the zero of a code, 8, where fragment() puts it.
        if constexpr (kType == DType::kU4) value = subtract_bf16(value, 0x43084308u);
        to[step][reg] = multiply_bf16(value, scale.of[reg % 2]);
      }
    }
  }
}

}  // namespace switchyard::gpu
