// From logits, or from ids given, to lists of rows per expert and token tiles.
#pragma once

#include "gpu/gate.cuh"
#include "protocol/task.h"

namespace switchyard::gpu {

__device__ __forceinline__ bool routes_alone(const LayerParams& layer, std::uint32_t tokens) {
  return tokens <= kMaxOwnTokens && tokens * layer.top_k <= kMaxOwnSlots;
}

__device__ __forceinline__ RoutingTables tables_of(const LayerParams& layer, BlockStorage& block,
                                                   bool alone) {
  return {alone ? block.own.ids : layer.ids, alone ? block.own.weights : layer.weights,
          static_cast<std::uint32_t>(layer.top_k),
          static_cast<std::uint32_t>(layer.cells_per_token), alone};
}

struct GateOutcome {
  std::int32_t id = -1;
  float weight = 0;
  std::uint32_t num_nan = 0;
  bool bad_id = false;
};

// Lane k's slot of the token, from the gate.
template <int kPerLane>
__device__ __forceinline__ GateOutcome gate_token(const LayerParams& layer, const GateGrid& grid,
                                                  const CallParams& call, std::uint32_t token) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  float logits[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) logits[j] = 0;
  sum_slices(layer, grid.slices, call.tokens, token, lane, num_experts, logits);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const std::uint32_t e = lane + 32 * j;
    if (e >= num_experts) {
      logits[j] = __int_as_float(0x7fffffff);  // NaN: never chosen
    } else if (layer.router_bias != nullptr) {
      logits[j] += layer.router_bias[e];
    }
  }
  GateOutcome outcome;
  const std::int32_t* hashed = layer.hash_table;
  if (layer.routing.spec.method == RoutingMethod::kHash) {
    const std::int32_t row = call.token_ids[token];
    outcome.bad_id = row < 0 || row >= layer.hash_rows;
    if (!outcome.bad_id) hashed += static_cast<std::size_t>(row) * layer.top_k;
  }
  routing::Choice mine;
  const routing::RouteStatus status =
      routing::route_warp(layer.routing, logits, layer.correction_bias, hashed, mine);
  outcome.num_nan = static_cast<std::uint32_t>(status.num_nan);
  if (!outcome.bad_id) {
    outcome.id = mine.id;
    outcome.weight = mine.weight;
  }
  outcome.bad_id |= status.bad_hashed_id_mask != 0;
  return outcome;
}

__device__ __forceinline__ GateOutcome given_token(const LayerParams& layer, const CallParams& call,
                                                   std::uint32_t token) {
  const std::uint32_t lane = threadIdx.x % 32;
  GateOutcome outcome;
  if (lane < static_cast<std::uint32_t>(layer.top_k)) {
    const std::size_t slot = static_cast<std::size_t>(token) * layer.top_k + lane;
    outcome.id = call.given_ids[slot];
    outcome.weight = call.given_weights[slot];
    outcome.bad_id = outcome.id < -1 || outcome.id >= layer.num_experts;
    if (outcome.bad_id) outcome.id = -1;
  }
  return outcome;
}

