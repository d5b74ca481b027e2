// Sorts the slots of a dispatch by expert, and sends counts and entries to all ranks.
//
// A stable counting sort of slots by place. Each sorting block has a run of tokens, and each of its
// warps a part of that run. A block needs the counts of the blocks before it, and of no other.
// Blocks start in order, so it only waits for blocks that run.
#pragma once

#include <cuda_bf16.h>

#include <climits>

#include "gpu/dispatch/site.cuh"

namespace switchyard::gpu {

inline constexpr std::uint32_t kPartTokens = protocol::ExchangeHeap::kPartTokens;

__device__ __forceinline__ std::uint64_t sum_up_to_lane(std::uint64_t value) {
#pragma unroll
  for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
    const std::uint64_t below = __shfl_up_sync(~0u, value, distance);
    if (threadIdx.x % 32 >= distance) value += below;
  }
  return value;
}
// The sum of the values of this thread and those before it.
__device__ __forceinline__ std::uint64_t sum_up_to_thread(std::uint64_t value) {
  __shared__ std::uint64_t of_warps[32];
  std::uint64_t sum = sum_up_to_lane(value);
  if (threadIdx.x % 32 == 31) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  for (std::uint32_t w = 0; w < threadIdx.x / 32; ++w) sum += of_warps[w];
  return sum;
}

// A dispatch as its flags name it.
struct Sending {
  std::uint64_t number;  // this dispatch's
  std::uint64_t layout;  // that of the dispatch whose rows it uses
  std::uint32_t parts;   // units of a token
};

// Raises a part's flag in the heaps of all ranks. Called by one thread, after a fence.
__device__ __forceinline__ void raise_part(const ExchangeSite& site, const Sending& sending,
                                           std::uint32_t part) {
  for (int r = 0; r < site.heaps.size(); ++r) {
    Peer(site.heaps, r)
        .signal_relaxed(site.heap.part_arrived(sending.number, site.heaps.rank,
                                               std::uint64_t{part} * kPartTokens),
                        protocol::numbered(sending.number, sending.layout));
  }
}

// Counts `count` more units of tokens in part `part`, or entries of as many of its tokens. The last
// call tells all ranks. Called by one thread, after a fence behind the counted writes.
__device__ __forceinline__ void count_units(const ExchangeSite& site, const DispatchSend& call,
                                            const Sending& sending, std::uint32_t part,
                                            std::uint32_t count) {
  const std::uint32_t tokens = min(kPartTokens, call.count - part * kPartTokens);
  const std::uint32_t all = tokens * (sending.parts + (call.new_layout ? 1 : 0));
  if (atomicAdd(site.units_done + part, count) + count != all) return;
  fence_system();
  site.units_done[part] = 0;
  raise_part(site, sending, part);
}

inline constexpr std::uint32_t kSortWarps = 8;

struct SortStorage {
  std::uint32_t counts[kSortWarps][kMostPlaces];  // per warp; then those before its next slot
  std::uint32_t before[kMostPlaces];              // in earlier blocks
  std::uint32_t up_to[kMostPlaces];               // up to this block; then of places up to each
};

__device__ __forceinline__ std::int32_t given_id(const SlotsCall& call, std::size_t slot) {
  if (!call.wide_ids) return static_cast<const std::int32_t*>(call.ids)[slot];
  const std::int64_t id = static_cast<const std::int64_t*>(call.ids)[slot];
  // No expert has an id that an i32 cannot hold, so any invalid one may take its place.
  const auto narrow = static_cast<std::int32_t>(id);
  return narrow == id ? narrow : id < 0 ? INT_MIN : INT_MAX;
}
// Returns the expert's id, or -1 for none.
__device__ __forceinline__ std::int32_t id_of(const SlotsCall& call, std::int32_t given) {
  return given >= 0 && given < call.num_experts ? given : -1;
}
__device__ __forceinline__ bool is_bad(const SlotsCall& call, std::int32_t given) {
  return given < -1 || (given >= call.num_experts && !call.large_ids_are_none);
}
__device__ __forceinline__ std::int32_t place_of(const SlotsCall& call, std::int32_t id) {
  return id < 0 || call.place_of == nullptr ? id : call.place_of[id];
}
__device__ __forceinline__ float weight_of(const SlotsCall& call, std::size_t slot) {
  if (call.weights == nullptr) return 1;
  return call.bf16_weights ? __bfloat162float(static_cast<const __nv_bfloat16*>(call.weights)[slot])
                           : static_cast<const float*>(call.weights)[slot];
}

// A warp's tokens. It takes as many at a time as it has lanes for their slots.
struct SortLanes {
  std::uint32_t begin, end, at_once;
  std::uint32_t local, k;  // this lane's token among those, and its slot
  bool inside;

