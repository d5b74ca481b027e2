// The warpgroup matrix instruction: D[64, N] += A[64, k] B[N, k]^T for 32 bytes of k, operands in
// shared memory in rows of 128 bytes with the 128-byte swizzle, D in registers. A may be in
// registers, too: in bf16, and in E5M2 where B is in E4M3.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "gpu/ptx/machine.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// Bytes of k that one instruction multiplies, whatever the element type.
inline constexpr int kInstructionBytes = 32;

// The low word of the descriptor of a K-major operand whose first element is at `address`: a
// multiple of 1024 bytes, plus the offset of a K step within the row. Only this word depends on the
// address, so the compiler need not add 64-bit numbers.
__device__ __forceinline__ std::uint32_t matrix_address(std::uint32_t address) {
  constexpr std::uint32_t kLeadingByteOffset = 1 << 16;  // not used with this swizzle
  return (address >> 4) | kLeadingByteOffset;
}
__device__ __forceinline__ std::uint64_t swizzled_descriptor(std::uint32_t matrix_address) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.stride_byte_offset_ = kSwizzleAtomBytes >> 4;
  descriptor.bitfield.layout_type_ = static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return std::uint64_t{descriptor.reg32_[1]} << 32 | matrix_address;
}

template <DType kType, int N>
struct Instruction;
#define SWITCHYARD_INSTRUCTIONS(n)                                                       \
  template <>                                                                            \
  struct Instruction<DType::kBF16, n>                                                    \
      : cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K,     \
                                                         cute::SM90::GMMA::Major::K> {}; \
  template <>                                                                            \
  struct Instruction<DType::kF16, n>                                                     \
      : cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<cute::SM90::GMMA::Major::K,       \
                                                       cute::SM90::GMMA::Major::K> {};   \
  template <>                                                                            \
  struct Instruction<DType::kF8E4M3, n> : cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<> {}
template <DType kType, int N>
struct RegisterInstruction;
#define SWITCHYARD_REGISTER_INSTRUCTIONS(n)                                              \
  template <>                                                                            \
  struct RegisterInstruction<DType::kBF16, n>                                            \
      : cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,     \
                                                         cute::SM90::GMMA::Major::K> {}; \
  SWITCHYARD_INSTRUCTIONS(n)
SWITCHYARD_REGISTER_INSTRUCTIONS(16);
SWITCHYARD_REGISTER_INSTRUCTIONS(32);
SWITCHYARD_REGISTER_INSTRUCTIONS(64);
SWITCHYARD_REGISTER_INSTRUCTIONS(80);
SWITCHYARD_REGISTER_INSTRUCTIONS(96);
SWITCHYARD_REGISTER_INSTRUCTIONS(128);
SWITCHYARD_REGISTER_INSTRUCTIONS(160);
SWITCHYARD_REGISTER_INSTRUCTIONS(192);
SWITCHYARD_REGISTER_INSTRUCTIONS(224);
SWITCHYARD_REGISTER_INSTRUCTIONS(256);
#undef SWITCHYARD_REGISTER_INSTRUCTIONS
#define SWITCHYARD_REGISTER_INSTRUCTIONS(n)     \
  template <>                                   \
  struct RegisterInstruction<DType::kF8E4M3, n> \
      : cute::SM90::GMMA::MMA_64x##n##x32_F32E5M2E4M3_RS_TN<> {}
SWITCHYARD_REGISTER_INSTRUCTIONS(8);
SWITCHYARD_REGISTER_INSTRUCTIONS(16);
SWITCHYARD_REGISTER_INSTRUCTIONS(24);
SWITCHYARD_REGISTER_INSTRUCTIONS(32);
SWITCHYARD_REGISTER_INSTRUCTIONS(40);
SWITCHYARD_REGISTER_INSTRUCTIONS(48);
SWITCHYARD_REGISTER_INSTRUCTIONS(56);
SWITCHYARD_REGISTER_INSTRUCTIONS(64);
SWITCHYARD_REGISTER_INSTRUCTIONS(80);
SWITCHYARD_REGISTER_INSTRUCTIONS(96);
SWITCHYARD_REGISTER_INSTRUCTIONS(128);
SWITCHYARD_REGISTER_INSTRUCTIONS(160);
SWITCHYARD_REGISTER_INSTRUCTIONS(192);
SWITCHYARD_REGISTER_INSTRUCTIONS(224);
SWITCHYARD_REGISTER_INSTRUCTIONS(256);
#undef SWITCHYARD_REGISTER_INSTRUCTIONS
#undef SWITCHYARD_INSTRUCTIONS

namespace detail {
template <typename Instruction, int... I>
__device__ __forceinline__ void multiply(std::uint64_t a, std::uint64_t b, float* acc,
                                         bool accumulate, std::integer_sequence<int, I...>) {
  Instruction::fma(a, b, acc[I]...,
                   accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <typename Instruction, int... I>
__device__ __forceinline__ void multiply_registers(const std::uint32_t (&a)[4], std::uint64_t b,
                                                   float* acc, bool accumulate,
                                                   std::integer_sequence<int, I...>) {
  Instruction::fma(a[0], a[1], a[2], a[3], b, acc[I]...,
                   accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
}  // namespace detail

// Issues D (+)= A B^T on operands of type kType. The result is valid once the warpgroup has waited
// for the commit group.
template <DType kType, int N>
__device__ __forceinline__ void multiply(std::uint64_t a, std::uint64_t b, float (&acc)[N / 2],
                                         bool accumulate) {
  detail::multiply<Instruction<kType, N>>(a, b, acc, accumulate,
                                          std::make_integer_sequence<int, N / 2>());
}

// The same with A in registers. They must not change until the products are complete.
template <DType kType, int N>
__device__ __forceinline__ void multiply(const std::uint32_t (&a)[4], std::uint64_t b,
                                         float (&acc)[N / 2], bool accumulate) {
  detail::multiply_registers<RegisterInstruction<kType, N>>(
      a, b, acc, accumulate, std::make_integer_sequence<int, N / 2>());
}

// Waits for the warpgroup's products in `sums`. The compiler does not know that a wait concerns
// accumulators: without a fence for each it may use them before the wait.
template <int kCount>
__device__ __forceinline__ void await_all_products(float (&sums)[kCount]) {
  cute::warpgroup_wait<0>();
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
}

}  // namespace switchyard::gpu
