// A ring of stages in shared memory, between the roles that fill it and the warps that drain it.
// Each stage has a `full` and an `empty` barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gpu/pipeline/roles.h"
#include "gpu/pipeline/wait.cuh"
#include "gpu/ptx/compiler.cuh"

namespace switchyard::gpu {

// The math warpgroup of this thread. It is computed wherever it is needed, because the sums leave
// no register to keep it in.
__device__ __forceinline__ std::uint32_t math_group() {
  return reread_thread_index<kThreads>() / kWarpgroup - 1;
}

// A stage of the ring, and the parity of its current use.
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

// The number and size of the stages. A Layout says what a stage holds: weights, then tokens at
// kTokensAt, and kScaleBytes of scales in a place apart. With kFixed the compiler knows the size of
// a stage, with kFixedCount their number, too; otherwise each pass chooses them.
template <typename Layout, bool kFixed = Layout::kFixed, bool kFixedCount = Layout::kFixedCount>
struct alignas(8) StageShape {  // one load
  std::uint32_t stages, stage_bytes;
};
template <typename Layout>
struct StageShape<Layout, true, true> {
  static constexpr std::uint32_t stages = Layout::kStages, stage_bytes = Layout::kStageBytes;
};
template <typename Layout>
struct StageShape<Layout, true, false> {
  // A parameter of the kernel: an operand of instructions, which needs no register.
  const std::uint32_t& stages;
  static constexpr std::uint32_t stage_bytes = Layout::kStageBytes;
};

// The ring, at addresses in shared memory.
template <typename Layout>
struct Ring : StageShape<Layout> {
  std::uint32_t base, full, empty, scale_base;

  __device__ std::uint32_t weights(std::uint32_t stage) const {
    return base + stage * this->stage_bytes;
  }
  __device__ std::uint32_t tokens(std::uint32_t stage) const {
    return weights(stage) + Layout::kTokensAt;
  }
  // The address of a stage's scales: its weights' scales, then its tokens'; or two sets of products
  // of both.
  __device__ std::uint32_t weight_scales(std::uint32_t stage) const {
    return scale_base + stage * Layout::kScaleBytes;
  }
  __device__ std::uint32_t token_scales(std::uint32_t stage) const {
    return weight_scales(stage) + Layout::kTokenScalesAt;
  }
  __device__ std::uint32_t joined_scales(std::uint32_t stage, std::uint32_t set) const {
    return scale_base + stage * Layout::kScaleBytes + set * Layout::kScaleSetBytes;
  }
  __device__ std::uint32_t full_barrier(std::uint32_t stage) const { return full + 8 * stage; }
  __device__ std::uint32_t empty_barrier(std::uint32_t stage) const { return empty + 8 * stage; }

  // Waits until the stage's previous contents have been used; see wait_ring().
  template <bool kWarp = false>
  __device__ bool await_free(const Waiter& waiter, const RingPlace& place) const {
    return wait_ring<kWarp>(waiter, empty_barrier(place.stage), place.parity ^ 1);
  }
};

// The ring's part of a block's shared memory. Before the tasks begin, the gate uses these bytes.
template <std::uint32_t kBytes>
struct RingOfBytes {
  alignas(1024) std::byte ring[kBytes];
};
using RingMemory = RingOfBytes<kRingBytes>;
struct RingBarriers {
  alignas(8) std::uint64_t full[kMaxStages], empty[kMaxStages];
};
// Initialises the barriers of so many stages. Called by one thread; a fence has to follow.
// `paired`: 1 if a pair of blocks fills and frees the stages, else 0. `more_fillers`: threads that
// arrive at a full stage beside those of arrivals_of().
template <TokenSource kTokens, std::uint32_t kStages>
__device__ __forceinline__ void make_ring_barriers(RingBarriers& barriers,
                                                   const std::uint32_t& paired,
                                                   std::uint32_t more_fillers = 0) {
  constexpr Arrivals kArrivals = arrivals_of(kTokens);
  for (std::uint32_t s = 0; s < kStages; ++s) {
    init_barrier(shared_address(&barriers.full[s]), kArrivals.full + more_fillers);
    init_barrier(shared_address(&barriers.empty[s]), kArrivals.empty << paired);
  }
}

// The ring as a role sees it, and whether a pair shares it.
template <typename Layout>
struct Pipeline {
  // A pass that chooses the shape may do so later.
  static constexpr bool kChosenLater = !Layout::kFixed;
  static constexpr bool kMayGather = requires { requires Layout::kMayGather; };
  using Shape =
      std::conditional_t<kChosenLater, const StageShape<Layout>&, const StageShape<Layout>>;

  Lifetime life;
  Shape shape;
  const std::byte* bytes;
  const std::uint64_t *full, *empty;
  const std::byte* scales;      // null where stages have none
  const std::uint32_t& paired;  // 1: the pair's blocks fill each other's rings, too
  // 1: ordinary copies write the tokens of the stages. Absent where no launch decides it.
  struct Absent {};
  std::conditional_t<kMayGather, const std::uint32_t&, Absent> gathers;

  __device__ Ring<Layout> ring() const {
    Ring<Layout> ring{shape, shared_address(bytes), shared_address(full), shared_address(empty), 0};
    if constexpr (Layout::kScaleBytes != 0) ring.scale_base = shared_address(scales);
    return ring;
  }
  __device__ Waiter waiter() const { return life.waiter(); }
  __device__ bool goes_on() const { return life.goes_on(); }
};

}  // namespace switchyard::gpu
