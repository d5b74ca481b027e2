// What the ranks of a pass tell and send each other; see heap.h. All of it is stores into the other
// rank's heap, with flags in them (counts) or behind them: nobody reads another's memory.
#pragma once

#include "gpu/plan.cuh"
#include "gpu/trace.cuh"

namespace switchyard::gpu {

// Of what this thread wrote or saw, all that it raises flags for after this comes before them.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// --- Counts.

// This rank's row of the counts matrix, to all. Called by all threads of the block that completed
// it.
template <typename P>
__device__ __forceinline__ void publish_counts(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const protocol::Heaps& heaps = layer.heaps;
  const std::uint64_t flag = std::uint64_t{pass.flag()} << 32;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  const std::uint32_t* const rows = pass.state().words.expert_rows();
  for (std::uint32_t e = 2 * threadIdx.x; e < num_experts; e += 2 * kThreads) {
    const WordPair words{flag | __ldcg(rows + e),
                         flag | (e + 1 < num_experts ? __ldcg(rows + e + 1) : 0)};
#pragma unroll 1
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(heaps.size()); ++i) {
      store_words(
          layer.heap.counts(heaps.base[pass.rank_at(i)], pass.state().epoch, heaps.rank) + e,
          words);
    }
  }
}

// Waits until this thread's counts, those that read_counts() takes, have come from all ranks. False
// if the pass was given up. Called by the loading warps.
template <typename P>
__device__ __forceinline__ bool await_counts(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const int size = layer.heaps.size();
  // This rank's counts say that its blocks have listed their tokens, but not that these lists are
  // to be seen.
  bool arrived = threadIdx.x != 0 || all_arrived(pass.waiter(), pass.barrier(kListsReady));
#pragma unroll 1
  for (int e = 2 * static_cast<int>(threadIdx.x); arrived && e < layer.num_experts;
       e += 2 * kWarpgroup) {
    std::uint64_t seen = 0;
    const auto first_missing = [&] {  // of the ranks; their number if none is
      int missing = size;
#pragma unroll 2
      for (int source = size; source-- > 0;) {
        const WordPair words =
            load_words(layer.heap.counts(layer.mine, pass.state().epoch, source) + e);
        const std::uint64_t flag = pass.flag();
        if (words.first >> 32 == flag && words.second >> 32 == flag) continue;
        missing = source;
        seen = (words.first >> 32 != flag ? words.first : words.second) >> 32;
      }
      return missing;
    };
    arrived = pass.waiter().wait_for([&] { return first_missing() == size; },
                                     [&] {
                                       const int source = first_missing();
                                       return protocol::Missing{
                                           protocol::Phase::kCounts,
                                           source == size ? layer.heaps.rank : source,
                                           static_cast<std::uint64_t>(e), pass.flag(), seen};
                                     });
  }
  return !named_barrier_any<kWarpgroup>(kOfLoading, !arrived);
}

// From the counts matrix to rows per expert, and where each source's are among them: those of the
// expert's owner first, which need not travel, then by distance. Called by the loading warps.
template <typename P>
__device__ __forceinline__ void read_counts(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const int size = layer.heaps.size(), rank = layer.heaps.rank;
  const protocol::ExpertPartition experts = layer.heaps.experts;
#pragma unroll 1
  for (int e0 = 2 * static_cast<int>(threadIdx.x); e0 < layer.num_experts; e0 += 2 * kWarpgroup) {
    // Two experts: of each, rows of ranks 0 to `source`, and what that is at its owner and here.
    std::uint32_t rows[2] = {}, at_owner[2] = {}, here[2] = {};
    std::uint32_t* begin[2] = {};  // of this rank's experts: [distance]
    const int owner[2] = {experts.owner(e0), experts.owner(min(e0 + 1, layer.num_experts - 1))};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (owner[i] == rank && e0 + i < layer.num_experts) {
        begin[i] = pass.block.ranks.source_begin + (e0 + i - layer.first_expert) * size;
      }
    }
#pragma unroll 2
    for (int source = 0; source < size; ++source) {
      const WordPair words =
          load_words(layer.heap.counts(layer.mine, pass.state().epoch, source) + e0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (source == owner[i]) at_owner[i] = rows[i];
        if (source == rank) here[i] = rows[i];
        if (begin[i] != nullptr) {
          begin[i][source < rank ? source - rank + size : source - rank] = rows[i];
        }
        rows[i] += static_cast<std::uint32_t>(i == 0 ? words.first : words.second);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = e0 + i;
      if (e >= layer.num_experts) break;
      pass.block.expert_rows[e] = rows[i];
      const auto from_owner = [&](std::uint32_t at, bool before) {
        return protocol::first_row_in_segment(at, at_owner[i], rows[i], before);
      };
      if (begin[i] == nullptr) {
        pass.block.row_begin[e] = from_owner(here[i], rank < owner[i]);
        continue;
      }
#pragma unroll 1
      for (int distance = 0; distance < size; ++distance) {
        begin[i][distance] = from_owner(begin[i][distance], rank + distance >= size);
      }
    }
  }
}

