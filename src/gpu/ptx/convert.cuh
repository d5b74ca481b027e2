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
// The pair of the larger magnitudes among four pairs.
__device__ __forceinline__ std::uint32_t largest_pair(const uint4& v) {
  return larger_magnitudes(larger_magnitudes(v.x, v.y), larger_magnitudes(v.z, v.w));
}
// The larger magnitude of a pair's two numbers.
__device__ __forceinline__ float largest_magnitude(std::uint32_t pair) {
  return fabsf(low_half(larger_magnitudes(pair, pair >> 16)));
}

// The E4M3 codes of four numbers, rounded to nearest even, saturating.
__device__ __forceinline__ std::uint32_t e4m3_codes(float a, float b, float c, float d) {
  std::uint32_t codes;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}
// The E4M3 codes of two pairs of bf16 numbers, multiplied by `inverse`.
__device__ __forceinline__ std::uint32_t quantize(std::uint32_t a, std::uint32_t b, float inverse) {
  return e4m3_codes(low_half(a) * inverse, high_half(a) * inverse, low_half(b) * inverse,
                    high_half(b) * inverse);
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
// The largest magnitude of sixteen E4M3 codes; NaN if one is. (Without their signs, codes are in
// the order of their magnitudes, and NaN's is the last.)
__device__ __forceinline__ float largest_code(const uint4& codes) {
  std::uint32_t most = 0;
#pragma unroll
  for (const std::uint32_t word : {codes.x, codes.y, codes.z, codes.w}) {
    most = __vmaxu4(most, word & 0x7f7f7f7fu);
  }
  most = __vmaxu4(most, most >> 16);
  const std::uint32_t values = f16_of_codes(__vmaxu4(most, most >> 8)).x;
  return __low2float(reinterpret_cast<const __half2&>(values));
}
// Four E4M3 codes of numbers that are `ratio` times those of four.
__device__ __forceinline__ std::uint32_t rescale(std::uint32_t codes, float ratio) {
  const uint2 values = f16_of_codes(codes);
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(values.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(values.y));
  return e4m3_codes(low.x * ratio, low.y * ratio, high.x * ratio, high.y * ratio);
}
__device__ __forceinline__ uint4 rescale(const uint4& codes, float ratio) {
  return {rescale(codes.x, ratio), rescale(codes.y, ratio), rescale(codes.z, ratio),
          rescale(codes.w, ratio)};
}

}  // namespace switchyard::gpu
