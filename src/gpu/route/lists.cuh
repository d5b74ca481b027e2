// The rows of each expert: lists of slots, each a (token, k).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/pipeline/wait.cuh"
#include "gpu/route/params.h"
#include "gpu/tile/params.h"
#include "protocol/heap.h"

namespace switchyard::gpu {

// An entry of an expert's list: the slot (token, k) of one row.
struct SlotEntry : protocol::SlotEntry {
  // Checks an entry that another rank sent. In a pass that was given up it may not have arrived,
  // and the word may name no slot; slot 0 then takes its place.
  __device__ static std::uint32_t sent(std::uint32_t entry, const ModelShape& shape) {
    return token(entry) < static_cast<std::uint32_t>(shape.max_tokens) &&
                   k(entry) < static_cast<std::uint32_t>(shape.top_k)
               ? entry
               : 0;
  }
  // The slot's index among all tokens' cells, and among their weights.
  __device__ static std::uint32_t cell(std::uint32_t entry, std::uint32_t cells_per_token) {
    return token(entry) * cells_per_token + k(entry);
  }
};

// The routing of a pass in which every block routes all tokens for itself. In other passes it holds
// only the one token of a rehearsal.
template <typename P>
struct OwnRouting {
  static constexpr bool kAll = kOwnStart<P>;
  static constexpr std::uint32_t kTokens = kAll ? P::kSmallTokens : 1;
  static constexpr std::uint32_t kSlots = kAll ? kMaxOwnSlots : protocol::kMaxTopK;
  std::int32_t ids[kSlots];
  float weights[kSlots + kTokens];  // [T, cells_per_token]
  std::uint16_t positions[kSlots];
  std::uint32_t lists[kSlots];
};

// The place of a pass's routing. Small passes keep it in every block's shared memory, large ones
// share it in device memory.
struct RoutingTables {
  std::int32_t* ids;  // [T, K]
  float* weights;     // [T, cells_per_token]
  std::uint32_t top_k;
  std::uint32_t cells_per_token;
  bool alone;  // in this block's shared memory
};
struct RouteState {
  const std::uint16_t* x;  // [T, H] bf16, for the gate
  std::int64_t x_stride;   // in elements
  RoutingTables tables;
  std::uint32_t gate_slices;  // the number of partial sums per logit
};

// Routing as its warps see it.
template <typename P>
struct Routing {
  Lifetime life;
  const ModelShape& shape;
  const RouterParams& router;
  const ListParams& lists;
  const RouteCall& call;
  const std::uint32_t& tokens;
  RouteState& state;
  OwnRouting<P>& own;
  std::uint32_t*
      routed;       // [E]: rows of the tokens that this block has routed; null if it routes all
  std::byte* ring;  // its memory

