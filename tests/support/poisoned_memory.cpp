// New memory of a GPU is full of ones in tests: NaN as numbers, odd as addresses, -1 as counts. The
// driver's own is often zero, and kernels that read it before anything wrote there would pass. The
// linker makes each call of cudaMalloc() one of __wrap_cudaMalloc().
#include <cuda_runtime_api.h>

#include <cstddef>

extern "C" {
cudaError_t __real_cudaMalloc(void** memory, std::size_t bytes);

cudaError_t __wrap_cudaMalloc(void** memory, std::size_t bytes) {
  cudaError_t error = __real_cudaMalloc(memory, bytes);
  if (error == cudaSuccess) error = cudaMemset(*memory, 0xff, bytes);
  // Streams that do not block would not wait for it.
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  return error;
}
}
