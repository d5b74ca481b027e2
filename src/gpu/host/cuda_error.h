// Results of CUDA runtime calls, as typed errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace switchyard::gpu {

// Throws Error{kSystem} with the call, the error's name and its text unless `result` is success.
// Forgets the error, as far as the runtime lets it be forgotten.
void check(cudaError_t result, const char* call);

// As check(), with Error{kCapacityExceeded} telling the bytes asked for and the bytes free where
// memory is what was missing.
void check_allocation(cudaError_t result, const char* call, std::size_t bytes);

}  // namespace switchyard::gpu

// Calls, and throws naming the call as it is written.
#define SWITCHYARD_CUDA(call) ::switchyard::gpu::check((call), #call)
