// Elements of rows in registers: bf16, f16 and f32 as floats, eight columns of a lane at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/ptx/memory.cuh"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

inline constexpr std::uint32_t kElementColumns = 256;  // of a warp: eight of each lane

// An element's bits, and its value.
template <DType kType>
struct Element {
  using Bits = std::uint16_t;
  __device__ static float get(std::uint32_t bits) {
    if constexpr (kType == DType::kBF16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  __device__ static std::uint32_t put(float value) {
    if constexpr (kType == DType::kBF16) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
    return __half_as_ushort(__float2half_rn(value));
  }
};
template <>
struct Element<DType::kF32> {
  using Bits = std::uint32_t;
  __device__ static float get(std::uint32_t bits) { return __uint_as_float(bits); }
  __device__ static std::uint32_t put(float value) { return __float_as_uint(value); }
};

// A lane's eight columns of a row: neighbours, or, where vectors are not aligned, 32 apart.
template <bool kVectors>
struct Columns {
  std::int64_t first, end;

  __device__ Columns(std::uint32_t group, std::int64_t columns)
      : first(std::int64_t{group} * kElementColumns + (kVectors ? 8 : 1) * (threadIdx.x % 32)),
        end(columns) {}
  __device__ std::int64_t at(int i) const { return first + (kVectors ? i : 32 * i); }
  // With vectors all eight are there or none.
  __device__ bool has(int i) const { return kVectors ? first < end : at(i) < end; }
};

// Eight elements in words of 32 bits, which stay in registers: every index is a constant.
template <DType kType>
struct Eight {
  using Bits = typename Element<kType>::Bits;
  static constexpr int kWords = 2 * sizeof(Bits), kPerWord = 8 / kWords;
  std::uint32_t words[kWords];

  __device__ Eight() {
#pragma unroll
    for (std::uint32_t& word : words) word = 0;
  }
  __device__ std::uint32_t bits(int i) const {
    if constexpr (kPerWord == 1) return words[i];
    return words[i / 2] >> 16 * (i % 2) & 0xffff;
  }
  // Sets each element once, where there were zeros.
  __device__ void put_bits(int i, std::uint32_t bits) {
    words[i / kPerWord] |= bits << 16 * (i % kPerWord);
  }
  template <bool kVectors>
  __device__ void load(const void* row, const Columns<kVectors>& columns) {
    const auto* const from = static_cast<const Bits*>(row);
    if constexpr (kVectors) {
      if (!columns.has(0)) return;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from + columns.first)[i];
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (columns.has(i)) put_bits(i, from[columns.at(i)]);
      }
    }
  }
  template <bool kVectors>
  __device__ void store(void* row, const Columns<kVectors>& columns) const {
    auto* const to = static_cast<Bits*>(row);
    if constexpr (kVectors) {
      if (!columns.has(0)) return;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        store_vector(to + columns.first + 16 / sizeof(Bits) * i,
                     uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (columns.has(i)) to[columns.at(i)] = static_cast<Bits>(bits(i));
      }
    }
  }
  __device__ float get(int i) const { return Element<kType>::get(bits(i)); }
  __device__ void put(int i, float value) { put_bits(i, Element<kType>::put(value)); }
};

// Scales a token's sum and stores it, or adds it to what is there. Call has out, to, out_stride in
// elements, scale and accumulate.
template <DType kTo, typename Call, bool kVectors>
__device__ __forceinline__ void store_sum_as(const Call& call, std::uint32_t token,
                                             const Columns<kVectors>& columns, float (&sum)[8]) {
  auto* const row =
      static_cast<typename Element<kTo>::Bits*>(call.out) + std::int64_t{token} * call.out_stride;
  Eight<kTo> before, after;
  if (call.accumulate) before.load(row, columns);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value = __fmul_rn(sum[i], call.scale);
    if (call.accumulate) value = __fadd_rn(value, before.get(i));
    after.put(i, value);
  }
  after.store(row, columns);
}

template <typename Call, bool kVectors>
__device__ __forceinline__ void store_sum(const Call& call, std::uint32_t token,
                                          const Columns<kVectors>& columns, float (&sum)[8]) {
  switch (call.to) {
    case DType::kF32: return store_sum_as<DType::kF32>(call, token, columns, sum);
    case DType::kF16: return store_sum_as<DType::kF16>(call, token, columns, sum);
    default: return store_sum_as<DType::kBF16>(call, token, columns, sum);
  }
}

}  // namespace switchyard::gpu