  __device__ SortLanes(const ExchangeSite& site, const DispatchSend& call) {
    const std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    at_once = 32 / site.top_k;
    local = lane / site.top_k;
    k = lane % site.top_k;
    inside = local < at_once;
    const std::uint32_t all = call.slots.tokens_of_sorter;
    const std::uint32_t each = protocol::ceil_div(all, kSortWarps);
    const std::uint32_t first = min(blockIdx.x * all, call.count);
    const std::uint32_t last = min(first + all, call.count);
    begin = warp < kSortWarps ? min(first + warp * each, last) : last;
    end = warp < kSortWarps ? min(begin + each, last) : last;
  }
  __device__ bool has(std::uint32_t first) const { return inside && first + local < end; }
};

// The lanes with the same value, and how many of them come before this one.
struct Equals {
  std::uint32_t lanes, count, before;

  __device__ explicit Equals(std::uint32_t value) {
    lanes = __match_any_sync(~0u, value);
    count = __popc(lanes);
    before = __popc(lanes & ((1u << threadIdx.x % 32) - 1));
  }
};
// Returns a value for Equals that differs from every other lane's, and from all below 2^31.
__device__ __forceinline__ std::uint32_t unlike_others() { return 1u << 31 | threadIdx.x % 32; }

// Stores the places and weights of a warp's slots, and counts the slots of each place.
__device__ __forceinline__ void count_slots(const ExchangeSite& site, const HandleSite& handle,
                                            const DispatchSend& call, const SortLanes& lanes,
                                            std::uint32_t* counts) {
#pragma unroll 1
  for (std::uint32_t first = lanes.begin; first < lanes.end; first += lanes.at_once) {
    const bool has = lanes.has(first);
    const std::uint32_t token = first + lanes.local;
    const std::size_t slot = std::size_t{token} * site.top_k + lanes.k;
    const std::int32_t given = has ? given_id(call.slots, slot) : -1;
    if (is_bad(call.slots, given)) {
      record_failure(site.failures->unknown, ExchangeFailures::kFound | std::uint64_t{token} << 32 |
                                                 static_cast<std::uint32_t>(given));
    }
    const std::int32_t id = id_of(call.slots, given);
    const float weight = has ? weight_of(call.slots, slot) : 0;
    const Equals same(id < 0 ? unlike_others()
                             : lanes.local << 12 | static_cast<std::uint32_t>(id));
    const bool duplicate = id >= 0 && same.before != 0;
    if (duplicate) {
      record_failure(site.failures->duplicate, ExchangeFailures::kFound |
                                                   std::uint64_t{token} << 32 |
                                                   static_cast<std::uint64_t>(id));
    }
    const std::int32_t place = duplicate ? -1 : place_of(call.slots, id);
    if (has) {
      handle.places[slot] = place;
      handle.weights[slot] = weight;
    }
    const Equals equals(static_cast<std::uint32_t>(place));
    if (place >= 0 && equals.before == 0) counts[place] += equals.count;
    __syncwarp();
  }
}

// Sums the slots of each place in the blocks before this one. Returns false if the exchange died.
__device__ __forceinline__ bool sum_blocks_before(const ExchangeSite& site,
                                                  const DispatchSend& call, std::uint64_t number,
                                                  SortStorage& storage) {
  for (std::uint32_t p = threadIdx.x; p < call.num_places; p += kMoverThreads) {
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kSortWarps; ++w) {
      const std::uint32_t count = storage.counts[w][p];
      storage.counts[w][p] = sum;
      sum += count;
    }
    storage.before[p] = 0;
    storage.up_to[p] = sum;
    if (call.sorters > 1) site.totals[std::size_t{blockIdx.x} * call.num_places + p] = sum;
  }
  if (call.sorters > 1) {
    __syncthreads();
    if (threadIdx.x == 0) protocol::store_release(site.totalled + blockIdx.x, number);
    bool arrived = true;
    if (threadIdx.x < blockIdx.x) {
      for (std::uint32_t looks = 1; arrived; ++looks) {
        if (protocol::load_acquire(site.totalled + threadIdx.x) == number) break;
        // In an exchange that died, earlier blocks leave without a count.
        if (looks % 256 == 0) arrived = !protocol::aborted(site.heaps);
      }
    }
    if (__syncthreads_and(arrived) == 0) return false;
    for (std::uint32_t p = threadIdx.x; p < call.num_places; p += kMoverThreads) {
      std::uint32_t sum = 0;
#pragma unroll 8
      for (std::uint32_t b = 0; b < blockIdx.x; ++b) {
        sum += __ldcg(site.totals + std::size_t{b} * call.num_places + p);
      }
      storage.before[p] = sum;
      storage.up_to[p] += sum;
    }
  }
  __syncthreads();
  return true;
}

