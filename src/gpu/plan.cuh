// From logits, or from ids given, to lists of rows per expert and token tiles.
#pragma once

#include "gpu/gate.cuh"
#include "protocol/task.h"

namespace switchyard::gpu {

template <typename P>
__device__ __forceinline__ RoutingTables tables_of(const LayerParams& layer, BlockStorage<P>& block,
                                                   bool alone) {
  return {alone ? block.own.ids : layer.ids, alone ? block.own.weights : layer.weights,
          static_cast<std::uint32_t>(layer.top_k),
          static_cast<std::uint32_t>(layer.cells_per_token), alone};
}

struct GateOutcome {
  std::int32_t id = -1;
  float weight = 0;
  std::uint32_t num_nan = 0;
  // Of this lane's slot, or of the token: an id that was not to be, as BadId has it; 0: none.
  std::uint64_t bad_id = 0;
};

// Lane k's slot of the token, from the gate.
template <int kPerLane>
__device__ __forceinline__ GateOutcome gate_token(const LayerParams& layer, std::uint32_t slices,
                                                  const CallParams& call, std::uint32_t token,
                                                  std::uint32_t parts) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  float logits[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) logits[j] = 0;
  if ((parts & routing::kScorePart) != 0) {
    sum_slices(layer, slices, call.tokens, token, lane, num_experts, logits);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const std::uint32_t e = lane + 32 * j;
      if (e >= num_experts) {
        logits[j] = __int_as_float(0x7fffffff);  // NaN: never chosen
      } else if (layer.router_bias != nullptr) {
        logits[j] += layer.router_bias[e];
      }
    }
  }
  GateOutcome outcome;
  const std::int32_t* hashed = layer.hash_table;
  if (layer.routing.spec.method == RoutingMethod::kHash) {
    const std::int32_t row = call.token_ids[token];
    if (row < 0 || row >= layer.hash_rows) {
      outcome.bad_id = BadId{BadId::Kind::kToken, token, row}.pack();
    } else {
      hashed += static_cast<std::size_t>(row) * layer.top_k;
    }
  }
  routing::Choice mine{};
  const routing::RouteStatus status =
      routing::route_warp(layer.routing, logits, layer.correction_bias, hashed, mine, parts);
  outcome.num_nan = static_cast<std::uint32_t>(status.num_nan);
  if (outcome.bad_id != 0) return outcome;
  outcome.id = mine.id;
  outcome.weight = mine.weight;
  if ((status.bad_hashed_id_mask >> lane & 1) != 0) {
    outcome.bad_id = BadId{BadId::Kind::kTable, token, hashed[lane]}.pack();
  }
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
  }
  const bool outside = outcome.id < -1 || outcome.id >= layer.num_experts;
  // An expert has as many rows as tokens at most: named twice, it would have more.
  const std::uint32_t same = __match_any_sync(~0u, outcome.id);
  if (outside || (outcome.id >= 0 && (same & ((1u << lane) - 1)) != 0)) {
    outcome.bad_id =
        BadId{outside ? BadId::Kind::kExpert : BadId::Kind::kTwice, token, outcome.id}.pack();
    outcome.id = -1;
  }
  return outcome;
}

// Routes tokens [begin, end), one for each of kRouters warps at a time: this one begins with
// `begin`. Their slots per expert are counted in block.ranks.routed, and each slot's place among
// them goes to layer.positions, unless every block routes for itself. With some of the parts only
// it is a rehearsal, which leaves nothing but garbage in block.own.
template <std::uint32_t kRouters, typename P>
__device__ __forceinline__ void route_tokens(const Pass<P>& pass, std::uint32_t begin,
                                             std::uint32_t end, std::uint32_t parts) {
  const LayerParams& layer = pass.layer;
  const CallParams& call = pass.call;
  const bool rehearsal = parts != routing::kAllRouteParts;
  const RoutingTables tables = rehearsal ? tables_of(layer, pass.block, true) : pass.state().tables;
  const bool counts = !tables.alone;
  const bool report = !rehearsal && (counts || blockIdx.x == 0);
  const std::uint32_t slices = pass.state().gate_slices, lane = threadIdx.x % 32;
#pragma unroll 1
  for (std::uint32_t token = __shfl_sync(~0u, begin, 0); token < end; token += kRouters) {
    GateOutcome mine;
    if (call.given_ids != nullptr) {
      mine = given_token(layer, call, token);
    } else {
      // The variants for up to kMaxDeviceExperts, and no more of the kernel's code than that.
      const int per_lane = protocol::ceil_div(layer.num_experts, 32);
      mine = per_lane <= 2   ? gate_token<2>(layer, slices, call, token, parts)
             : per_lane <= 4 ? gate_token<4>(layer, slices, call, token, parts)
             : per_lane <= 8 ? gate_token<8>(layer, slices, call, token, parts)
                             : gate_token<16>(layer, slices, call, token, parts);
    }
    if (report && lane == 0 && mine.num_nan != 0) {
      atomicAdd(pass.state().words.counters() + kNanLogits, mine.num_nan);
      atomicAdd(pass.state().words.counters() + kNanTokens, 1u);
    }
    // One of them, whichever is stored last.
    if (report && mine.bad_id != 0) layer.failures->bad_id = mine.bad_id;
    const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
    const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
    if (lane < tables.top_k) {
      tables.ids[slot] = mine.id;
      tables.weights[cell] = mine.weight;
      if constexpr (!P::kAlone) {
        if (counts && mine.id >= 0) {
          layer.positions[slot] = atomicAdd(pass.block.ranks.routed + mine.id, 1u);
        }
      }
      if (report && call.out_ids != nullptr) call.out_ids[slot] = mine.id;
      if (report && call.out_weights != nullptr) call.out_weights[slot] = mine.weight;
    } else if (lane == tables.top_k && tables.cells_per_token > tables.top_k) {
      float weight = 1;
      if (layer.shared_sigmoid) {
        float logit[1] = {0};
        sum_slices(layer, slices, call.tokens, token, layer.num_experts, layer.num_experts + 1,
                   logit);
        weight = routing::sigmoid(logit[0]);
      }
      tables.weights[cell] = weight;
    }
  }
}

