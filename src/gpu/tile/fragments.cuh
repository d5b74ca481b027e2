// Fragments of four-bit weights in bf16: from a stage of the ring to registers.
#pragma once

#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/four_bit.h"

namespace switchyard::gpu {

// A stage's instructions are issued in two halves: the operands of one half are made while the
// products of the other are under way.
inline constexpr int kHalves = 2, kHalfSteps = 2;
using Fragments = std::uint32_t[kHalfSteps][4];
// The registers of both halves. Their numbers mean nothing between tiles.
template <bool kExist>
struct OperandRegisters {
  Fragments half[kHalves] = {};
};
template <>
struct OperandRegisters<false> {};

__device__ __forceinline__ std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// The same, into a register that keeps its number if `go` is 0, which it never is.
__device__ __forceinline__ void multiply_bf16_into(std::uint32_t& to, std::uint32_t a,
                                                   std::uint32_t b, std::uint32_t go) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p mul.rn.bf16x2 %0, %1, %2;\n}"
               : "+r"(to)
               : "r"(a), "r"(b), "r"(go));
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
// Where this thread's words are in a box.
template <DType kType>
class BoxPlaces {
 public:
  __device__ explicit BoxPlaces(std::uint32_t group) {
    using Box = FourBitBox<kType>;
    const std::uint32_t thread = reread_thread_index<kWarpgroup>();
    codes_ = (group * kWarpgroup + thread) * Box::kLaneBytes;
    scales_ = Box::kScalesAt +
              (group * (kWarpgroup / 4) + thread / 32 * 8 + thread % 32 / 4) * Box::kScaleBytes;
  }
  __device__ __forceinline__ BoxWords load(std::uint32_t box) const {
    BoxWords words{load_shared_vector(box + codes_), {}};
    if constexpr (FourBitBox<kType>::kIsFloat) {
      words.scales.x = __float_as_uint(load_shared_float(box + scales_));
    } else {
      const float2 both = load_shared_floats(box + scales_);
      words.scales = {__float_as_uint(both.x), __float_as_uint(both.y)};
    }
    return words;
  }

 private:
  std::uint32_t codes_, scales_;
};

// The operands of the half's instructions. A half is a group of columns that share a scale.
template <DType kType, typename Assign>
__device__ __forceinline__ void make_fragments(const BoxWords& words, int half, Fragments& to,
                                               Assign&& assign) {
  const std::uint32_t codes[kHalfSteps] = {half == 0 ? words.codes.x : words.codes.z,
                                           half == 0 ? words.codes.y : words.codes.w};
  const RowScales<kType> scale(words.scales, half);
#pragma unroll
  for (int step = 0; step < kHalfSteps; ++step) {
#pragma unroll
    for (std::uint32_t reg = 0; reg < 4; ++reg) {
      std::uint32_t value = fragment<kType>(codes[step], reg);
      // 136: the zero of a code, 8, where fragment() puts it.
      if constexpr (kType == DType::kU4) value = subtract_bf16(value, 0x43084308u);
      assign(to[step][reg], value, scale.of[reg % 2]);
    }
  }
}
template <DType kType>
__device__ __forceinline__ void make_fragments(const BoxWords& words, int half, Fragments& to) {
  make_fragments<kType>(words, half, to,
                        [](std::uint32_t& product, std::uint32_t a, std::uint32_t b) {
                          product = multiply_bf16(a, b);
                        });
}

}  // namespace switchyard::gpu
