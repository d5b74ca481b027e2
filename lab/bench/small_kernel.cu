#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <string>

#include "bench/small_kernel.h"
#include "gpu/ptx/early_launch.cuh"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVector = 8;  // bf16 numbers of a load of 16 bytes

// A block has a row.
template <bool kEarly>
__global__ void __launch_bounds__(kThreads) small_kernel(const SmallKernel p) {
  if constexpr (kEarly) {
    // Every block waits, so this kernel ends after the one before it, and a kernel that waits for
    // this one has waited for both.
    gpu::invite_next_kernel();
    gpu::await_kernel_before();
  }
  const std::size_t row = std::size_t{blockIdx.x} * static_cast<unsigned>(p.hidden);
  float squares = 0;
  for (int column = static_cast<int>(threadIdx.x) * kVector; column < p.hidden;
       column += kThreads * kVector) {
    const std::size_t at = row + static_cast<unsigned>(column);
    uint4 sums = *reinterpret_cast<const uint4*>(p.residual + at);
    const uint4 deltas = *reinterpret_cast<const uint4*>(p.delta + at);
    auto* const s = reinterpret_cast<__nv_bfloat162*>(&sums);
    const auto* const d = reinterpret_cast<const __nv_bfloat162*>(&deltas);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      s[i] = __hadd2(s[i], d[i]);
      const float2 sum = __bfloat1622float2(s[i]);
      squares += sum.x * sum.x + sum.y * sum.y;
    }
    *reinterpret_cast<uint4*>(p.sum + at) = sums;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  __shared__ float of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) squares += of_warp[w];
  const float factor = rsqrtf(squares / static_cast<float>(p.hidden) + SmallKernel::kEpsilon);
  // A thread reads what it has stored itself.
  for (int column = static_cast<int>(threadIdx.x) * kVector; column < p.hidden;
       column += kThreads * kVector) {
    const std::size_t at = row + static_cast<unsigned>(column);
    uint4 values = *reinterpret_cast<const uint4*>(p.sum + at);
    auto* const v = reinterpret_cast<__nv_bfloat162*>(&values);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 sum = __bfloat1622float2(v[i]);
      v[i] = __floats2bfloat162_rn(sum.x * factor, sum.y * factor);
    }
    *reinterpret_cast<uint4*>(p.normal + at) = values;
  }
}

}  // namespace

void SmallKernel::enqueue(const gpu::Stream& stream, bool early) const {
  const auto blocks = static_cast<unsigned>(tokens);
  const auto queue = static_cast<cudaStream_t>(stream.handle());
  cudaError_t result{};
  if (early) {
    result = gpu::launch_early(small_kernel<true>, blocks, kThreads, queue, *this);
  } else {
    small_kernel<false><<<blocks, kThreads, 0, queue>>>(*this);
    result = cudaGetLastError();
  }
  if (result == cudaSuccess) return;
  throw Error(ErrorCode::kSystem,
              std::string("the small kernel was not launched: ") + cudaGetErrorString(result));
}

}  // namespace switchyard::bench