// This rank's slots with one of its own experts.
__device__ __forceinline__ const std::uint32_t* own_list(const LayerParams& layer,
                                                         std::uint32_t expert) {
  return layer.lists + static_cast<std::size_t>(layer.first_expert + expert) * layer.max_tokens;
}

// From block.expert_rows to tiles: tile_begin, row_begin, and what the pass's state says of them.
// Called by one warp. Loops are not unrolled: the code runs once in a pass, and fetching it is what
// takes the time.
template <typename P>
__device__ __forceinline__ void place_tiles(const LayerParams& layer, BlockStorage<P>& block,
                                            std::uint32_t shared_rows) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  const std::uint32_t per_lane = protocol::ceil_div(num_experts, 32u);
  const std::uint32_t begin = min(lane * per_lane, num_experts);
  const std::uint32_t end = min(begin + per_lane, num_experts);
  const protocol::TokenTiles shared_tiles(shared_rows, P::kTileShape);
  const auto own_begin = static_cast<std::uint32_t>(layer.first_expert);
  const auto own_end = own_begin + static_cast<std::uint32_t>(layer.local_experts);
  // Of the ranks before this one.
  std::uint32_t tiles_before = 0;
  std::uint32_t tiles = 0, rows = 0, most = shared_tiles.count;
  std::uint32_t height = max(shared_tiles.height, P::kTileShape.least);
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const protocol::TokenTiles cut(block.expert_rows[e], P::kTileShape);
    tiles += cut.count;
    if (P::kAlone || (e >= own_begin && e < own_end)) {
      rows += cut.rows;
      height = max(height, cut.height);
      most = max(most, cut.count);
    } else if (e < own_begin) {
      tiles_before += cut.count;
    }
    // For the loop below, which must not divide again.
    block.tile_begin[e] = cut.count;
  }
  std::uint32_t tiles_to = tiles, rows_to = rows;  // up to this lane's last expert
#pragma unroll 1
  for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other_tiles = __shfl_up_sync(~0u, tiles_to, offset);
    const std::uint32_t other_rows = __shfl_up_sync(~0u, rows_to, offset);
    if (lane >= offset) {
      tiles_to += other_tiles;
      rows_to += other_rows;
    }
  }
  if constexpr (!P::kAlone) tiles_before = __reduce_add_sync(~0u, tiles_before);
  std::uint32_t tile = shared_tiles.count - tiles_before + tiles_to - tiles;
  std::uint32_t row = shared_tiles.rows + rows_to - rows;
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const std::uint32_t count = block.tile_begin[e];
    block.tile_begin[e] = tile;
    tile += count;
    if (P::kAlone || (e >= own_begin && e < own_end)) {
      block.row_begin[e] = row;
      row += block.expert_rows[e];
    }
  }
  height = __reduce_max_sync(~0u, height);
  most = __reduce_max_sync(~0u, most);
  if (lane == 31) {
    block.tile_begin[num_experts] = tile;
    block.pass.num_rows = row;
    block.pass.shared_tiles = shared_tiles;
    block.pass.max_height = height;
    block.pass.tile_offset = tiles_before - shared_tiles.count;
    block.pass.log2_band = most > 1 ? layer.log2_band : 0;
  }
}

// Of the parts of GEMM2's K. Where there are fewer of its tasks than blocks, in a small pass, it is
// split into as many as give every block one, none shorter than a few stages.
template <typename P>
__device__ __forceinline__ std::uint32_t log2_splits(const LayerParams& layer, std::uint32_t tiles,
                                                     std::uint32_t shared_tiles) {
  constexpr int kFewest = 8 * kStageRowBytes / P::kElementBytes;  // columns
  const std::uint32_t tasks = tiles * protocol::ceil_div(layer.hidden, kTileRows);
  int depth = layer.routed.intermediate;
  if (shared_tiles != 0) depth = min(depth, layer.shared.intermediate);
  std::uint32_t log2 = 0;
  while (log2 < kMaxLog2Splits && tasks << (log2 + 1) <= kNominalBlocks &&
         depth >> (log2 + 1) >= kFewest) {
    ++log2;
  }
  return log2;
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

// The same for a whole warp, in two steps.
__device__ __forceinline__ std::uint32_t find_expert_together(const std::uint32_t* begin,
                                                              std::uint32_t num_experts,
                                                              std::uint32_t i) {
  constexpr std::uint32_t kStep = kMaxDeviceExperts / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  const auto last_not_after = [&](std::uint32_t e) {
    return __popc(__ballot_sync(~0u, e < num_experts && begin[e] <= i)) - 1;
  };
  const std::uint32_t first = kStep * last_not_after(kStep * lane);
  return first + last_not_after(lane < kStep ? first + lane : num_experts);
}

}  // namespace switchyard::gpu
