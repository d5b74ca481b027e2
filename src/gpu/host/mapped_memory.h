// Host memory that the device reads and writes while kernels run.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "gpu/host/cuda_error.h"

namespace switchyard::gpu {

// One T, zero at first. Every access by the host reads it from memory.
template <typename T>
class MappedMemory {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  MappedMemory() {
    SWITCHYARD_CUDA(cudaHostAlloc(&memory_, sizeof(T), cudaHostAllocMapped));
    *static_cast<T*>(memory_) = {};
  }
  ~MappedMemory() { cudaFreeHost(memory_); }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  volatile T& operator*() const { return *static_cast<volatile T*>(memory_); }
  volatile T* operator->() const { return &**this; }
  volatile T* on_device() const {
    void* pointer = nullptr;
    SWITCHYARD_CUDA(cudaHostGetDevicePointer(&pointer, memory_, 0));
    return static_cast<volatile T*>(pointer);
  }

 private:
  void* memory_ = nullptr;
};

}  // namespace switchyard::gpu
