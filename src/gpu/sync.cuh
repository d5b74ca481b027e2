// How threads of the layer kernel wait for and signal each other: mbarriers within a block, words
// in device memory between blocks. Every wait has a deadline.
#pragma once

#include <cuda/atomic>
#include <cute/arch/cluster_sm90.hpp>

#include "gpu/layer_params.h"
#include "protocol/wait.h"

namespace switchyard::gpu {

struct DevicePace {
  // A look costs a round trip to the L2 cache, and so does the look at the abort word.
  static constexpr std::uint32_t kLooksPerAbortCheck = 32;
  __device__ bool reads_clock(std::uint32_t looks) const { return looks % 64 == 0; }
  __device__ std::uint64_t now() const {
    std::uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }
  __device__ void pause(std::uint32_t looks) const {
    if (looks > 1024) __nanosleep(256);  // nobody is about to signal: leave the L2 cache alone
  }
};

// Whether the block goes on: a word in its shared memory.
enum class Going : std::uint32_t { kOn, kGivenUp, kRingStuck };

// What all waits of a pass have in common.
struct Waiter {
  const protocol::Heaps* heaps;
  volatile std::uint32_t* given_up;  // in the host's memory
  volatile Going* going;
  std::uint64_t epoch;
  std::uint64_t deadline_ns;

  // For what other blocks do.
  template <typename Ready>
  __device__ __forceinline__ bool wait(protocol::Phase phase, std::uint64_t slot,
                                       Ready&& ready) const {
    return wait_for(ready, [&] { return protocol::Missing{phase, heaps->rank, slot, 1, 0}; });
  }
  // For what other ranks do, perhaps; see protocol::wait_until.
  template <typename Ready, typename WhatIsMissing>
  __device__ __forceinline__ bool wait_for(Ready&& ready, WhatIsMissing&& missing) const {
    DevicePace pace;
    if (protocol::wait_until(*heaps, epoch, deadline_ns, pace, ready, missing) ==
        protocol::WaitResult::kReady) {
      return true;
    }
    *given_up = 1;
    *going = Going::kGivenUp;
    return false;
  }
};

// Words shared by the blocks of one GPU. Gpu scope: other GPUs never look at these.
__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* word) {
  return cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>(
             *const_cast<std::uint32_t*>(word))
      .load(cuda::memory_order_acquire);
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Orders what this thread wrote, and what it saw its block write before a block barrier, before the
// addition.
__device__ __forceinline__ void add_release_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// The same, and what the word was before. Nobody waits for that who does not use it; who does and
// wants to see what others released with their additions needs a fence then.
__device__ __forceinline__ std::uint32_t fetch_add_released_gpu(std::uint32_t* word,
                                                                std::uint32_t value) {
  std::uint32_t before;
  fence_gpu();
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// What others wrote with ordinary stores and this thread acquired, the copy engine must see too.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// A barrier of all blocks, in two halves. Both are called by all threads of the block.
__device__ __forceinline__ void grid_arrive(std::uint32_t* word) {
  __syncthreads();
  if (threadIdx.x == 0) add_release_gpu(word, 1);
}
// The first half alone: true in the last block to come, which sees what all others wrote.
__device__ __forceinline__ bool grid_arrive_last(std::uint32_t* word) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>(*word).fetch_add(
               1, cuda::memory_order_acq_rel) == gridDim.x - 1;
  }
  return __syncthreads_or(last);
}
// Waits until all blocks have arrived; false if the pass was given up. By one thread.
__device__ __forceinline__ bool all_arrived(const Waiter& waiter, const std::uint32_t* word) {
  return waiter.wait(protocol::Phase::kGate, blockIdx.x,
                     [&] { return load_acquire_gpu(word) >= gridDim.x; });
}
__device__ __forceinline__ bool grid_await(const Waiter& waiter, const std::uint32_t* word) {
  return __syncthreads_and(threadIdx.x != 0 || all_arrived(waiter, word));
}

