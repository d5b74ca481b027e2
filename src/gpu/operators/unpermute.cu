// unpermute(): each token's weighted sum of rows, in the order of k, in fp32.
//
// A warp has 256 columns of one token. It loads 16 bytes per lane where addresses allow, of several
// rows at once: the bytes in flight decide the speed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/operators/launch.h"
#include "gpu/ptx/memory.cuh"

namespace switchyard::gpu {
namespace {

constexpr std::uint32_t kThreads = 256, kWarps = kThreads / 32, kColumns = 256;

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
      : first(std::int64_t{group} * kColumns + (kVectors ? 8 : 1) * (threadIdx.x % 32)),
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
  // Each once, into zeros.
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

template <DType kTo, bool kVectors>
__device__ __forceinline__ void store_sum(const UnpermuteCall& call, std::uint32_t token,
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

__device__ __forceinline__ float weight_of(const UnpermuteCall& call, std::size_t slot) {
  if (call.weights == nullptr) return 1;
  if (!call.bf16_weights) return static_cast<const float*>(call.weights)[slot];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(call.weights)[slot]);
}

template <DType kIn, bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_rows(const UnpermuteCall call) {
  constexpr std::uint32_t kAtOnce = kIn == DType::kF32 ? 4 : 8;
  const std::uint32_t lane = threadIdx.x % 32;
  const auto groups =
      static_cast<std::uint32_t>(protocol::ceil_div<std::int64_t>(call.columns, kColumns));
  const std::uint64_t unit = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (unit >= std::uint64_t{call.tokens} * groups) return;
  const auto token = static_cast<std::uint32_t>(unit / groups);
  const Columns<kVectors> columns(static_cast<std::uint32_t>(unit % groups), call.columns);
  const auto* const rows = static_cast<const typename Element<kIn>::Bits*>(call.rows);
  float sum[8] = {};
#pragma unroll 1
  for (std::uint32_t k0 = 0; k0 < call.top_k; k0 += 32) {
    std::int32_t mine = -1;
    float weight = 0;
    if (k0 + lane < call.top_k) {
      const std::size_t slot = std::size_t{token} * call.top_k + k0 + lane;
      mine = call.positions[slot];
      weight = weight_of(call, slot);
    }
    if (mine >= call.num_rows) mine = -1;
    const std::uint32_t count = min(32u, call.top_k - k0);
#pragma unroll 1
    for (std::uint32_t first = 0; first < count; first += kAtOnce) {
      Eight<kIn> cells[kAtOnce];
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        // Lanes from `count` on have no position.
        const std::int32_t row = __shfl_sync(~0u, mine, first + i);
        if (row >= 0) cells[i].load(rows + row * call.row_stride, columns);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const bool there = __shfl_sync(~0u, mine, first + i) >= 0;
        const float factor = __shfl_sync(~0u, weight, first + i);
        if (!there) continue;
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = __fmaf_rn(factor, cells[i].get(c), sum[c]);
      }
    }
  }
  switch (call.to) {
    case DType::kF32:
      return store_sum<DType::kF32>(call, token, columns, sum);
    case DType::kF16:
      return store_sum<DType::kF16>(call, token, columns, sum);
    default:
      return store_sum<DType::kBF16>(call, token, columns, sum);
  }
}

bool aligned(const void* data, std::int64_t stride, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         stride * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
}

template <DType kIn>
void launch(const UnpermuteCall& call, unsigned blocks, bool vectors, cudaStream_t stream) {
  if (vectors) {
    sum_rows<kIn, true><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    sum_rows<kIn, false><<<blocks, kThreads, 0, stream>>>(call);
  }
}

}  // namespace

cudaError_t launch_unpermute(const UnpermuteCall& call, cudaStream_t stream) {
  const bool vectors = call.columns % 8 == 0 && aligned(call.rows, call.row_stride, call.in) &&
                       aligned(call.out, call.out_stride, call.to);
  const std::int64_t units =
      std::int64_t{call.tokens} * protocol::ceil_div<std::int64_t>(call.columns, kColumns);
  const auto blocks = protocol::ceil_div<std::int64_t>(units, kWarps);
  if (blocks > std::int64_t{0x7fffffff}) return cudaErrorInvalidConfiguration;
  const auto count = static_cast<unsigned>(blocks);
  switch (call.in) {
    case DType::kF32:
      launch<DType::kF32>(call, count, vectors, stream);
      break;
    case DType::kF16:
      launch<DType::kF16>(call, count, vectors, stream);
      break;
    default:
      launch<DType::kBF16>(call, count, vectors, stream);
  }
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
