// Arithmetic of single instructions: bounds, magnitudes, and conversions to bf16, fp16 and E4M3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::gpu {

// The smaller and the larger of two numbers. A NaN operand gives NaN.
__device__ __forceinline__ float at_most(float x, float limit) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
__device__ __forceinline__ float at_least(float x, float limit) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}

// The hardware's approximation of tanh. PTX promises 2^-11 of the value; an H200's is within 8e-6
// (see ActivationTest), a hundredth of the error of rounding the activations to bf16, and a tenth
// of that of rounding them to fp16.
__device__ __forceinline__ float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- Pairs of numbers of 16 bits in one word.

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// Packs in fp16. As in torch, a number beyond the range becomes infinite.
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// Packs in `type`, kBF16 or kF16.
__device__ __forceinline__ std::uint32_t pack(DType type, float low, float high) {
  return type == DType::kF16 ? pack_f16(low, high) : pack_bf16(low, high);
}

// The numbers of a bf16 pair.

__device__ __forceinline__ float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
// Returns, for each place of two pairs, the number of larger magnitude; NaN if one is. Its sign
// means nothing.
__device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
// The larger magnitude of a pair's two numbers.
__device__ __forceinline__ float largest_magnitude(std::uint32_t pair) {
  return fabsf(low_half(larger_magnitudes(pair, pair >> 16)));
}

// The E4M3 codes of two pairs of bf16 numbers, multiplied by `inverse`.
__device__ __forceinline__ std::uint32_t quantize(std::uint32_t a, std::uint32_t b, float inverse) {
  std::uint32_t codes;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(low_half(a) * inverse), "f"(high_half(a) * inverse), "f"(low_half(b) * inverse),
        "f"(high_half(b) * inverse));
  return codes;
}
__device__ __forceinline__ uint4 quantize(const uint4& first, const uint4& second, float inverse) {
  return {quantize(first.x, first.y, inverse), quantize(first.z, first.w, inverse),
          quantize(second.x, second.y, inverse), quantize(second.z, second.w, inverse)};
}

// Four E4M3 codes in fp16, which has all of their values: the lower two and the upper two.
__device__ __forceinline__ uint2 f16_of_codes(std::uint32_t codes) {
  uint2 values;
  asm("{\n .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %2;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n"
      " cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(values.x), "=r"(values.y)
      : "r"(codes));
  return values;
}

}  // namespace switchyard::gpu