// From the numbers of slots in send_begin to where they begin. Called by one warp.
template <typename P>
__device__ __forceinline__ void sum_sends(const Pass<P>& pass) {
  std::uint32_t* const begin = pass.block.ranks.send_begin;
  const std::uint32_t count =
      pass.layer.levels * static_cast<std::uint32_t>(pass.layer.heaps.size() - 1);
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t before = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < count; first += 32) {
    const std::uint32_t i = first + lane;
    const std::uint32_t slots = i < count ? begin[i] : 0;
    std::uint32_t up_to = slots;
#pragma unroll 1
    for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    if (i < count) begin[i] = before + up_to - slots;
    before += __shfl_sync(~0u, up_to, 31);
  }
  if (lane == 0) begin[count] = before;
}

// --- Rows of an expert of this rank.

struct SourceRow {
  std::uint32_t distance;  // of the source; 0: this rank itself
  std::uint32_t position;  // in the source's list of its slots with the expert
};
template <typename P>
__device__ __forceinline__ SourceRow find_source(const Pass<P>& pass, std::uint32_t expert,
                                                 std::uint32_t row) {
  if constexpr (!P::kAlone) {
    const auto size = static_cast<std::uint32_t>(pass.layer.heaps.size());
    if (size > 1) {
      const std::uint32_t* const begin = pass.block.ranks.source_begin + expert * size;
      std::uint32_t distance = size - 1;
      while (begin[distance] > row) --distance;
      return {distance, row - begin[distance]};
    }
  }
  return {0, row};
}
template <typename P>
__device__ __forceinline__ const std::uint32_t* entry_of(const Pass<P>& pass, std::uint32_t expert,
                                                         const SourceRow& row) {
  const LayerParams& layer = pass.layer;
  return (row.distance == 0 ? own_list(layer, expert)
                            : layer.heap.entries(layer.mine, expert, row.distance)) +
         row.position;
}

// Whether all rows that the source has for the expert have come.
template <typename P>
__device__ __forceinline__ bool has_arrived(const Pass<P>& pass, std::uint32_t expert,
                                            std::uint32_t distance) {
  const LayerParams& layer = pass.layer;
  return distance == 0 ||
         protocol::load_acquire(layer.heap.arrived(layer.mine, expert, distance)) == pass.flag();
}

// --- Dispatch.

// So many loads of a lane are in flight together; in FP8, loading warps have few registers.
template <typename P>
inline constexpr std::uint32_t kCopyVectors = P::kHalves == 1 ? 8 : 4;
// A row that several warps copy: 1 << log2 of them, this being one.
struct RowPart {
  std::uint32_t index = 0, log2 = 0;

  // What is counted when this part is there: all parts of a row make kUnits.
  static constexpr std::uint32_t kLog2Most = 3, kUnits = 1 << kLog2Most;
  __device__ std::uint32_t units() const { return kUnits >> log2; }
  // As many parts as there are warps for `rows` rows, but at least 512 bytes to each.
  __device__ static std::uint32_t log2_of(std::uint32_t rows, std::uint32_t warps,
                                          std::uint32_t row_bytes) {
    std::uint32_t log2 = 0;
    while (log2 < kLog2Most && rows << (log2 + 1) <= warps && row_bytes >> (log2 + 1) >= 512) {
      ++log2;
    }
    return log2;
  }
};

