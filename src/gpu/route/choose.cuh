// Chooses each slot's expert and weight from logits, or takes those that are given.
#pragma once

#include <climits>

#include "gpu/route/gate.cuh"

namespace switchyard::gpu {

// True if the launch does nothing but choose experts.
template <typename P>
__device__ __forceinline__ bool only_routes(const RouteCall& call) {
  return P::kMayOnlyRoute && call.only_routes;
}

struct GateOutcome {
  std::int32_t id = -1;
  float weight = 0;
  std::uint32_t num_nan = 0;
  // A packed BadId: an id of this lane's slot, or of the token, that is not allowed. 0: none.
  std::uint64_t bad_id = 0;
};

// Loads columns `column + 32 j` of a token's given logits that are below `end`.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const RouteCall& call, std::uint32_t token,
                                            std::uint32_t column, std::uint32_t end,
                                            float (&logits)[kPerLane]) {
  const std::int64_t at = token * call.logits_stride + column;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (column + 32 * j >= end) continue;
    if (call.bf16_logits) {
      const std::uint32_t code = static_cast<const std::uint16_t*>(call.logits)[at + 32 * j];
      logits[j] = __uint_as_float(code << 16);
    } else {
      logits[j] = static_cast<const float*>(call.logits)[at + 32 * j];
    }
  }
}

// Returns lane k's slot of the token, from its logits.
template <typename Rows, typename P>
__device__ __forceinline__ GateOutcome choose_slots(const Routing<P>& routing, std::uint32_t token,
                                                    Rows& logits, std::uint32_t parts) {
  const std::uint32_t lane = threadIdx.x % 32;
  GateOutcome outcome;
  const std::int32_t* hashed = routing.router.hash_table;
  if (routing.router.routing.spec.method == RoutingMethod::kHash) {
    const std::int32_t row = routing.call.token_ids[token];
    if (row < 0 || row >= routing.router.hash_rows) {
      outcome.bad_id = BadId{BadId::Kind::kToken, token, row}.pack();
    } else {
      hashed += static_cast<std::size_t>(row) * routing.shape.top_k;
    }
  }
  routing::Choice mine{};
  const routing::RouteStatus status = routing::route_warp(
      routing.router.routing, logits, routing.router.correction_bias, hashed, mine, parts);
  outcome.num_nan = static_cast<std::uint32_t>(status.num_nan);
  if (outcome.bad_id != 0) return outcome;
  outcome.id = mine.id;
  outcome.weight = mine.weight;
  if ((status.bad_hashed_id_mask >> lane & 1) != 0) {
    outcome.bad_id = BadId{BadId::Kind::kTable, token, hashed[lane]}.pack();
  }
  return outcome;
}

// Returns lane k's slot of the token, from logits of the gate or given.
template <int kPerLane, typename P>
__device__ __forceinline__ GateOutcome gate_token(const Routing<P>& routing, std::uint32_t slices,
                                                  std::uint32_t token, std::uint32_t parts) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(routing.router.num_routed);
  float logits[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) logits[j] = 0;
  if ((parts & routing::kScorePart) != 0) {
    const bool given = routing.call.logits != nullptr;
    if (given) {
      load_logits(routing.call, token, lane, num_experts, logits);
    } else {
      sum_slices(routing.router, slices, routing.tokens, token, lane, num_experts, logits);
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const std::uint32_t e = lane + 32 * j;
      if (e >= num_experts) {
        logits[j] = __int_as_float(0x7fffffff);  // NaN: never chosen
      } else if (!given && routing.router.router_bias != nullptr) {
        logits[j] += routing.router.router_bias[e];
      }
    }
  }
  return choose_slots(routing, token, logits, parts);
}

