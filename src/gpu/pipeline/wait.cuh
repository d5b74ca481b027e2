// How threads of a kernel wait: for their block, for other blocks, for other ranks. Every wait has
// a deadline.
#pragma once

#include <cstdint>

#include "gpu/pipeline/pace.cuh"
#include "gpu/pipeline/params.h"
#include "gpu/pipeline/words.h"
#include "gpu/ptx/mbarrier.cuh"
#include "gpu/ptx/memory.cuh"
#include "protocol/wait.h"

namespace switchyard::gpu {

// The state of a block: whether its roles go on. The word is in the block's shared memory.
enum class Going : std::uint32_t { kOn, kGivenUp, kRingStuck };

// The state that all waits of a pass share.
struct Waiter {
  const protocol::Heaps* heaps;
  volatile std::uint32_t* given_up;  // in the host's memory
  volatile Going* going;
  std::uint64_t epoch;
  std::uint64_t deadline_ns, block_deadline_ns;

  // Waits for something that other blocks of this GPU do.
  template <typename Pace = ThreadPace, typename Ready>
  __device__ __forceinline__ bool wait(protocol::Phase phase, std::uint64_t slot,
                                       Ready&& ready) const {
    return wait_for<Pace>(ready, [&] { return protocol::Missing{phase, heaps->rank, slot, 1, 0}; });
  }
  // Waits for something that may depend on other ranks; see protocol::wait_until. Returns false if
  // the pass was given up. With WarpPace the caller is a whole warp, ready() and missing() may be
  // votes of its lanes, and all lanes get the same answer.
  template <typename Pace = ThreadPace, typename Ready, typename WhatIsMissing>
  __device__ __forceinline__ bool wait_for(Ready&& ready, WhatIsMissing&& missing) const {
    Pace pace;
    if (protocol::wait_until(*heaps, epoch, deadline_ns, pace, ready, missing) ==
        protocol::WaitResult::kReady) {
      return true;
    }
    *given_up = 1;
    *going = Going::kGivenUp;
    return false;
  }
};

// A pass's number and whether it goes on, in a block's shared memory.
struct LifeState {
  std::uint64_t epoch;  // the pass's number, from 0
  PassWords words;
  Going going;  // the word that every wait of the block looks at
  // True if the world was aborted before the pass began, or if the plan was given up. Both are
  // written before the warps that read them begin their roles, so all warps read the same.
  bool aborted, plan_failed;
};

// A pass from its first wait to its end. Like all views of a pass it holds references, and values
// are read where they are used: a copy kept from the beginning would take a register that the roles
// do not have.
struct Lifetime {
  const WaitParams& layer;
  LifeState& state;

  __device__ Waiter waiter() const {
    return {&layer.heaps, &layer.failures->given_up, &state.going,
            state.epoch,  layer.deadline_ns,         layer.block_deadline_ns};
  }
  __device__ bool goes_on() const { return *waiter().going == Going::kOn; }
  // The value that flags of this pass are raised to.
  __device__ std::uint32_t flag() const { return static_cast<std::uint32_t>(state.epoch) + 1; }
  __device__ std::uint64_t epoch() const { return state.epoch; }
  __device__ std::uint32_t* barrier(GridBarrier which) const { return state.words.barrier(which); }
  __device__ int rank() const { return layer.heaps.rank; }
  __device__ int num_ranks() const { return layer.heaps.size(); }
  // The rank at that distance from this one, around the circle of ranks.
  __device__ int rank_at(std::uint32_t distance) const {
    const int at = rank() + static_cast<int>(distance), size = num_ranks();
    return at < size ? at : at - size;
  }
};

// Waits until ready() holds; returns false if the pass was given up. It is for waits within a
// block, in loops whose registers all hold accumulators, so it does less than protocol::wait_until:
// it looks at the block's word instead of the world's, and past the deadline it only raises that
// word. The last role to leave the block reports the failure. With WarpPace the caller is a whole
// warp, as for wait_for().
template <typename Pace = ThreadPace, typename Ready>
__device__ __forceinline__ bool wait_in_block(const Waiter& waiter, Ready&& ready) {
  constexpr std::uint32_t kLooksPerClockRead = 64;
  std::uint64_t start = 0;
  SWITCHYARD_ROLLED
  for (std::uint32_t looks = 1; !ready(); ++looks) {
    if (looks % kLooksPerClockRead != 0) continue;
    if (Pace::any(*waiter.going != Going::kOn)) return false;
    const std::uint64_t now = device_now_ns();
    if (start == 0) start = now;
    if (!Pace::any(now - start > waiter.block_deadline_ns)) continue;
    *waiter.going = Going::kRingStuck;
    return false;
  }
  return true;
}
// Waits for a barrier's phase of that parity. With kWarp the caller is a whole warp, and all its
// lanes get the same answer, so that all of them reach the next point where they meet.
template <bool kWarp = false>
__device__ __forceinline__ bool wait_ring(const Waiter& waiter, std::uint32_t barrier,
                                          std::uint32_t parity) {
  const bool done = wait_in_block(waiter, [&] { return try_wait(barrier, parity); });
  return kWarp ? __all_sync(~0u, done) != 0 : done;
}

// --- A barrier of all blocks, in two halves. Both are called by all threads of the block.

__device__ __forceinline__ void grid_arrive(std::uint32_t* word) {
  __syncthreads();
  if (threadIdx.x == 0) add_release_gpu(word, 1);
}
// Does the first half. Returns true in the block that arrives last, which sees what all others
// wrote.
__device__ __forceinline__ bool grid_arrive_last(std::uint32_t* word) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>(*word).fetch_add(
               1, cuda::memory_order_acq_rel) == gridDim.x - 1;
  }
  return __syncthreads_or(last);
}
// Waits until all blocks have arrived; returns false if the pass was given up. Called by one
// thread.
__device__ __forceinline__ bool all_arrived(const Waiter& waiter, const std::uint32_t* word) {
  return waiter.wait(protocol::Phase::kGate, blockIdx.x,
                     [&] { return load_acquire_gpu(word) >= gridDim.x; });
}
__device__ __forceinline__ bool grid_await(const Waiter& waiter, const std::uint32_t* word) {
  return __syncthreads_and(threadIdx.x != 0 || all_arrived(waiter, word));
}

}  // namespace switchyard::gpu
