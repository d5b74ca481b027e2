// The warpgroup matrix instruction: D[64, N] += A[64, 16] B[N, 16]^T, operands in shared memory in
// rows of 128 bytes with the 128-byte swizzle, D in registers.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace switchyard::gpu {

inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes;

// Of a K-major operand whose first element is at `address` (a multiple of 1024 bytes, plus the
// offset of a K step within the row).
__device__ __forceinline__ std::uint64_t swizzled_descriptor(std::uint32_t address) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = static_cast<std::uint16_t>(address >> 4);
  descriptor.bitfield.leading_byte_offset_ = 1;  // not used with this swizzle
  descriptor.bitfield.stride_byte_offset_ = kSwizzleAtomBytes >> 4;
  descriptor.bitfield.layout_type_ = static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return descriptor;
}

// What a layer's arithmetic fixes about the tile core; another type is another policy.
struct BF16Policy {
  using Element = std::uint16_t;
  static constexpr int kElementBytes = 2;
  static constexpr int kInstructionK = 16;

  template <int N>
  struct Instruction;
};

#define SWITCHYARD_BF16_INSTRUCTION(n)                                               \
  template <>                                                                        \
  struct BF16Policy::Instruction<n>                                                  \
      : cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, \
                                                         cute::SM90::GMMA::Major::K> {}
SWITCHYARD_BF16_INSTRUCTION(16);
SWITCHYARD_BF16_INSTRUCTION(32);
SWITCHYARD_BF16_INSTRUCTION(64);
SWITCHYARD_BF16_INSTRUCTION(96);
SWITCHYARD_BF16_INSTRUCTION(128);
SWITCHYARD_BF16_INSTRUCTION(160);
SWITCHYARD_BF16_INSTRUCTION(192);
SWITCHYARD_BF16_INSTRUCTION(224);
SWITCHYARD_BF16_INSTRUCTION(256);
#undef SWITCHYARD_BF16_INSTRUCTION

namespace detail {
template <typename Instruction, int... I>
__device__ __forceinline__ void multiply(std::uint64_t a, std::uint64_t b, float* acc,
                                         bool accumulate, std::integer_sequence<int, I...>) {
  Instruction::fma(a, b, acc[I]...,
                   accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
}  // namespace detail

// Issues D (+)= A B^T; the result is there after the warpgroup has waited for its commit group.
template <typename Policy, int N>
__device__ __forceinline__ void multiply(std::uint64_t a, std::uint64_t b, float (&acc)[N / 2],
                                         bool accumulate) {
  detail::multiply<typename Policy::template Instruction<N>>(
      a, b, acc, accumulate, std::make_integer_sequence<int, N / 2>());
}

}  // namespace switchyard::gpu