// Does the same for more experts than a lane has registers for. Logits are in the ring's memory,
// which neither the gate nor tasks need now.
template <typename P>
__device__ __forceinline__ GateOutcome gate_token_in_memory(const Routing<P>& routing,
                                                            std::uint32_t slices,
                                                            std::uint32_t token) {
  constexpr int kAtOnce = 8;  // rows whose loads are in flight together
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(routing.router.num_routed);
  float* const words =
      reinterpret_cast<float*>(routing.ring) + threadIdx.x / 32 * 2 * kMaxDeviceExperts;
  routing::warp::MemoryRows rows{words,
                                 reinterpret_cast<routing::OrderKey*>(words + kMaxDeviceExperts),
                                 static_cast<int>(protocol::ceil_div(num_experts, 32u))};
  const bool given = routing.call.logits != nullptr;
#pragma unroll 1
  for (std::uint32_t row = 0; row < static_cast<std::uint32_t>(rows.count); row += kAtOnce) {
    const std::uint32_t column = lane + 32 * row;
    float logits[kAtOnce] = {};
    if (given) {
      load_logits(routing.call, token, column, num_experts, logits);
    } else {
      sum_slices(routing.router, slices, routing.tokens, token, column, num_experts, logits);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::uint32_t e = column + 32 * j;
      if (row + j >= static_cast<std::uint32_t>(rows.count)) continue;
      if (e < num_experts && !given && routing.router.router_bias != nullptr) {
        logits[j] += routing.router.router_bias[e];
      }
      rows.values[e] = e < num_experts ? logits[j] : routing::warp::nan();
    }
  }
  return choose_slots(routing, token, rows, routing::kAllRouteParts);
}

__device__ __forceinline__ std::int32_t given_id(const RouteCall& call, std::size_t slot) {
  if (!call.wide_ids) return static_cast<const std::int32_t*>(call.given_ids)[slot];
  const std::int64_t id = static_cast<const std::int64_t*>(call.given_ids)[slot];
  // No expert has an id that an i32 cannot hold, so any invalid one may take its place.
  const auto narrow = static_cast<std::int32_t>(id);
  return narrow == id ? narrow : id < 0 ? INT_MIN : INT_MAX;
}
__device__ __forceinline__ float given_weight(const RouteCall& call, std::size_t slot) {
  if (!call.bf16_weights) return static_cast<const float*>(call.given_weights)[slot];
  const std::uint32_t code = static_cast<const std::uint16_t*>(call.given_weights)[slot];
  return __uint_as_float(code << 16);
}

// Whether another lane's slot of the token names the expert of this lane's, too. See for_each_id():
// a slot that weighs nothing is then none, and a later one that weighs something is bad.
struct RepeatedSlot {
  bool bad = false, idle = false;

  __device__ RepeatedSlot(std::int32_t id, float weight) {
    const std::uint32_t before = (1u << threadIdx.x % 32) - 1;
    const std::uint32_t same = __match_any_sync(~0u, id), weighed = __ballot_sync(~0u, weight != 0);
    if (id < 0) return;
    bad = weight != 0 && (same & weighed & before) != 0;
    idle = weight == 0 && ((same & weighed) | (same & before)) != 0;
  }
};

template <typename P>
__device__ __forceinline__ GateOutcome given_token(const Routing<P>& routing, std::uint32_t token) {
  const std::uint32_t lane = threadIdx.x % 32;
  GateOutcome outcome;
  if (lane < static_cast<std::uint32_t>(routing.shape.top_k)) {
    const std::size_t slot = static_cast<std::size_t>(token) * routing.shape.top_k + lane;
    outcome.id = given_id(routing.call, slot);
    outcome.weight = given_weight(routing.call, slot);
    if (routing.call.large_ids_are_none && outcome.id >= routing.router.num_routed) outcome.id = -1;
  }
  const bool outside = outcome.id < -1 || outcome.id >= routing.router.num_routed;
  // An expert has at most one row of each token. If a token named it twice, it would have more.
  const RepeatedSlot repeated(outcome.id, outcome.weight);
  if (outside || repeated.bad) {
    outcome.bad_id =
        BadId{outside ? BadId::Kind::kExpert : BadId::Kind::kDuplicate, token, outcome.id}.pack();
  }
  if (outside || repeated.bad || repeated.idle) outcome.id = -1;
  return outcome;
}

