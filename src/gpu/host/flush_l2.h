#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace switchyard::gpu {

// Enqueues a read of zeroed device memory.
void read_through_l2(const void* data, std::size_t bytes, cudaStream_t stream);

}  // namespace switchyard::gpu
