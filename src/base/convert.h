// Conversions between fp32 and the narrow types of checkpoints. All of them are branch-free, so
// that the compiler vectorises the array forms.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "switchyard/tensor.h"

// Forces inlining. This header is compiled for several instruction sets. The linker merges
// out-of-line copies, and could keep one that the processor at hand cannot run.
#define SWITCHYARD_ALWAYS_INLINE [[gnu::always_inline]] inline

namespace switchyard {

// Returns a if the condition holds, else b. It uses arithmetic rather than a branch: the compiler
// must not move floating-point work into one arm of a conditional, which would keep loops scalar.
SWITCHYARD_ALWAYS_INLINE constexpr std::uint32_t select(bool condition, std::uint32_t a,
                                                        std::uint32_t b) {
  return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(condition)));
}

SWITCHYARD_ALWAYS_INLINE float bf16_to_f32(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

// Rounds to nearest even. A NaN stays a NaN: its quiet bit is set, because rounding could carry a
// payload of all ones into infinity and truncation could clear a payload in the low half.
SWITCHYARD_ALWAYS_INLINE std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded);
}

SWITCHYARD_ALWAYS_INLINE float f16_to_f32(std::uint16_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x8000u) << 16;
  const std::uint32_t exponent = (code >> 10) & 0x1fu;
  const std::uint32_t mantissa = code & 0x3ffu;
  const std::uint32_t normal = ((exponent + 112u) << 23) | (mantissa << 13);
  const std::uint32_t special = 0x7f800000u | (mantissa << 13);
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(mantissa)) * 0x1p-24f);
  const std::uint32_t magnitude =
      select(exponent == 0, subnormal, select(exponent == 31, special, normal));
  return std::bit_cast<float>(sign | magnitude);
}

// Rounds to nearest even; beyond 65520 infinity; subnormals are kept.
SWITCHYARD_ALWAYS_INLINE std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t a = bits & 0x7fffffffu;
  // Capped before rounding so that nothing above infinity wraps into a finite code.
  const std::uint32_t capped = select(a < 0x47800000u, a, 0x47800000u);
  const std::uint32_t normal = (capped + 0xfffu + ((capped >> 13) & 1u) - (112u << 23)) >> 13;
  // Adding 0.5, whose ulp is the f16 subnormal step 2^-24, makes the FPU do the rounding.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(capped) + 0.5f) - 0x3f000000u;
  const std::uint32_t finite = select(a < 0x38800000u, subnormal, normal);
  const std::uint32_t nan = 0x7e00u | ((a >> 13) & 0x3ffu);
  return static_cast<std::uint16_t>(sign | select(a > 0x7f800000u, nan, finite));
}

// OCP FP8 E4M3 ("fn": no infinity, one NaN per sign at 0x7f, largest value 448).
SWITCHYARD_ALWAYS_INLINE float f8e4m3_to_f32(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = (code >> 3) & 0xfu;
  const std::uint32_t mantissa = code & 0x7u;
  const std::uint32_t normal = ((exponent + 120u) << 23) | (mantissa << 20);
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(mantissa)) * 0x1p-9f);
  const std::uint32_t finite = select(exponent == 0, subnormal, normal);
  const bool is_nan = (code & 0x7fu) == 0x7fu;
  return std::bit_cast<float>(sign | select(is_nan, 0x7fc00000u, finite));
}

// Rounds to nearest even, saturating: everything beyond 448, infinity included, becomes +-448.
SWITCHYARD_ALWAYS_INLINE std::uint8_t f32_to_f8e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t a = bits & 0x7fffffffu;
  const std::uint32_t normal = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  // 2^14 has an ulp of 2^-9, the subnormal step.
  const std::uint32_t small = select(a < 0x3c800000u, a, 0u);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(small) + 16384.0f) - 0x46800000u;
  const std::uint32_t saturated = select(normal < 0x7eu, normal, 0x7eu);
  const std::uint32_t finite = select(a < 0x3c800000u, subnormal, saturated);
  return static_cast<std::uint8_t>(sign | select(a > 0x7f800000u, 0x7fu, finite));
}

// OCP FP4 E2M1: no infinity, no NaN. Rounds to nearest, halfway cases away from zero, saturating at
// +-6. A NaN becomes a zero.
SWITCHYARD_ALWAYS_INLINE std::uint8_t f32_to_f4e2m1(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const float a = std::bit_cast<float>(bits & 0x7fffffffu);
  const int code = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) +
                   (a >= 3.5f) + (a >= 5.0f);
  return static_cast<std::uint8_t>(((bits >> 28) & 8u) | static_cast<std::uint32_t>(code));
}

// 2^(code - 127), or NaN for 0xff: the exponent-only scales of MX formats and DeepSeek-V4.
SWITCHYARD_ALWAYS_INLINE float f8e8m0_to_f32(std::uint8_t code) {
  const std::uint32_t normal = static_cast<std::uint32_t>(code) << 23;
  const std::uint32_t bits =
      select(code == 0, 0x00400000u, select(code == 0xffu, 0x7fc00000u, normal));
  return std::bit_cast<float>(bits);
}

// Number `i` of scales of four-bit weights: f8_e8m0, bf16, f16 or f32.
SWITCHYARD_ALWAYS_INLINE float scale_to_f32(const void* scales, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kF8E8M0: return f8e8m0_to_f32(static_cast<const std::uint8_t*>(scales)[i]);
    case DType::kBF16: return bf16_to_f32(static_cast<const std::uint16_t*>(scales)[i]);
    case DType::kF16: return f16_to_f32(static_cast<const std::uint16_t*>(scales)[i]);
    default: return static_cast<const float*>(scales)[i];
  }
}

SWITCHYARD_ALWAYS_INLINE void bf16_to_f32(const std::uint16_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = bf16_to_f32(in[i]);
}
SWITCHYARD_ALWAYS_INLINE void f32_to_bf16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = f32_to_bf16(in[i]);
}
SWITCHYARD_ALWAYS_INLINE void f16_to_f32(const std::uint16_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = f16_to_f32(in[i]);
}
SWITCHYARD_ALWAYS_INLINE void f32_to_f16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = f32_to_f16(in[i]);
}
SWITCHYARD_ALWAYS_INLINE void f8e4m3_to_f32(const std::uint8_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = f8e4m3_to_f32(in[i]);
}
SWITCHYARD_ALWAYS_INLINE void f32_to_f8e4m3(const float* in, std::uint8_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = f32_to_f8e4m3(in[i]);
}

}  // namespace switchyard

#undef SWITCHYARD_ALWAYS_INLINE