// Routes tokens [begin, end), one for each of kRouters warps at a time: this one begins with
// `begin`. Their slots per expert are counted in routing.routed, and each slot's place among
// them goes to routing.lists.positions, unless every block routes for itself. With some of the
// parts only it is a rehearsal, which leaves nothing but garbage in block.own.
template <std::uint32_t kRouters, typename P>
__device__ __forceinline__ void route_tokens(const Routing<P>& routing, std::uint32_t begin,
                                             std::uint32_t end, std::uint32_t parts) {
  const bool rehearsal = parts != routing::kAllRouteParts;
  const RoutingTables tables = rehearsal ? routing.tables(true) : routing.state.tables;
  const bool counts = !tables.alone;
  const bool report = !rehearsal && (counts || blockIdx.x == 0);
  const std::uint32_t slices = routing.state.gate_slices, lane = threadIdx.x % 32;
#pragma unroll 1
  for (std::uint32_t token = __shfl_sync(~0u, begin, 0); token < end; token += kRouters) {
    GateOutcome mine;
    if (P::kGivenRouting || routing.call.given_ids != nullptr) {
      mine = given_token(routing, token);
    } else if constexpr (!P::kGivenRouting) {
      // Only up to kUsualExperts have variants: more would take too much of the kernel's code.
      const int per_lane = protocol::ceil_div(routing.router.num_routed, 32);
      static_assert(kUsualExperts <= 16 * 32);
      mine = per_lane <= 2    ? gate_token<2>(routing, slices, token, parts)
             : per_lane <= 4  ? gate_token<4>(routing, slices, token, parts)
             : per_lane <= 8  ? gate_token<8>(routing, slices, token, parts)
             : per_lane <= 16 ? gate_token<16>(routing, slices, token, parts)
             // Its memory is still the gate's during a rehearsal.
             : rehearsal ? GateOutcome{}
                         : gate_token_in_memory(routing, slices, token);
    }
    if (report && lane == 0 && mine.num_nan != 0) {
      atomicAdd(routing.life.state.words.counters() + kNanLogits, mine.num_nan);
      atomicAdd(routing.life.state.words.counters() + kNanTokens, 1u);
    }
    if (report && mine.bad_id != 0 && lane < tables.top_k) {
      atomicAdd(routing.life.state.words.counters() + kBadSlots, 1u);
      // The last store wins: one bad id is reported. A table with bad ids is never skipped, because
      // it is the layer's own.
      if (!routing.call.skips_bad_ids || BadId::unpack(mine.bad_id).kind == BadId::Kind::kTable) {
        routing.life.layer.failures->bad_id = mine.bad_id;
      }
    }
    const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
    const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
    if (lane < tables.top_k) {
      if (report && routing.call.out_ids != nullptr) routing.call.out_ids[slot] = mine.id;
      if (!only_routes<P>(routing.call) && mine.id >= 0 && routing.router.place_of != nullptr) {
        mine.id = routing.router.place_of[mine.id];
      }
      tables.ids[slot] = mine.id;
      tables.weights[cell] = mine.weight;
      if constexpr (!kOwnStart<P>) {
        if (counts && mine.id >= 0) {
          routing.lists.positions[slot] = atomicAdd(routing.routed + mine.id, 1u);
        }
      }
      if (report && routing.call.out_weights != nullptr)
        routing.call.out_weights[slot] = mine.weight;
    } else if (lane == tables.top_k && tables.cells_per_token > tables.top_k) {
      float weight = 1;
      if (!P::kGivenRouting && routing.router.shared_sigmoid) {
        float logit[1] = {0};
        sum_slices(routing.router, slices, routing.tokens, token, routing.router.num_routed,
                   routing.router.num_routed + 1, logit);
        weight = routing::sigmoid(logit[0]);
      }
      tables.weights[cell] = weight;
    }
  }
  // After the next barrier the copy engine writes to memory that gate_token_in_memory() used.
  if (!kOwnStart<P> && !P::kGivenRouting && routing.router.num_routed > kUsualExperts) {
    fence_async_proxy_shared();
  }
}

}  // namespace switchyard::gpu
