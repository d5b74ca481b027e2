// Pairs of blocks, clusters of kPair: blocks 2 c and 2 c + 1 are pair c, and each sees the other's
// shared memory.
#pragma once

#include <cstdint>

#include "gpu/ptx/machine.h"

namespace switchyard::gpu {

__device__ __forceinline__ std::uint32_t rank_in_pair() { return blockIdx.x % kPair; }
// Returns the address, in the shared memory of the pair's block `rank`, that corresponds to
// `address` in this block.
__device__ __forceinline__ std::uint32_t address_in_pair(std::uint32_t address,
                                                         std::uint32_t rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void store_in_pair(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
// Orders what this thread writes and reads before and after it, as the pair's other block sees it.
__device__ __forceinline__ void fence_pair() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}
// Arrives at an mbarrier of either block. It is not a release: one that the other block can see
// would wait for all stores under way.
__device__ __forceinline__ void arrive_in_pair(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for all threads of both blocks that have not left. It has no deadline of its own, because
// every wait before it has one. Its two halves stay together: under the sanitizers a kernel hangs
// if a warp does anything between them.
__device__ __forceinline__ void pair_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

}  // namespace switchyard::gpu
