// The GPU's clock.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// Nanoseconds of the timer that all SMs of a GPU share.
__device__ __forceinline__ std::uint64_t device_now_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace switchyard::gpu