// Routes tokens [begin, end), one per warp at a time, into `tables`; `local` counts the slots of
// each expert if it is not null, and each slot's place among them goes to layer.positions.
__device__ __forceinline__ void route_tokens(const LayerParams& layer, const CallParams& call,
                                             const RoutingTables& tables, const PassWords& words,
                                             std::uint32_t begin, std::uint32_t end,
                                             std::uint32_t* local, bool report) {
  const GateGrid grid(layer, call.tokens, gridDim.x);
  const std::uint32_t lane = threadIdx.x % 32;
  // Told to be the same in all lanes: a third less code.
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  for (std::uint32_t token = begin + warp; token < end; token += kWarps) {
    GateOutcome mine;
    if (call.given_ids != nullptr) {
      mine = given_token(layer, call, token);
    } else {
      // The variants for up to kMaxDeviceExperts, and no more of the kernel's code than that.
      const int per_lane = protocol::ceil_div(layer.num_experts, 32);
      mine = per_lane <= 2   ? gate_token<2>(layer, grid, call, token)
             : per_lane <= 4 ? gate_token<4>(layer, grid, call, token)
             : per_lane <= 8 ? gate_token<8>(layer, grid, call, token)
                             : gate_token<16>(layer, grid, call, token);
    }
    const bool bad = __any_sync(~0u, mine.bad_id);
    if (report && lane == 0) {
      if (mine.num_nan != 0) atomicAdd(words.counters() + kNanLogits, mine.num_nan);
      if (bad) *layer.failed = static_cast<std::uint32_t>(Failure::kBadId);
    }
    const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
    const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
    if (lane < tables.top_k) {
      tables.ids[slot] = mine.id;
      tables.weights[cell] = mine.weight;
      if (local != nullptr && mine.id >= 0) {
        layer.positions[slot] = atomicAdd(local + mine.id, 1u);
      }
      if (report && call.out_ids != nullptr) call.out_ids[slot] = mine.id;
      if (report && call.out_weights != nullptr) call.out_weights[slot] = mine.weight;
    } else if (lane == tables.top_k && tables.cells_per_token > tables.top_k) {
      float weight = 1;
      if (layer.shared_sigmoid) {
        float logit[1] = {0};
        sum_slices(layer, grid.slices, call.tokens, token, layer.num_experts, layer.num_experts + 1,
                   logit);
        weight = routing::sigmoid(logit[0]);
      }
      tables.weights[cell] = weight;
    }
  }
}

// The exclusive prefix sum over all threads of the block.
__device__ __forceinline__ std::uint64_t block_exclusive_sum(std::uint64_t value,
                                                             std::uint64_t* scan) {
  const std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint64_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint64_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= static_cast<std::uint32_t>(offset)) sum += other;
  }
  if (lane == 31) scan[warp] = sum;
  __syncthreads();
  std::uint64_t before = lane < warp ? scan[lane] : 0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) before += __shfl_xor_sync(~0u, before, offset);
  return before + sum - value;
}

// From block.expert_rows to tiles: tile_begin, row_begin, and what the pass's state says of them.
// Called by all threads.
__device__ __forceinline__ void place_tiles(const LayerParams& layer, BlockStorage& block,
                                            std::uint32_t shared_rows) {
  constexpr std::uint32_t kPerThread = (kMaxDeviceExperts + kThreads - 1) / kThreads;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  const auto pair = [](std::uint32_t tiles, std::uint32_t rows) {
    return std::uint64_t{tiles} << 32 | rows;
  };
  const protocol::TokenTiles shared_tiles(shared_rows, kTileShape);
  if (threadIdx.x == 0) {
    block.pass.shared_tiles = shared_tiles;
    block.pass.max_height = kTileShape.granule;
  }
  std::uint64_t sizes[kPerThread], total = 0;
  std::uint32_t height = shared_tiles.height;
#pragma unroll
  for (std::uint32_t i = 0; i < kPerThread; ++i) {
    const std::uint32_t e = threadIdx.x * kPerThread + i;
    const protocol::TokenTiles cut(e < num_experts ? block.expert_rows[e] : 0, kTileShape);
    sizes[i] = pair(cut.count, cut.rows);
    height = max(height, cut.height);
    total += sizes[i];
  }
  std::uint64_t before =
      block_exclusive_sum(total, block.scan) + pair(shared_tiles.count, shared_tiles.rows);
  const auto write = [&](std::uint32_t e) {
    block.tile_begin[e] = static_cast<std::uint32_t>(before >> 32);
    block.row_begin[e] = static_cast<std::uint32_t>(before);
  };
#pragma unroll
  for (std::uint32_t i = 0; i < kPerThread; ++i) {
    const std::uint32_t e = threadIdx.x * kPerThread + i;
    if (e >= num_experts) break;
    write(e);
    before += sizes[i];
    if (e == num_experts - 1) write(num_experts);
  }
  height = __reduce_max_sync(~0u, height);
  if (threadIdx.x % 32 == 0) atomicMax(&block.pass.max_height, height);
  __syncthreads();
}

// The e with begin[e] <= i < begin[e + 1].
__device__ __forceinline__ std::uint32_t find_expert(const std::uint32_t* begin,
                                                     std::uint32_t num_experts, std::uint32_t i) {
  std::uint32_t low = 0, high = num_experts;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (begin[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace switchyard::gpu
