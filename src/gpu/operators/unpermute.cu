// unpermute(): each token's weighted sum of rows, in the order of k, in fp32.
//
// A warp has 256 columns of one token. It loads 16 bytes per lane where addresses allow, of several
// rows at once: the bytes in flight decide the speed.
#include "gpu/operators/elements.cuh"
#include "gpu/operators/launch.h"

namespace switchyard::gpu {
namespace {

constexpr std::uint32_t kThreads = 256, kWarps = kThreads / 32;

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
      static_cast<std::uint32_t>(protocol::ceil_div<std::int64_t>(call.columns, kElementColumns));
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
  store_sum(call, token, columns, sum);
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

template <DType kIn>
cudaError_t load_of_type() {
  cudaFuncAttributes facts;
  const cudaError_t result = cudaFuncGetAttributes(&facts, sum_rows<kIn, true>);
  return result != cudaSuccess ? result : cudaFuncGetAttributes(&facts, sum_rows<kIn, false>);
}

}  // namespace

cudaError_t load_unpermute_kernels() {
  for (const cudaError_t result :
       {load_of_type<DType::kF32>(), load_of_type<DType::kF16>(), load_of_type<DType::kBF16>()}) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

cudaError_t launch_unpermute(const UnpermuteCall& call, cudaStream_t stream) {
  const bool vectors = call.columns % 8 == 0 && aligned(call.rows, call.row_stride, call.in) &&
                       aligned(call.out, call.out_stride, call.to);
  const std::int64_t units =
      std::int64_t{call.tokens} * protocol::ceil_div<std::int64_t>(call.columns, kElementColumns);
  const auto blocks = protocol::ceil_div<std::int64_t>(units, kWarps);
  if (blocks > std::int64_t{0x7fffffff}) return cudaErrorInvalidConfiguration;
  const auto count = static_cast<unsigned>(blocks);
  switch (call.in) {
    case DType::kF32: launch<DType::kF32>(call, count, vectors, stream); break;
    case DType::kF16: launch<DType::kF16>(call, count, vectors, stream); break;
    default: launch<DType::kBF16>(call, count, vectors, stream);
  }
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
