// Functions that the kernels of Exchange share: how they begin and wait, how they share out units
// of work, and how a send ends.
#pragma once

#include <cstdint>

#include "gpu/dispatch/params.h"
#include "gpu/pipeline/pace.cuh"
#include "gpu/pipeline/peer.cuh"
#include "gpu/ptx/early_launch.cuh"
#include "gpu/ptx/memory.cuh"
#include "protocol/wait.h"

namespace switchyard::gpu {

// Time stamps of a block, if the exchange is traced.
class BlockTrace {
 public:
  // Begins the record. Called when the kernels before have ended, before the block's first barrier.
  // `dispatch` is the number of the last dispatch, or of the one that this kernel sends.
  __device__ __forceinline__ BlockTrace(const ExchangeSite& site, ExchangeStage stage,
                                        TraceKind kind, std::uint64_t dispatch,
                                        std::uint64_t combine = 0) {
    const ExchangeRecords& trace = site.trace;
    if (trace.records == nullptr || blockIdx.x >= trace.blocks) return;
    record_ = trace.records + static_cast<std::uint32_t>(stage) * trace.blocks + blockIdx.x;
    if (threadIdx.x != 0) return;
    const std::uint64_t now = device_now_ns();
    *record_ = {now, now, now, dispatch, combine, kind};
  }
  // Stamps that the block's inputs have arrived. Called by the block's first thread.
  __device__ __forceinline__ void begin() const {
    if (record_ != nullptr) record_->begin = device_now_ns();
  }
  // Stamps that a warp, or the thread that does the rest, is done. Called by one thread, when a
  // barrier of the block has followed the constructor.
  __device__ __forceinline__ void end() const {
    if (record_ == nullptr) return;
    static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
    atomicMax(reinterpret_cast<unsigned long long*>(&record_->end), device_now_ns());
  }
  __device__ __forceinline__ void warp_ends() const {
    if (record_ == nullptr) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) end();
  }

 private:
  ExchangeRecord* record_ = nullptr;
};

// Writes a word that the host reads while kernels run.
template <typename T>
__device__ __forceinline__ void record_failure(T& word, T value) {
  *static_cast<volatile T*>(&word) = value;
}

// Returns false if the exchange is dead; then the kernel does nothing. Called by all threads of a
// block after the kernel's first loads, so that its load is under way together with those.
__device__ __forceinline__ bool is_alive(const ExchangeSite& site) {
  // Nothing is read because of this word, so it need not be acquired: loads may pass it.
  const bool dead =
      threadIdx.x == 0 && protocol::load_relaxed(&site.heaps.control(site.heaps.rank)->abort) != 0;
  if (__syncthreads_or(dead) == 0) return true;
  if (threadIdx.x == 0) record_failure(site.failures->given_up, std::uint32_t{1});
  return false;
}

// Waits until the flags of all ranks are of call `number`; returns false if the exchange died.
// Called by a whole warp, all of whose lanes have then acquired what the ranks wrote.
// `flag_of(rank)` is the address of a flag.
template <typename FlagOf>
__device__ __forceinline__ bool await_all(const ExchangeSite& site, protocol::Phase phase,
                                          std::uint64_t number, std::uint64_t of_all,
                                          FlagOf&& flag_of) {
  static_assert(protocol::kMaxRanks <= 64);
  const int lane = static_cast<int>(threadIdx.x % 32), ranks = site.heaps.size();
  bool low = lane < ranks, high = lane + 32 < ranks;  // whether this lane's two flags are missing
  const auto ready = [&] {
    if (low) low = !protocol::is_of(protocol::load_acquire(flag_of(lane)), number);
    if (high) high = !protocol::is_of(protocol::load_acquire(flag_of(lane + 32)), number);
    return __any_sync(~0u, low || high) == 0;
  };
  const auto missing = [&] {
    const std::uint32_t first = __ballot_sync(~0u, low), second = __ballot_sync(~0u, high);
    const int peer = first != 0 ? __ffs(first) - 1 : second != 0 ? 31 + __ffs(second) : 0;
    const std::uint64_t seen = protocol::load_relaxed(flag_of(peer));
    return protocol::Missing{phase, peer, static_cast<std::uint64_t>(peer),
                             protocol::flag_of(number), seen >> 32};
  };
  WarpPace pace;
  const bool arrived = protocol::wait_until(site.heaps, of_all, site.deadline_ns, pace, ready,
                                            missing) == protocol::WaitResult::kReady;
  __syncwarp();
  if (!arrived && lane == 0) record_failure(site.failures->given_up, std::uint32_t{1});
  return arrived;
}

// Shares rows of several steps out over the warps of a grid. A row has as many parts as there are
// warps for it, each of at least one step.
struct Units {
  std::uint32_t parts, steps, steps_of_part, count;

