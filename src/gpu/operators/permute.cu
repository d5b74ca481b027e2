// permute(): a stable counting sort of slots by expert.
//
//   few slots   one block: count, scan over experts, place
//   many        count_chunks   each block counts its chunk's slots per expert
//               sum_chunks     a warp per expert: the slots of the chunks before each chunk
//               place_slots    each block scans over experts for itself, and places its chunk
//
// A warp takes 32 neighbouring slots at a time, in order, and counts in words of its own. So a
// slot's rank is the number of slots before it, and nothing depends on the order in which warps
// run.
#include <algorithm>

#include "gpu/operators/launch.h"

namespace switchyard::gpu {
namespace {

constexpr std::uint32_t kWarps = PermutePlan::kWarps, kThreads = 32 * kWarps;
constexpr std::uint32_t kMost = kMostPermutedExperts;
// Each thread scans two experts.
static_assert(kMost == 2 * kThreads);

using WarpCounts = std::uint16_t[kMost];

__device__ __forceinline__ std::int32_t expert_of(const PermuteCall& call, std::uint32_t slot) {
  const std::int64_t id = call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[slot]
                                        : static_cast<const std::int32_t*>(call.ids)[slot];
  return id >= 0 && id < call.num_experts ? static_cast<std::int32_t>(id) : -1;
}

// The slots of this warp.
struct Part {
  std::uint32_t begin, end;

  __device__ Part(const PermuteCall& call, std::uint32_t chunk) {
    const std::uint32_t part = call.chunk / kWarps;
    // A chunk begins before the last slot, so only its warps' parts can pass it.
    const std::uint64_t first = std::uint64_t{chunk} * call.chunk + threadIdx.x / 32 * part;
    begin = static_cast<std::uint32_t>(min(first, std::uint64_t{call.slots}));
    end = static_cast<std::uint32_t>(min(first + part, std::uint64_t{call.slots}));
  }
};

// Calls visit(slot, id) for 32 slots at a time, one for each lane, in order. Lanes without a slot
// have id -1.
template <typename Visit>
__device__ __forceinline__ void for_each_slot(const PermuteCall& call, const Part& part,
                                              Visit visit) {
  constexpr std::uint32_t kAtOnce = 4;  // loads in flight
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (std::uint32_t first = part.begin; first < part.end; first += 32 * kAtOnce) {
    std::int32_t ids[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t slot = first + 32 * i + lane;
      ids[i] = slot < part.end ? expert_of(call, slot) : -1;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) visit(first + 32 * i + lane, ids[i]);
  }
}

// The lanes of this warp with the same id, and how many of them come before this one.
struct Equals {
  std::uint32_t count, before;

  __device__ explicit Equals(std::int32_t id) {
    const std::uint32_t same = __match_any_sync(~0u, id);
    count = __popc(same);
    before = __popc(same & ((1u << threadIdx.x % 32) - 1));
  }
};

// Counts the slots of each warp per expert.
__device__ __forceinline__ void count_parts(const PermuteCall& call, const Part& part,
                                            WarpCounts* counts) {
  for (std::uint32_t i = threadIdx.x; i < kWarps * call.num_experts; i += kThreads) {
    counts[i / call.num_experts][i % call.num_experts] = 0;
  }
  __syncthreads();
  WarpCounts& own = counts[threadIdx.x / 32];
  for_each_slot(call, part, [&](std::uint32_t, std::int32_t id) {
    const Equals equals(id);
    if (id >= 0 && equals.before == 0) own[id] = static_cast<std::uint16_t>(own[id] + equals.count);
    __syncwarp();
  });
  __syncthreads();
}

__device__ __forceinline__ void fill_tokens(const PermuteCall& call) {
  if (call.tokens == nullptr) return;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t r = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; r < call.rows;
       r += step) {
    call.tokens[r] = -1;
  }
}

// Blocks from call.chunks on help only to fill.
__global__ void __launch_bounds__(kThreads) count_chunks(const PermuteCall call) {
  __shared__ WarpCounts counts[kWarps];
  fill_tokens(call);
  if (blockIdx.x >= call.chunks) return;
  count_parts(call, Part(call, blockIdx.x), counts);
  for (std::uint32_t e = threadIdx.x; e < call.num_experts; e += kThreads) {
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kWarps; ++w) sum += counts[w][e];
    call.counts[std::size_t{e} * call.chunks + blockIdx.x] = sum;
  }
}

// The sum of the values of this lane and those before it.
template <typename T>
__device__ __forceinline__ T sum_up_to_lane(T value) {
#pragma unroll
  for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(~0u, value, distance);
    if (threadIdx.x % 32 >= distance) value += below;
  }
  return value;
}