// 16 bytes at once, which has to be said: the compiler makes four stores of an assignment whose
// value comes out of inline assembly.
__device__ __forceinline__ void store_vector(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Two words that ranks tell each other, at an even place: each is whole, and that is all.
struct WordPair {
  std::uint64_t first, second;
};
__device__ __forceinline__ void store_words(std::uint64_t* to, const WordPair& words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words.first),
               "l"(words.second)
               : "memory");
}
__device__ __forceinline__ WordPair load_words(const std::uint64_t* from) {
  WordPair words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_shared_vector(std::uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_vector(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_float(std::uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ float2 load_shared_floats(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float load_shared_float(std::uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_word(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// An mbarrier in shared memory and the two things done with it.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
// Whether the phase of that parity is complete. The hardware may hold try_wait() up for
// microseconds before it says no; test_wait() does not wait.
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
__device__ __forceinline__ void arrive_expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives when all earlier cp.async of this thread have landed; counted like an ordinary arrival.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void init_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// A box of a matrix, from column k and `row` on, by the copy engine.
__device__ __forceinline__ void load_rows(const CUtensorMap& map, std::uint32_t to,
                                          std::uint32_t barrier, int k, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(k), "r"(row)
      : "memory");
}

// Contiguous bytes, in multiples of 16, to and from memory.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_bytes(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// This thread's stores until here are a group; and waiting for all groups but the newest to be
// there, for this thread to see. (Without a deadline: it is this GPU's memory that it waits for.)
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kNewest>
__device__ __forceinline__ void await_all_stores_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

// Of barriers that were just made, before other threads, blocks and the copy engine use them.
__device__ __forceinline__ void fence_new_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Large passes are launched in pairs (clusters of kPair blocks), 2 c and 2 c + 1 being pair c. The
// two see each other's shared memory.
__device__ __forceinline__ std::uint32_t rank_in_pair() { return blockIdx.x % kPair; }
// The place in the shared memory of the pair's block `rank` that is at `address` in this block's.
__device__ __forceinline__ std::uint32_t address_in_pair(std::uint32_t address,
                                                         std::uint32_t rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// At a barrier of either block. Orders nothing that this thread wrote: a release for the other
// block to see would wait for all stores under way.
__device__ __forceinline__ void arrive_in_pair(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// All threads of both blocks that have not left. It has no deadline of its own: what comes before
// it has. (Its halves stay together: the sanitizers' versions of a kernel hang if a warp does
// anything between them.)
__device__ __forceinline__ void pair_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// A place in a ring of stages, each with a `full` and an `empty` barrier: the index of the stage
// and the parity of its current use.
struct RingPlace {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance(std::uint32_t stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Waits until ready() holds; false if the pass was given up. Within a block, and in loops whose
// registers all hold accumulators, so it does not do all that protocol::wait_until does: it
// listens to the block's word in place of the world's, and past the deadline it only raises that
// word. The block's last role to leave reports for it. It waits longer than waits between blocks,
// of which its own is a consequence.
template <typename Ready>
__device__ __forceinline__ bool wait_in_block(const Waiter& waiter, Ready&& ready) {
  constexpr std::uint32_t kLooksPerClockRead = 64;
  std::uint64_t start = 0;
  SWITCHYARD_ROLLED
  for (std::uint32_t looks = 1; !ready(); ++looks) {
    if (looks % kLooksPerClockRead != 0) continue;
    if (*waiter.going != Going::kOn) return false;
    const std::uint64_t now = DevicePace().now();
    if (start == 0) start = now;
    if (now - start <= 2 * waiter.deadline_ns) continue;
    *waiter.going = Going::kRingStuck;
    return false;
  }
  return true;
}
// For the phase of that parity. By a whole warp, kWarp, all find the same: where they meet again
// nobody may be missing.
template <bool kWarp = false>
__device__ __forceinline__ bool wait_ring(const Waiter& waiter, std::uint32_t barrier,
                                          std::uint32_t parity) {
  const bool done = wait_in_block(waiter, [&] { return try_wait(barrier, parity); });
  return kWarp ? __all_sync(~0u, done) != 0 : done;
}

// threadIdx.x % kModulus, asked of the hardware anew. What is computed from threadIdx.x itself the
// compiler takes out of the loop over tasks and keeps: dozens of addresses that the math warps have
// no registers for.
template <std::uint32_t kModulus>
__device__ __forceinline__ std::uint32_t fresh_thread_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index % kModulus;
}
// Likewise blockIdx.x.
__device__ __forceinline__ std::uint32_t fresh_block_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The value, which the compiler does not learn. Of a loop that it knows to turn out differently the
// first time it would make two copies, and both would have to be fetched.
template <std::uint32_t kValue>
__device__ __forceinline__ std::uint32_t untold() {
  std::uint32_t value;
  asm volatile("mov.u32 %0, %1;" : "=r"(value) : "n"(kValue));
  return value;
}

// True in one thread of a warp that is together, and the compiler knows that it is one: what it
// computes stays in uniform registers, where the copy engine's instructions want it. Of a thread
// chosen by its number the compiler makes every such instruction a loop over the lanes that there
// might be, of a dozen instructions a turn.
__device__ __forceinline__ bool elect() { return cute::elect_one_sync() != 0; }

// `Threads` threads that all name barrier `id`.
template <int Threads>
__device__ __forceinline__ void named_barrier(std::uint32_t id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// The same where warps come from different places in the code: bar.sync is for all at one.
template <int Threads>
__device__ __forceinline__ void named_barrier_anywhere(std::uint32_t id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// Counted as there without waiting for the others: what this thread wrote is for them.
template <int Threads>
__device__ __forceinline__ void named_barrier_arrive(std::uint32_t id) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// And learn whether any of them says so.
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

}  // namespace switchyard::gpu