// Sends each rank the counts of its experts. Called by the last sorting block. Each word names its
// dispatch, so no flag has to follow.
__device__ __forceinline__ void publish_counts(const ExchangeSite& site, const DispatchSend& call,
                                               std::uint64_t number, SortStorage& storage) {
  const std::uint32_t p = 2 * threadIdx.x;
  const std::uint32_t low = p < call.num_places ? storage.up_to[p] : 0;
  const std::uint32_t high = p + 1 < call.num_places ? storage.up_to[p + 1] : 0;
  const auto sum = static_cast<std::uint32_t>(sum_up_to_thread(low + high));
  storage.up_to[p] = sum - high;
  storage.up_to[p + 1] = sum;
  __syncthreads();
  const protocol::ExpertPartition& places = site.heaps.experts;
  for (std::uint32_t i = threadIdx.x; i < call.num_places; i += kMoverThreads) {
    const int to = places.owner(static_cast<int>(i)), begin = places.begin(to);
    const std::uint32_t before = begin == 0 ? 0 : storage.up_to[begin - 1];
    Peer(site.heaps, to)
        .signal_relaxed(site.heap.counts(number, site.heaps.rank) + (i - begin),
                        protocol::numbered(number, storage.up_to[i] - before));
  }
}

// Sends the entries of a warp's slots. Returns how many went to other ranks.
__device__ __forceinline__ std::uint32_t send_entries(
    const ExchangeSite& site, const HandleSite& handle, const DispatchSend& call,
    const Sending& sending, const SortLanes& lanes, SortStorage& storage) {
  const protocol::ExpertPartition& places = site.heaps.experts;
  const int me = site.heaps.rank, ranks = site.heaps.size();
  const auto entries = site.heap.entries<DeviceEntry>(sending.number, me);
  std::uint32_t* const counts = storage.counts[threadIdx.x / 32];
  std::uint32_t sent = 0;
#pragma unroll 1
  for (std::uint32_t first = lanes.begin; first < lanes.end; first += lanes.at_once) {
    const bool has = lanes.has(first);
    const std::uint32_t token = first + lanes.local;
    const std::size_t slot = std::size_t{token} * site.top_k + lanes.k;
    // This thread stored it in count_slots().
    const std::int32_t place = has ? handle.places[slot] : -1;
    const Equals equals(static_cast<std::uint32_t>(place));
    const std::uint32_t so_far = place >= 0 ? counts[place] : 0;
    __syncwarp();  // all have read the count before one of them raises it
    if (place >= 0 && equals.before == 0) counts[place] = so_far + equals.count;
    __syncwarp();
    const int owner = place < 0 ? -1 : places.owner(place);
    const Equals same(owner < 0 ? unlike_others()
                                : lanes.local << 6 | static_cast<std::uint32_t>(owner));
    const std::size_t entry_of = std::size_t{token} * site.slots;
    if (owner >= 0) {
      const auto expert = static_cast<std::uint32_t>(place - places.begin(owner));
      const uint4 entry{storage.before[place] + so_far + equals.before, lanes.k << 16 | expert,
                        __float_as_uint(handle.weights[slot]),
                        same.lanes >> (lanes.local * site.top_k)};
      Peer(site.heaps, owner).put_vector(entries + (entry_of + same.before), entry);
      if (owner != me) ++sent;
    }
    std::uint64_t owners = 0;  // the token's, a bit for each rank
    for (std::uint32_t i = 0; i < site.top_k; ++i) {
      const int one = __shfl_sync(~0u, owner, lanes.inside ? lanes.local * site.top_k + i : 0);
      if (one >= 0) owners |= std::uint64_t{1} << one;
    }
    for (int r = static_cast<int>(lanes.k); has && r < ranks; r += static_cast<int>(site.top_k)) {
      if ((owners >> r & 1) != 0) continue;
      Peer(site.heaps, r).put_vector(entries + entry_of, uint4{0, 0, 0, 0});
      if (r != me) ++sent;
    }
    __syncwarp();
  }
  if (call.by_parts && threadIdx.x % 32 == 0 && lanes.begin < lanes.end) {
    fence_system();  // for the stores of all lanes, which came before the warp's barrier
    for (std::uint32_t token = lanes.begin; token < lanes.end;) {
      const std::uint32_t part = token / kPartTokens;
      const std::uint32_t next = min((part + 1) * kPartTokens, lanes.end);
      count_units(site, call, sending, part, next - token);
      token = next;
    }
  }
  return __reduce_add_sync(~0u, sent);
}

// Does a sorting block's work. Returns false if the exchange died.
__device__ __forceinline__ bool sort_slots(const ExchangeSite& site, const HandleSite& handle,
                                           const DispatchSend& call, const Sending& sending,
                                           std::uint32_t& entries_sent) {
  __shared__ SortStorage storage;
  const SortLanes lanes(site, call);
  for (std::uint32_t p = threadIdx.x; p < call.num_places; p += kMoverThreads) {
#pragma unroll
    for (std::uint32_t w = 0; w < kSortWarps; ++w) storage.counts[w][p] = 0;
  }
  __syncthreads();
  // Warps from kSortWarps on have no tokens.
  count_slots(site, handle, call, lanes, storage.counts[threadIdx.x / 32 % kSortWarps]);
  __syncthreads();
  if (!sum_blocks_before(site, call, sending.number, storage)) return false;
  if (blockIdx.x == call.sorters - 1) publish_counts(site, call, sending.number, storage);
  if (threadIdx.x / 32 < kSortWarps) {
    entries_sent = send_entries(site, handle, call, sending, lanes, storage);
  }
  return true;
}

}  // namespace switchyard::gpu
