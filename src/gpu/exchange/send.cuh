// Sends tokens to the ranks of their experts.
#pragma once

#include "gpu/exchange/exchange.cuh"

namespace switchyard::gpu {

// Replaces the numbers of slots in send_begin by their prefix sums. Called by one warp.
template <typename P>
__device__ __forceinline__ void sum_sends(const Exchange<P>& exchange) {
  std::uint32_t* const begin = exchange.ranks.send_begin;
  const std::uint32_t count =
      exchange.table.partition.levels * static_cast<std::uint32_t>(exchange.life.num_ranks() - 1);
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

// The pack warps of all blocks take groups of kSize slots or rows in turn. Groups begin at
// multiples of kSize. Returns where this block's first group at or after `begin` begins.
template <std::uint32_t kSize>
__device__ __forceinline__ std::uint32_t first_group(std::uint32_t begin) {
  const std::uint32_t mine = kSize * blockIdx.x, step = kSize * gridDim.x;
  return begin <= mine ? mine : mine + protocol::ceil_div(begin - mine, step) * step;
}

// Sends kSlots slots from slot0 on, numbered among the slots whose experts other ranks have. Skips
// slots before `begin` and from `end` on. A token goes to a rank once: with the first of its
// experts there, and with the entries of all of them. Sending waits for nothing. Called by one
// warp.
template <std::uint32_t kSlots, typename P>
__device__ __forceinline__ void send_slots(const Exchange<P>& exchange, std::uint32_t slot0,
                                           std::uint32_t begin, std::uint32_t end,
                                           const RowPart& part = {}) {
  const ExchangeParams& layer = exchange.layer;
  const protocol::Heaps& heaps = exchange.life.layer.heaps;
  const RankTables& tables = exchange.ranks;
  const auto size = static_cast<std::uint32_t>(heaps.size());
  const std::uint32_t others = size - 1, lane = threadIdx.x % 32;
  const std::uint32_t of_warp = slot0 / (kSlots * gridDim.x);
  if (kSlots > 1 && lane == 0) {
    exchange.trace.stamp(TraceRole::kSend, of_warp, &TraceRecord::begin);
  }
  const auto top_k = static_cast<std::uint32_t>(exchange.shape.top_k);
  // Lane i < kSlots looks up slot i.
  std::uint32_t my_token = ~0u, my_distance = 0;
  std::int32_t my_expert = 0;
  if (const std::uint32_t slot = slot0 + lane; lane < kSlots && slot >= begin && slot < end) {
    const std::uint32_t list =
        find_expert(tables.send_begin, exchange.table.partition.levels * others, slot);
    my_distance = list % others + 1;
    my_expert = exchange.table.partition.rank_begin[exchange.life.rank_at(my_distance)] +
                static_cast<int>(list / others);
    my_token = SlotEntry::token(__ldcg(
        exchange.lists.lists + static_cast<std::size_t>(my_expert) * exchange.shape.max_tokens +
        (slot - tables.send_begin[list])));
  }
  const auto expert_of = [&](std::uint32_t token, int owner) {  // of lane k, if the owner has it
    const std::int32_t id =
        lane < top_k ? __ldcg(exchange.lists.ids + static_cast<std::size_t>(token) * top_k + lane)
                     : -1;
    return id >= exchange.table.partition.rank_begin[owner] &&
                   id < exchange.table.partition.rank_begin[owner + 1]
               ? id
               : -1;
  };
  std::uint32_t sent = 0;
#pragma unroll 1
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    const std::uint32_t token = __shfl_sync(~0u, my_token, i);
    if (token == ~0u) continue;
    const std::uint32_t distance = __shfl_sync(~0u, my_distance, i);
    const std::int32_t expert = __shfl_sync(~0u, my_expert, i);
    const int owner = exchange.life.rank_at(distance);
    const Peer peer(heaps, owner);
    // This rank's distance from the owner, which is the rest of the circle.
    const std::uint32_t back = size - distance;
    const std::int32_t id = expert_of(token, owner);
    if (__any_sync(~0u, id >= 0 && id < expert)) continue;
    sent |= 1u << i;
    if (id >= 0 && part.index == 0) {
      const auto of_owner =
          static_cast<std::uint32_t>(id - exchange.table.partition.rank_begin[owner]);
      const std::uint32_t position =
          __ldcg(exchange.lists.positions + static_cast<std::size_t>(token) * top_k + lane);
      peer.put(layer.heap.entries(of_owner, back) + position, SlotEntry::pack(token, lane));
      if (exchange.activation.weight_on_input) {
        peer.put(layer.heap.weights(of_owner, back) + position,
                 __ldcg(exchange.lists.weights +
                        static_cast<std::size_t>(token) * exchange.shape.cells_per_token + lane));
      }
    }
    const protocol::Region<std::byte> to = layer.heap.pool(back, token);
    peer.put_row<P::kCopyVectors>(
        to, exchange.tokens.rows + token * exchange.tokens.row_bytes,
        static_cast<std::uint32_t>(exchange.shape.hidden * P::kNumerics.token_bytes()), part);
    if constexpr (kScaled<P>) {
      const float* const scales =
          exchange.tokens.row_scales + token * exchange.tokens.row_scale_stride;
      const auto to_scales = to.template as<float>(layer.heap.scale_offset());
      for (std::uint32_t group = lane; part.index == 0 && group < exchange.x_groups; group += 32) {
        peer.put(to_scales + group, __ldcg(scales + group));
      }
    }
  }
  if (sent != 0 && lane == 0 && part.index == 0) {
    atomicAdd(exchange.life.state.words.counters() + kSentTokens,
              static_cast<std::uint32_t>(__popc(sent)));
  }
  __syncwarp();
  if constexpr (P::kTraced && kSlots > 1) {
    const std::uint32_t slots = __ballot_sync(~0u, my_token != ~0u);
    if (slots != 0 && lane == __ffs(static_cast<int>(slots)) - 1u) {
      exchange.trace.subject(
          TraceRole::kSend, of_warp,
          {TraceKind::kSend, -1, -1, my_expert, __popc(sent), exchange.life.rank_at(my_distance)});
      exchange.trace.stamp(TraceRole::kSend, of_warp, &TraceRecord::end);
    }
  }
#pragma unroll 1
  for (; sent != 0; sent &= sent - 1) {
    const int i = __ffs(static_cast<int>(sent)) - 1;
    const std::uint32_t distance = __shfl_sync(~0u, my_distance, i);
    const int owner = exchange.life.rank_at(distance);
    const std::int32_t id = expert_of(__shfl_sync(~0u, my_token, i), owner);
    if (id < 0) continue;
    // The warp that sends the last of an expert's rows raises the flag on behalf of all senders.
    // The counter is acquire and release, so the other senders' stores come before the flag.
    std::uint32_t* const counter =
        exchange.life.state.words.sent(exchange.shape.num_experts, exchange.table.layer.max_tiles) +
        id;
    const std::uint32_t units = protocol::fetch_add(counter, part.units()) + part.units();
    if (units != RowPart::kUnits * __ldcg(exchange.life.state.words.expert_rows() + id)) continue;
    const auto of_owner =
        static_cast<std::uint32_t>(id - exchange.table.partition.rank_begin[owner]);
    const Peer peer(heaps, owner);
    peer.signal(layer.heap.arrived(of_owner, size - distance), exchange.life.flag());
    atomicAdd(exchange.life.state.words.counters() + kRaisedFlags, 1u);
  }
}

// The number of slots that the math warps send before their first task. The pack warps send the
// others.
template <typename P>
__device__ __forceinline__ std::uint32_t first_sends(const Exchange<P>& exchange) {
  constexpr std::uint32_t kOfEachWarp = 2;
  return min(exchange.num_sends(), kOfEachWarp * gridDim.x * kMathWarps);
}

// The number of levels that the pack warps send before they pack one: as many as have kSlotsAhead
// slots for every block. With fewer in flight, ranks wait for each other at every level; with more,
// the first tiles come late. See docs/lab/ranks-and-arrivals.md.
template <typename P>
__device__ __forceinline__ std::uint32_t send_lead(const Exchange<P>& exchange) {
  constexpr std::uint32_t kSlotsAhead = 12, kLeast = 2, kMost = 16;
  const std::uint32_t levels =
      kSlotsAhead * gridDim.x * exchange.table.partition.levels / max(exchange.num_sends(), 1u);
  return min(max(levels, kLeast), kMost);
}

// Computes where each destination's slots begin, as soon as all blocks of this rank have completed
// their lists. It needs no other rank's counts. Returns false if the pass was given up. Called by
// the math warps.
template <typename P>
__device__ __forceinline__ bool place_sends(const Exchange<P>& exchange) {
  const ExchangeParams& layer = exchange.layer;
  const std::uint32_t thread = threadIdx.x - kWarpgroup;
  const bool arrived =
      thread != 0 || all_arrived(exchange.life.waiter(), exchange.life.barrier(kListsReady));
  if (named_barrier_any<kMathThreads>(kOfMath, !arrived)) return false;
  const auto others = static_cast<std::uint32_t>(exchange.life.num_ranks() - 1);
  for (std::uint32_t i = thread; i < exchange.table.partition.levels * others; i += kMathThreads) {
    const int owner = exchange.life.rank_at(i % others + 1);
    const int e = exchange.table.partition.rank_begin[owner] + static_cast<int>(i / others);
    exchange.ranks.send_begin[i] = e < exchange.table.partition.rank_begin[owner + 1]
                                       ? __ldcg(exchange.life.state.words.expert_rows() + e)
                                       : 0;
  }
  named_barrier<kMathThreads>(kOfMath);
  if (thread < 32) {
    sum_sends(exchange);
    __syncwarp();
  }
  if (thread == 0) {
    SendState& state = exchange.state;
    state.first_sends = first_sends(exchange);
    state.send_lead = send_lead(exchange);
    if (blockIdx.x == 0) exchange.life.state.words.counters()[kSentRows] = exchange.num_sends();
  }
  named_barrier<kMathThreads>(kOfMath);
  return true;
}

}  // namespace switchyard::gpu
