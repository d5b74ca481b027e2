// Values that the compiler must not derive, and one fact that it must know.
#pragma once

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

namespace switchyard::gpu {

// threadIdx.x % kModulus, read from the hardware again. The compiler would compute values of
// threadIdx.x itself before the loop over tasks, and keep them: dozens of addresses, for which the
// math warps have no registers.
template <std::uint32_t kModulus>
__device__ __forceinline__ std::uint32_t reread_thread_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index % kModulus;
}
// blockIdx.x, for the same reason.
__device__ __forceinline__ std::uint32_t reread_block_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// A constant that the compiler does not learn. If it knew that a loop's first turn differs from the
// others it would make two copies of the loop, and both would have to be fetched.
template <std::uint32_t kValue>
__device__ __forceinline__ std::uint32_t opaque() {
  std::uint32_t value;
  asm volatile("mov.u32 %0, %1;" : "=r"(value) : "n"(kValue));
  return value;
}

// A number that the compiler does not recognise as one that it has.
__device__ __forceinline__ std::uint32_t opaque_value(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// True in one thread of a converged warp. The compiler knows that it is one thread and keeps what
// it computes in uniform registers, where the copy engine's instructions want their operands. For a
// thread chosen by its number it makes every such instruction a loop over all possible lanes.
__device__ __forceinline__ bool elect() { return cute::elect_one_sync() != 0; }

}  // namespace switchyard::gpu