constexpr std::uint32_t kSumThreads = 256;
__global__ void __launch_bounds__(kSumThreads) sum_chunks(const PermuteCall call) {
  const std::uint32_t e = (blockIdx.x * kSumThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (e >= call.num_experts) return;
  std::uint32_t* const counts = call.counts + std::size_t{e} * call.chunks;
  std::uint32_t before = 0;
#pragma unroll 4
  for (std::uint32_t first = 0; first < call.chunks; first += 32) {
    const bool inside = first + lane < call.chunks;
    const std::uint32_t count = inside ? counts[first + lane] : 0;
    const std::uint32_t sum = sum_up_to_lane(count);
    if (inside) counts[first + lane] = before + sum - count;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) call.totals[e] = before;
}

// Two sums of one scan, neither of which reaches 2^32. The first is of the rows that experts keep.
// The second is of the rows of the layout or, if that is padded, of the rows that experts would
// have.
struct Sums {
  std::uint64_t packed = 0;

  __device__ static Sums of(std::uint32_t kept, std::uint32_t other) {
    return {std::uint64_t{other} << 32 | kept};
  }
  __device__ std::uint32_t kept() const { return static_cast<std::uint32_t>(packed); }
  __device__ std::uint32_t other() const { return static_cast<std::uint32_t>(packed >> 32); }
};

struct PlaceStorage {
  WarpCounts counts[kWarps];   // slots of the warps before, and of this warp so far
  std::uint32_t start[kMost];  // the row of the expert's first slot in this chunk
  std::uint64_t sums[kWarps];
};

// Turns counts of warps into those of the warps before, and finds each expert's start.
template <bool kAlone>
__device__ __forceinline__ void scan_experts(const PermuteCall& call, PlaceStorage& storage) {
  const std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool padded = call.layout.kind == RowLayout::Kind::kPadded;
  const auto size = static_cast<std::uint32_t>(call.layout.size);
  Sums own[2];
  std::uint32_t before[2] = {};
#pragma unroll
  for (std::uint32_t j = 0; j < 2; ++j) {
    const std::uint32_t e = 2 * threadIdx.x + j;
    if (e >= call.num_experts) continue;
    std::uint32_t total = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      const std::uint32_t count = storage.counts[w][e];
      storage.counts[w][e] = static_cast<std::uint16_t>(total);
      total += count;
    }
    if constexpr (!kAlone) {
      total = call.totals[e];
      before[j] = call.counts[std::size_t{e} * call.chunks + blockIdx.x];
    }
    const bool blocked = call.layout.kind == RowLayout::Kind::kBlocked;
    own[j] = Sums::of(padded ? min(total, size) : total,
                      blocked ? protocol::ceil_div(total, size) * size : total);
  }
  const std::uint64_t pair = own[0].packed + own[1].packed;
  std::uint64_t up_to = sum_up_to_lane(pair);
  if (lane == 31) storage.sums[warp] = up_to;
  __syncthreads();
  for (std::uint32_t w = 0; w < warp; ++w) up_to += storage.sums[w];
  Sums sum{up_to - pair};
#pragma unroll
  for (std::uint32_t j = 0; j < 2; ++j) {
    const std::uint32_t e = 2 * threadIdx.x + j;
    if (e >= call.num_experts) continue;
    storage.start[e] = (padded ? e * size : sum.other()) + before[j];
    sum.packed += own[j].packed;
    if (blockIdx.x == 0) call.ends[e] = static_cast<std::int32_t>(sum.kept());
  }
  if (blockIdx.x == 0 && threadIdx.x == kThreads - 1 && call.dropped != nullptr) {
    *call.dropped = padded ? static_cast<std::int32_t>(sum.other() - sum.kept()) : 0;
  }
  __syncthreads();
}

template <bool kAlone>
__global__ void __launch_bounds__(kThreads) place_slots(const PermuteCall call) {
  __shared__ PlaceStorage storage;
  if constexpr (kAlone) fill_tokens(call);  // before the barriers that precede the placing
  const Part part(call, blockIdx.x);
  count_parts(call, part, storage.counts);
  scan_experts<kAlone>(call, storage);
  WarpCounts& own = storage.counts[threadIdx.x / 32];
  const bool padded = call.layout.kind == RowLayout::Kind::kPadded;
  const auto size = static_cast<std::uint32_t>(call.layout.size);
  for_each_slot(call, part, [&](std::uint32_t slot, std::int32_t id) {
    const Equals equals(id);
    const std::uint32_t count = id >= 0 ? own[id] : 0;
    __syncwarp();  // all have read the count before one of them raises it
    if (id >= 0 && equals.before == 0) {
      own[id] = static_cast<std::uint16_t>(count + equals.count);
    }
    __syncwarp();
    if (slot >= part.end) return;
    std::int32_t position = -1;
    if (id >= 0) {
      const std::uint32_t row = storage.start[id] + count + equals.before;
      if (!padded || row - static_cast<std::uint32_t>(id) * size < size) {
        position = static_cast<std::int32_t>(row);
        if (call.tokens != nullptr) {
          call.tokens[row] = static_cast<std::int32_t>(slot / call.top_k);
        }
      }
    }
    call.positions[slot] = position;
  });
}

}  // namespace

cudaError_t load_permute_kernels() {
  cudaFuncAttributes facts;
  for (const cudaError_t result :
       {cudaFuncGetAttributes(&facts, place_slots<true>),
        cudaFuncGetAttributes(&facts, count_chunks), cudaFuncGetAttributes(&facts, sum_chunks),
        cudaFuncGetAttributes(&facts, place_slots<false>)}) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

cudaError_t launch_permute(const PermuteCall& call, cudaStream_t stream) {
  // One block fills so many entries in about the time that it needs for its slots.
  constexpr std::int64_t kAloneRows = 1 << 16, kFilledByBlock = 1 << 12, kMostFilling = 264;
  if (call.chunks == 1 && (call.tokens == nullptr || call.rows <= kAloneRows)) {
    place_slots<true><<<1, kThreads, 0, stream>>>(call);
    return cudaGetLastError();
  }
  const std::int64_t filling =
      call.tokens == nullptr ? 0 : protocol::ceil_div(call.rows, kFilledByBlock);
  const auto blocks =
      std::max(call.chunks, static_cast<std::uint32_t>(std::min(filling, kMostFilling)));
  count_chunks<<<blocks, kThreads, 0, stream>>>(call);
  sum_chunks<<<protocol::ceil_div(call.num_experts * 32, kSumThreads), kSumThreads, 0, stream>>>(
      call);
  place_slots<false><<<call.chunks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