  __device__ RoutingTables tables(bool alone) const {
    return {alone ? own.ids : lists.ids, alone ? own.weights : lists.weights,
            static_cast<std::uint32_t>(shape.top_k),
            static_cast<std::uint32_t>(shape.cells_per_token), alone};
  }
};

// The first of this rank's tokens that a block routes, in passes whose tokens the blocks share out.
__device__ __forceinline__ std::uint32_t first_token_of(std::uint32_t tokens,
                                                        std::uint32_t of_block) {
  return static_cast<std::uint32_t>(std::uint64_t{tokens} * of_block / gridDim.x);
}

// The list of this rank's slots with an expert, by its number among all ranks' experts. Only passes
// whose tokens the blocks share out have it.
__device__ __forceinline__ const std::uint32_t* shared_list(const ListParams& lists,
                                                            const ModelShape& shape,
                                                            std::uint32_t expert) {
  return lists.lists + static_cast<std::size_t>(expert) * shape.max_tokens;
}

// Takes a slot's expert away, as if it had been routed to none.
template <typename P>
__device__ __forceinline__ void drop_slot(const Routing<P>& routing, const RoutingTables& tables,
                                          std::uint32_t slot, bool report) {
  tables.ids[slot] = -1;
  tables.weights[slot / tables.top_k * tables.cells_per_token + slot % tables.top_k] = 0;
  if (!report) return;
  if (routing.call.out_ids != nullptr) routing.call.out_ids[slot] = -1;
  if (routing.call.out_weights != nullptr) routing.call.out_weights[slot] = 0;
  atomicAdd(routing.life.state.words.counters() + kDroppedSlots, 1u);
}

// Makes the lists of a pass that this block routes for itself, and counts the experts' rows. The
// position of a slot among its expert's is the number of earlier slots, so all blocks agree.
// `scratch`: [warps of slots, E] bytes.
template <typename P, typename Word>
__device__ __forceinline__ void list_own_slots(const Routing<P>& routing, Word* expert_rows,
                                               std::uint32_t slots, std::uint8_t* scratch) {
  const auto num_experts = static_cast<std::uint32_t>(routing.shape.num_experts);
  const std::uint32_t rounds = protocol::ceil_div(slots, 32u), lane = threadIdx.x % 32;
  for (std::uint32_t i = threadIdx.x; i < rounds * num_experts; i += kThreads) scratch[i] = 0;
  __syncthreads();
  // Positions count first among the 32 slots of a warp, then the slots of the warps before it are
  // added.
  for (std::uint32_t round = threadIdx.x / 32; round < rounds; round += kWarps) {
    const std::uint32_t slot = 32 * round + lane;
    const std::int32_t id = slot < slots ? routing.own.ids[slot] : -1;
    const std::uint32_t same = __match_any_sync(~0u, id);
    const std::uint32_t before = __popc(same & ((1u << lane) - 1));
    if (id < 0) continue;
    routing.own.positions[slot] = static_cast<std::uint16_t>(before);
    if (before == 0) {
      scratch[round * num_experts + id] = static_cast<std::uint8_t>(__popc(same));
    }
  }
  __syncthreads();
  for (std::uint32_t e = threadIdx.x; e < num_experts; e += kThreads) {
    std::uint32_t rows = 0;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      // A token has at most one slot with an expert, so the count fits in a byte.
      static_assert(P::kSmallTokens <= 255);
      std::uint8_t& count = scratch[round * num_experts + e];
      const std::uint32_t here = count;
      count = static_cast<std::uint8_t>(rows);
      rows += here;
    }
    expert_rows[e] = static_cast<Word>(min(rows, routing.call.capacity));
  }
  __syncthreads();
  for (std::uint32_t slot = threadIdx.x; slot < slots; slot += kThreads) {
    const std::int32_t id = routing.own.ids[slot];
    if (id < 0) continue;
    const std::uint32_t position =
        routing.own.positions[slot] + std::uint32_t{scratch[slot / 32 * num_experts + id]};
    routing.own.positions[slot] = static_cast<std::uint16_t>(position);
    if (position >= routing.call.capacity) {
      drop_slot(routing, routing.tables(true), slot, blockIdx.x == 0);
    }
  }
}

// Writes each slot into its expert's list, once the experts' rows have places. Called by one warp.
template <typename P, typename Word>
__device__ __forceinline__ void fill_own_lists(const Routing<P>& routing, const Word* row_begin,
                                               std::uint32_t slots) {
  const std::uint32_t first = row_begin[0];  // after the shared expert's rows
  for (std::uint32_t s = threadIdx.x % 32; s < slots; s += 32) {
    const std::int32_t id = routing.own.ids[s];
    if (id < 0) continue;
    routing.own.lists[row_begin[id] - first + routing.own.positions[s]] =
        SlotEntry::pack(s / routing.shape.top_k, s % routing.shape.top_k);
  }
}

