// Kernels that are launched while the one before them in the stream still runs.
#pragma once

#include <cuda_runtime_api.h>

namespace switchyard::gpu {

// Waits for the kernel before this one in the stream, and sees what it has written. Kernels that
// are launched early are there when it ends. Until then they read and write nothing that is not
// their own.
__device__ __forceinline__ void await_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel's blocks come to the SMs, where they wait in await_kernel_before(). Not
// called while this kernel waits for other ranks: ranks that share the device would find no room.
__device__ __forceinline__ void invite_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Launches a kernel so.
template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), unsigned blocks, unsigned threads,
                         cudaStream_t stream, const Params&... params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace switchyard::gpu
