// Results of CUDA runtime calls, as typed errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace switchyard::gpu {

// Throws Error{kSystem} with the call, the error's name and its text unless `result` is success.
// Clears the runtime's last error, as far as the runtime allows it.
void check(cudaError_t result, const char* call);

// Does the same as check() for allocations: throws Error{kCapacityExceeded} with the bytes asked
// for and the bytes free if memory was short.
void check_allocation(cudaError_t result, const char* call, std::size_t bytes);

}  // namespace switchyard::gpu

// Makes a call and, on failure, throws with the call's source text.
#define SWITCHYARD_CUDA(call) ::switchyard::gpu::check((call), #call)