// One warp; `bytes` in multiples of 16. Past the L1 cache, which may remember what was there in an
// earlier pass.
template <std::uint32_t kVectors>
__device__ __forceinline__ void copy_row(std::byte* to, const std::byte* from, std::uint32_t bytes,
                                         const RowPart& part) {
  constexpr std::uint32_t kStep = 16 * 32;
  const std::uint32_t chunk = (bytes / 16 + (1u << part.log2) - 1 >> part.log2) * 16;
  const std::uint32_t first = part.index * chunk;
  bytes = min(bytes, first + chunk);
#pragma unroll 1
  for (std::uint32_t byte0 = first + 16 * (threadIdx.x % 32); byte0 < bytes;
       byte0 += kVectors * kStep) {
    uint4 values[kVectors];
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      const std::uint32_t byte = byte0 + v * kStep;
      if (byte < bytes) values[v] = __ldcg(reinterpret_cast<const uint4*>(from + byte));
    }
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      const std::uint32_t byte = byte0 + v * kStep;
      if (byte < bytes) store_vector(to + byte, values[v]);
    }
  }
}

// Of the groups of kSize that begin at multiples of that, which the pack warps of all blocks take
// in turn, this block's first from `begin` on.
template <std::uint32_t kSize>
__device__ __forceinline__ std::uint32_t first_group(std::uint32_t begin) {
  const std::uint32_t mine = kSize * blockIdx.x, step = kSize * gridDim.x;
  return begin <= mine ? mine : mine + protocol::ceil_div(begin - mine, step) * step;
}

// This rank's slots with experts of others, kSlots from slot0 on, those up to `begin` and from
// `end` on left out. A token goes to a rank once, with the first of its experts there, and with the
// entries of all of them. Sending waits for nothing. Called by one warp.
template <std::uint32_t kSlots, typename P>
__device__ __forceinline__ void send_slots(const Pass<P>& pass, std::uint32_t slot0,
                                           std::uint32_t begin, std::uint32_t end,
                                           const RowPart& part = {}) {
  const LayerParams& layer = pass.layer;
  const protocol::Heaps& heaps = layer.heaps;
  const RankTables<P>& tables = pass.block.ranks;
  const auto size = static_cast<std::uint32_t>(heaps.size());
  const std::uint32_t others = size - 1, lane = threadIdx.x % 32;
  const std::uint32_t of_warp = slot0 / (kSlots * gridDim.x);
  if (kSlots > 1 && lane == 0) {
    trace_stamp(pass, TraceRole::kSend, of_warp, &TraceRecord::begin);
  }
  const auto top_k = static_cast<std::uint32_t>(layer.top_k);
  // Lane i < kSlots finds slot i.
  std::uint32_t my_token = ~0u, my_distance = 0;
  std::int32_t my_expert = 0;
  if (const std::uint32_t slot = slot0 + lane; lane < kSlots && slot >= begin && slot < end) {
    const std::uint32_t list = find_expert(tables.send_begin, layer.levels * others, slot);
    my_distance = list % others + 1;
    my_expert = layer.rank_begin[pass.rank_at(my_distance)] + static_cast<int>(list / others);
    my_token = RowEntry::token(__ldcg(layer.lists +
                                      static_cast<std::size_t>(my_expert) * layer.max_tokens +
                                      (slot - tables.send_begin[list])));
  }
  const auto expert_of = [&](std::uint32_t token, int owner) {  // lane k's, if that is there
    const std::int32_t id =
        lane < top_k ? __ldcg(layer.ids + static_cast<std::size_t>(token) * top_k + lane) : -1;
    return id >= layer.rank_begin[owner] && id < layer.rank_begin[owner + 1] ? id : -1;
  };
  std::uint32_t sent = 0;
#pragma unroll 1
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    const std::uint32_t token = __shfl_sync(~0u, my_token, i);
    if (token == ~0u) continue;
    const std::uint32_t distance = __shfl_sync(~0u, my_distance, i);
    const std::int32_t expert = __shfl_sync(~0u, my_expert, i);
    const int owner = pass.rank_at(distance);
    std::byte* const target = heaps.base[owner];
    // This rank's distance from the owner is what is left of the circle.
    const std::uint32_t back = size - distance;
    const std::int32_t id = expert_of(token, owner);
    if (__any_sync(~0u, id >= 0 && id < expert)) continue;
    sent |= 1u << i;
    if (id >= 0 && part.index == 0) {
      const auto of_owner = static_cast<std::uint32_t>(id - layer.rank_begin[owner]);
      const std::uint32_t position =
          __ldcg(layer.positions + static_cast<std::size_t>(token) * top_k + lane);
      layer.heap.entries(target, of_owner, back)[position] = RowEntry::pack(token, lane);
      if (layer.weight_on_input) {
        layer.heap.weights(target, of_owner, back)[position] =
            __ldcg(layer.weights + static_cast<std::size_t>(token) * layer.cells_per_token + lane);
      }
    }
    std::byte* const to = layer.heap.pool(target, back, token);
    copy_row<kCopyVectors<P>>(to, pass.state().rows + token * pass.state().row_bytes,
                              static_cast<std::uint32_t>(layer.hidden * P::kElementBytes), part);
    if constexpr (P::kScaled) {
      const float* const scales = pass.state().row_scales + token * pass.state().row_scale_stride;
      auto* const to_scales = reinterpret_cast<float*>(to + layer.heap.scale_offset());
      for (std::uint32_t group = lane; part.index == 0 && group < layer.x_groups; group += 32) {
        to_scales[group] = __ldcg(scales + group);
      }
    }
  }
  if (sent != 0 && lane == 0 && part.index == 0) {
    atomicAdd(pass.state().words.counters() + kSentTokens,
              static_cast<std::uint32_t>(__popc(sent)));
  }
  __syncwarp();
  if constexpr (P::kTraced && kSlots > 1) {
    const std::uint32_t slots = __ballot_sync(~0u, my_token != ~0u);
    if (slots != 0 && lane == __ffs(static_cast<int>(slots)) - 1u) {
      trace_subject(pass, TraceRole::kSend, of_warp,
                    {TraceKind::kSend, -1, -1, my_expert, __popc(sent), pass.rank_at(my_distance)});
      trace_stamp(pass, TraceRole::kSend, of_warp, &TraceRecord::end);
    }
  }
