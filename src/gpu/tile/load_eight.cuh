// Neighbouring elements of rows of any type, as 16-bit numbers in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/ptx/convert.cuh"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// Elements [at, at + 8) of `x`, which are of `type` (bf16, f16 or f32), as bf16 or f16.
__device__ __forceinline__ uint4 load_eight(const void* x, DType type, std::int64_t at, DType as) {
  if (type == as) {
    const auto* const from = static_cast<const std::uint16_t*>(x) + at;
    if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
      return __ldg(reinterpret_cast<const uint4*>(from));
    }
    const auto pair = [&](int i) {
      return std::uint32_t{__ldg(from + 2 * i)} | std::uint32_t{__ldg(from + 2 * i + 1)} << 16;
    };
    return {pair(0), pair(1), pair(2), pair(3)};
  }
  const auto value = [&](int i) {
    if (type == DType::kF32) return __ldg(static_cast<const float*>(x) + at + i);
    return type == DType::kF16 ? __half2float(static_cast<const __half*>(x)[at + i])
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at + i]);
  };
  const auto pair = [&](int i) { return pack(as, value(2 * i), value(2 * i + 1)); };
  return {pair(0), pair(1), pair(2), pair(3)};
}

}  // namespace switchyard::gpu