  __device__ Units(std::uint32_t rows, std::uint32_t steps_of_row) : steps(steps_of_row) {
    const std::uint32_t warps = stride();
    parts = rows >= warps ? 1 : rows == 0 ? 1 : min(warps / rows, steps);
    steps_of_part = protocol::ceil_div(steps, parts);
    count = rows * parts;  // at most the larger of rows and warps
  }
  // For the warps of `blocks` blocks. No part has more than `most` steps, if the units can then
  // still be numbered in 32 bits.
  __device__ Units(std::uint32_t rows, std::uint32_t steps_of_row, std::uint32_t blocks,
                   std::uint32_t most)
      : steps(steps_of_row) {
    const std::uint32_t warps = blocks * kMoverWarps;
    const std::uint32_t wanted = max(protocol::ceil_div(steps, most), warps / max(rows, 1u));
    parts = max(1u, min(min(wanted, steps), 0x7fffffffu / max(rows, 1u)));
    steps_of_part = protocol::ceil_div(steps, parts);
    count = rows * parts;
  }
  __device__ static std::uint32_t first() {
    // Neighbouring units go to different blocks, so that few rows use as many SMs as there are.
    return threadIdx.x / 32 * gridDim.x + blockIdx.x;
  }
  __device__ static std::uint32_t stride() { return gridDim.x * kMoverWarps; }
  __device__ std::uint32_t row(std::uint32_t unit) const { return unit / parts; }
  __device__ std::uint32_t part(std::uint32_t unit) const { return unit % parts; }
  __device__ std::uint32_t begin(std::uint32_t part) const { return part * steps_of_part; }
  __device__ std::uint32_t end(std::uint32_t part) const {
    return min((part + 1) * steps_of_part, steps);
  }
};

// Returns the number of blocks for so many steps. Few steps are spread over many SMs.
inline unsigned blocks_for(std::uint64_t steps, unsigned most) {
  constexpr std::uint64_t kStepsOfBlock = 4;
  const std::uint64_t blocks = protocol::ceil_div(steps, kStepsOfBlock);
  return blocks == 0 ? 1 : blocks < most ? static_cast<unsigned>(blocks) : most;
}

// The steps of a row as bytes: in each, a lane has kAtOnce vectors.
struct CopySteps {
  static constexpr std::uint32_t kAtOnce = 4, kBytes = 16 * 32 * kAtOnce;

  SWITCHYARD_HOST_DEVICE static std::uint32_t count(std::uint32_t bytes) {
    return protocol::ceil_div(bytes, kBytes);
  }
  __device__ static std::uint32_t at(std::uint32_t step, std::uint32_t i) {
    return step * kBytes + (i * 32 + threadIdx.x % 32) * 16;
  }
};
using Vectors = uint4[CopySteps::kAtOnce];

__device__ __forceinline__ void load_step(Vectors& v, const std::byte* row, std::uint32_t step,
                                          std::uint32_t bytes) {
#pragma unroll
  for (std::uint32_t i = 0; i < CopySteps::kAtOnce; ++i) {
    const std::uint32_t at = CopySteps::at(step, i);
    v[i] = uint4{0, 0, 0, 0};
    if (at < bytes) v[i] = __ldcg(reinterpret_cast<const uint4*>(row + at));
  }
}
__device__ __forceinline__ void store_step(std::byte* row, const Vectors& v, std::uint32_t step,
                                           std::uint32_t bytes) {
#pragma unroll
  for (std::uint32_t i = 0; i < CopySteps::kAtOnce; ++i) {
    const std::uint32_t at = CopySteps::at(step, i);
    if (at < bytes) store_vector(row + at, v[i]);
  }
}
// The same into a row of another rank.
__device__ __forceinline__ void put_step(const Peer& peer, protocol::Region<std::byte> row,
                                         const Vectors& v, std::uint32_t step,
                                         std::uint32_t bytes) {
#pragma unroll
  for (std::uint32_t i = 0; i < CopySteps::kAtOnce; ++i) {
    const std::uint32_t at = CopySteps::at(step, i);
    if (at < bytes) peer.put_vector(row + at, v[i]);
  }
}

// Each source's first arrival. Arrivals are numbered through all ranks' lists.
struct Sources {
  std::uint32_t first[protocol::kMaxRanks + 1];
};
__device__ __forceinline__ void load_sources(Sources& sources, const PlanWords& plan, int ranks) {
  for (int r = static_cast<int>(threadIdx.x); r <= ranks; r += static_cast<int>(blockDim.x)) {
    sources.first[r] = plan.first[r];
  }
  __syncthreads();
}
__device__ __forceinline__ int source_of(const Sources& sources, int ranks, std::uint32_t arrival) {
  int low = 0, high = ranks - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (arrival < sources.first[middle + 1]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Adds up the counts of a block's warps. Called once by all threads, before ends_last().
__device__ __forceinline__ void add_counts(const ExchangeSite& site, std::uint32_t first,
                                           std::uint32_t second) {
  __shared__ std::uint32_t sums[2];
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0 && (first | second) != 0) {
    atomicAdd(&sums[0], first);
    atomicAdd(&sums[1], second);
  }
  __syncthreads();
  if (threadIdx.x < 2 && sums[threadIdx.x] != 0) {
    atomicAdd(&site.words->counting[threadIdx.x], sums[threadIdx.x]);
  }
}
__device__ __forceinline__ std::uint32_t take_count(const ExchangeSite& site, int i) {
  return atomicExch(&site.words->counting[i], 0u);
}

// Ends a block of a send; returns true in the block that ends last. What all blocks wrote, into all
// heaps, comes before what that block writes afterwards with release order at system scope. The
// fence is of system scope because the writes were to other GPUs. One thread's fence is enough: it
// has passed the block's barrier after all of its threads' writes, and fences are cumulative. One
// thread of the last block calls signal_all() first, whose writes may have relaxed order.
template <typename Signal>
__device__ __forceinline__ bool ends_last(std::uint32_t& ended, std::uint32_t blocks,
                                          Signal&& signal_all) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicAdd(&ended, 1u) == blocks - 1;
    fence_system();
    if (last) {
      signal_all();
      ended = 0;
    }
  }
  return __syncthreads_or(last) != 0;
}
__device__ __forceinline__ bool ends_last(std::uint32_t& ended, std::uint32_t blocks) {
  return ends_last(ended, blocks, [] {});
}

}  // namespace switchyard::gpu