#pragma unroll 1
  for (; sent != 0; sent &= sent - 1) {
    const int i = __ffs(static_cast<int>(sent)) - 1;
    const std::uint32_t distance = __shfl_sync(~0u, my_distance, i);
    const int owner = pass.rank_at(distance);
    const std::int32_t id = expert_of(__shfl_sync(~0u, my_token, i), owner);
    if (id < 0) continue;
    // Whoever sends the last of an expert's rows raises the flag for all who sent the others: the
    // counter is acquire and release, so that their stores come before the flag.
    std::uint32_t* const counter = pass.state().words.sent(layer.num_experts, layer.max_tiles) + id;
    const std::uint32_t units = protocol::fetch_add(counter, part.units()) + part.units();
    if (units != RowPart::kUnits * __ldcg(pass.state().words.expert_rows() + id)) continue;
    const auto of_owner = static_cast<std::uint32_t>(id - layer.rank_begin[owner]);
    protocol::store_release(layer.heap.arrived(heaps.base[owner], of_owner, size - distance),
                            pass.flag());
    atomicAdd(pass.state().words.counters() + kRaisedFlags, 1u);
  }
}

// So many slots are sent by the math warps before they have anything else to do; the pack warps
// send the others.
template <typename P>
__device__ __forceinline__ std::uint32_t first_sends(const Pass<P>& pass) {
  constexpr std::uint32_t kOfEachWarp = 2;
  return min(pass.num_sends(), kOfEachWarp * gridDim.x * kMathWarps);
}

// Levels that the pack warps send before they pack one: as many as have so many slots for every
// block. With less in flight ranks wait for each other at every level; with more, the first tiles
// come late. See docs/lab/ranks-and-arrivals.md.
template <typename P>
__device__ __forceinline__ std::uint32_t send_lead(const Pass<P>& pass) {
  constexpr std::uint32_t kSlotsAhead = 12, kLeast = 2, kMost = 16;
  const std::uint32_t levels =
      kSlotsAhead * gridDim.x * pass.layer.levels / max(pass.num_sends(), 1u);
  return min(max(levels, kLeast), kMost);
}

