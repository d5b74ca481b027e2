// Functions of the NVIDIA driver that the runtime library lacks.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "gpu/host/cuda_error.h"
#include "switchyard/error.h"

namespace switchyard::gpu {

// Returns null if the driver has no such function.
template <typename Function>
Function find_driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  SWITCHYARD_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(entry) : nullptr;
}

template <typename Function>
Function driver_function(const char* name) {
  const auto function = find_driver_function<Function>(name);
  if (function == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the NVIDIA driver has no {}; it must be 525 or newer", name));
  }
  return function;
}

}  // namespace switchyard::gpu
