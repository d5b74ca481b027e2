#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

#include "early_copy.h"
#include "gpu/ptx/early_launch.cuh"

namespace switchyard::testing {
namespace {

__global__ void early_copy(std::uint32_t* const to, const std::uint32_t* const from,
                           const std::size_t words) {
  gpu::invite_next_kernel();
  gpu::await_kernel_before();
  constexpr int kPauses = 20;
  for (int i = 0; i < kPauses; ++i) __nanosleep(1000);
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

}  // namespace

void enqueue_early_copy(void* to, const void* from, std::size_t bytes, const gpu::Stream& stream) {
  constexpr unsigned kBlocks = 4, kThreads = 256;
  const cudaError_t result = gpu::launch_early(
      early_copy, kBlocks, kThreads, static_cast<cudaStream_t>(stream.handle()),
      static_cast<std::uint32_t*>(to), static_cast<const std::uint32_t*>(from), bytes / 4);
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

}  // namespace switchyard::testing