// Places what this rank sends, as soon as all its blocks have completed its lists: that depends on
// nobody's counts. False if the pass was given up. Called by the math warps.
template <typename P>
__device__ __forceinline__ bool place_sends(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = threadIdx.x - kWarpgroup;
  const bool arrived = thread != 0 || all_arrived(pass.waiter(), pass.barrier(kListsReady));
  if (named_barrier_any<kGateThreads>(kOfMath, !arrived)) return false;
  const auto others = static_cast<std::uint32_t>(layer.heaps.size() - 1);
  for (std::uint32_t i = thread; i < layer.levels * others; i += kGateThreads) {
    const int owner = pass.rank_at(i % others + 1);
    const int e = layer.rank_begin[owner] + static_cast<int>(i / others);
    pass.block.ranks.send_begin[i] =
        e < layer.rank_begin[owner + 1] ? __ldcg(pass.state().words.expert_rows() + e) : 0;
  }
  named_barrier<kGateThreads>(kOfMath);
  if (thread < 32) {
    sum_sends(pass);
    __syncwarp();
  }
  if (thread == 0) {
    auto& state = pass.block.pass;
    state.first_sends = first_sends(pass);
    state.send_lead = send_lead(pass);
    if (blockIdx.x == 0) state.words.counters()[kSentRows] = pass.num_sends();
  }
  named_barrier<kGateThreads>(kOfMath);
  return true;
}

// --- Combine.

// Tells the sources of this rank's tiles that they are finished, as they come to be. A lane takes
// every so many. Called by one warp of each block, with nothing else to do any more.
template <typename P>
__device__ __forceinline__ void raise_finished(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const protocol::Heaps& heaps = layer.heaps;
  const auto size = static_cast<std::uint32_t>(heaps.size());
  const std::uint32_t tiles = pass.num_tiles(), first = pass.state().shared_tiles.count;
  std::uint32_t returned = 0, flags = 0;
  const auto stamp = [&](TraceStamp which) {
    if (threadIdx.x % 32 == 0) trace_stamp(pass, TraceRole::kSend, kSignalRecord, which);
  };
  stamp(&TraceRecord::ready);
#pragma unroll 1
  for (std::uint32_t tile0 = first + blockIdx.x; tile0 < tiles; tile0 += 32 * gridDim.x) {
    const std::uint32_t tile = tile0 + gridDim.x * (threadIdx.x % 32);
    bool pending = tile < tiles;
    // Whom to tell, found out before it is time to.
    std::uint32_t distances = 0;
    if (pending) {
      const std::uint32_t expert =
          find_expert(pass.block.tile_begin + layer.first_expert, layer.local_experts, tile);
      const protocol::TokenTiles cut(pass.block.expert_rows[layer.first_expert + expert],
                                     P::kTileShape);
      const std::uint32_t of_expert = tile - pass.block.tile_begin[layer.first_expert + expert];
      const std::uint32_t* const source_begin = pass.block.ranks.source_begin + expert * size;
#pragma unroll 1
      for (std::uint32_t distance = 1; distance < size; ++distance) {
        const std::uint32_t begin = max(cut.begin(of_expert), source_begin[distance]);
        const std::uint32_t end =
            min(cut.end(of_expert), distance + 1 < size ? source_begin[distance + 1] : cut.rows);
        if (begin >= end) continue;
        distances |= 1u << distance;
        returned += end - begin;
      }
      flags += __popc(distances);
    }
    while (__any_sync(~0u, pending)) {
      bool done = false;
      if (!pass.waiter().wait(protocol::Phase::kExperts, tile0, [&] {
            done = pending && pass.gemm2_complete(tile);
            return __any_sync(~0u, done);
          })) {
        return;
      }
      stamp(&TraceRecord::begin);
      if (!done) continue;
      pending = false;
      fence_system();
#pragma unroll 1
      for (; distances != 0; distances &= distances - 1) {
        const auto distance = static_cast<std::uint32_t>(__ffs(static_cast<int>(distances)) - 1);
        std::byte* const source = heaps.base[pass.rank_at(distance)];
        protocol::store_relaxed(layer.heap.finished(source, tile + pass.state().tile_offset),
                                pass.flag());
      }
    }
  }
  returned = __reduce_add_sync(~0u, returned);
  flags = __reduce_add_sync(~0u, flags);
  if (threadIdx.x % 32 != 0 || flags == 0) return;
  trace_subject(pass, TraceRole::kSend, kSignalRecord,
                {TraceKind::kSignal, -1, -1, -1, static_cast<std::int32_t>(returned)});
  stamp(&TraceRecord::end);
  atomicAdd(pass.state().words.counters() + kReturnedRows, returned);
  atomicAdd(pass.state().words.counters() + kRaisedFlags, flags);
}

}  // namespace switchyard::gpu