// Makes the lists of a pass whose tokens are shared out over the blocks. `base`: [E], scratch.
template <typename P>
__device__ __forceinline__ void list_shared_slots(const Routing<P>& routing, std::uint32_t* base,
                                                  const PassWords& words, std::uint32_t begin,
                                                  std::uint32_t end) {
  for (std::uint32_t e = threadIdx.x; e < static_cast<std::uint32_t>(routing.shape.num_experts);
       e += kThreads) {
    const std::uint32_t rows = routing.routed[e];
    base[e] = rows != 0 ? atomicAdd(words.expert_rows() + e, rows) : 0;
  }
  __syncthreads();
  const auto top_k = static_cast<std::uint32_t>(routing.shape.top_k);
  for (std::uint32_t slot = begin * top_k + threadIdx.x; slot < end * top_k; slot += kThreads) {
    const std::int32_t id = routing.lists.ids[slot];
    if (id < 0) continue;
    const std::uint32_t position = routing.lists.positions[slot] + base[id];
    routing.lists.positions[slot] = position;
    routing.lists.lists[static_cast<std::size_t>(id) * routing.shape.max_tokens + position] =
        SlotEntry::pack(slot / top_k, slot % top_k);
  }
}

// The same for layers with a capacity: an expert keeps its first slots in the order of tokens. So
// lists stand in that order here, and blocks wait for each other's counts. Returns false if the
// pass was given up. Called by all threads of the block.
template <typename P>
__device__ __forceinline__ bool list_kept_slots(const Routing<P>& routing, std::uint32_t* base,
                                                const PassWords& words, std::uint32_t begin,
                                                std::uint32_t end) {
  const auto num_experts = static_cast<std::uint32_t>(routing.shape.num_experts);
  const std::uint32_t capacity = routing.call.capacity;
  std::uint32_t* const counts = routing.lists.block_rows;
  SWITCHYARD_ROLLED
  for (std::uint32_t e = threadIdx.x; e < num_experts; e += kThreads) {
    counts[blockIdx.x * num_experts + e] = routing.routed[e];
  }
  std::uint32_t* const counted = routing.life.barrier(kSlotsCounted);
  grid_arrive(counted);
  if (!grid_await(routing.life.waiter(), counted)) return false;
  SWITCHYARD_ROLLED
  for (std::uint32_t e = threadIdx.x; e < num_experts; e += kThreads) {
    std::uint32_t before = 0;
    for (std::uint32_t b = 0; b < blockIdx.x; ++b) before += __ldcg(counts + b * num_experts + e);
    base[e] = before;
    const std::uint32_t kept = before < capacity ? min(routing.routed[e], capacity - before) : 0;
    if (kept != 0) atomicAdd(words.expert_rows() + e, kept);
  }
  __syncthreads();
  const auto top_k = static_cast<std::uint32_t>(routing.shape.top_k);
  SWITCHYARD_ROLLED
  for (std::uint32_t slot = begin * top_k + threadIdx.x; slot < end * top_k; slot += kThreads) {
    const std::int32_t id = routing.lists.ids[slot];
    if (id < 0) continue;
    std::uint32_t position = base[id];
    SWITCHYARD_ROLLED
    for (std::uint32_t s = begin * top_k; s < slot; ++s) position += routing.lists.ids[s] == id;
    routing.lists.positions[slot] = position;
  }
  __syncthreads();  // slots are dropped after all have been counted
  const RoutingTables tables = routing.tables(false);
  SWITCHYARD_ROLLED
  for (std::uint32_t slot = begin * top_k + threadIdx.x; slot < end * top_k; slot += kThreads) {
    const std::int32_t id = routing.lists.ids[slot];
    if (id < 0) continue;
    const std::uint32_t position = routing.lists.positions[slot];
    if (position < capacity) {
      routing.lists.lists[static_cast<std::size_t>(id) * routing.shape.max_tokens + position] =
          SlotEntry::pack(slot / top_k, slot % top_k);
    } else {
      drop_slot(routing, tables, slot, true);
    }
  }
  return true;
}

}  // namespace switchyard::gpu
