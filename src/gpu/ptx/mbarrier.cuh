// Barriers within a block: mbarriers in shared memory, and the sixteen named ones.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// --- mbarriers, by their addresses in shared memory.

__device__ __forceinline__ void init_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Publishes new barriers to the block's other threads, to other blocks and to the copy engine.
__device__ __forceinline__ void fence_new_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// True if the phase of that parity is complete. The hardware may suspend the thread in try_wait()
// for microseconds before it answers no; test_wait() answers at once.
#define SWITCHYARD_MBARRIER_QUESTION(name)                                            \
  __device__ __forceinline__ bool name(std::uint32_t barrier, std::uint32_t parity) { \
    std::uint32_t done;                                                               \
    asm volatile("{\n .reg .pred p;\n mbarrier." #name                                \
                 ".parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"    \
                 : "=r"(done)                                                         \
                 : "r"(barrier), "r"(parity)                                          \
                 : "memory");                                                         \
    return done != 0;                                                                 \
  }
SWITCHYARD_MBARRIER_QUESTION(try_wait)
SWITCHYARD_MBARRIER_QUESTION(test_wait)
#undef SWITCHYARD_MBARRIER_QUESTION

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that the copy engine will bring before the phase completes.
__device__ __forceinline__ void arrive_expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives when all earlier cp.async of this thread have landed. The arrival counts like an ordinary
// one.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// --- Named barriers, of `Threads` threads that all name barrier `id`.

template <int Threads>
__device__ __forceinline__ void named_barrier(std::uint32_t id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// Waits at a named barrier whose warps may be at different places in the code. (bar.sync requires
// one place.)
template <int Threads>
__device__ __forceinline__ void named_barrier_anywhere(std::uint32_t id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// Arrives without waiting. Publishes this thread's writes to the other threads.
template <int Threads>
__device__ __forceinline__ void named_barrier_arrive(std::uint32_t id) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// Waits at the barrier; returns true if any of the threads passed true.
template <int Threads>
__device__ __forceinline__ bool named_barrier_any(std::uint32_t id, bool says) {
  std::uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, %2, %3, p;\n"
      " selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(says ? 1u : 0u), "r"(id), "n"(Threads)
      : "memory");
  return any != 0;
}
// Waits at the barrier; returns how many of the threads passed true.
template <int Threads>
__device__ __forceinline__ std::uint32_t named_barrier_count(std::uint32_t id, bool says) {
  std::uint32_t count;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n bar.red.popc.u32 %0, %2, %3, p;\n}"
               : "=r"(count)
               : "r"(says ? 1u : 0u), "r"(id), "n"(Threads)
               : "memory");
  return count;
}

}  // namespace switchyard::gpu
