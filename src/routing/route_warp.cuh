// Routing of one token by one warp: route_token() for device code.
//
// Lane l holds the logits of experts l, l + 32, l + 64, ... in registers; lane k returns slot k.
//
//   scores     each lane, in place, for its own experts; only if the choice is by score
//   groups     lane g ranks group g; every lane learns which of its experts still compete
//   choice     each lane sorts its own candidates; top_k rounds of "the best head of all lanes"
//   look-up    all slots at once: which expert had that key
//   weights    lane k computes slot k's; sums over slots or experts are all-to-all shuffles
//
// Warps that only want the instructions in the cache share these out among them: see RoutePart.
//
// Ids equal route_token()'s for equal logits, because keys are equal to the bit (see score.h) and
// ties go the same way. Sums are taken in route_token()'s order, so weights agree to the bit too.
//
// All arrays are indexed by constants, and every function that takes one by reference is forced
// inline: nothing goes through local memory. Code that is unrolled for 1,024 experts is 130 KB,
// which a kernel with other things to do does not want: such a kernel gives the values' place in
// memory instead (MemoryRows). Results are the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/host_device.h"
#include "routing/route.h"
#include "routing/score.h"
#include "switchyard/layer_spec.h"
#include "switchyard/routing.h"

namespace switchyard::routing {

// The facts of a LayerSpec that route_warp() needs, as a kernel argument.
struct DeviceRouting {
  RoutingSpec spec;
  int num_experts;        // E
  int top_k;              // K
  bool chooses_by_score;  // not by logit: see chooses_by_logit()
  int group_size;         // E / num_groups
  // ceil(2^20 / group_size). With it, expert * group_reciprocal >> 20 is expert / group_size,
  // because the excess, expert * (group_reciprocal * group_size - 2^20), is below 1024 * group_size
  // <= 2^20.
  int group_reciprocal;
};

// Makes it from a spec. Throws Error{kInvalidArgument} where check_routable() does.
inline DeviceRouting make_device_routing(const LayerSpec& spec) {
  check_routable(spec);
  const int group_size = spec.num_experts / spec.routing.num_groups;
  return {.spec = spec.routing,
          .num_experts = spec.num_experts,
          .top_k = spec.top_k,
          .chooses_by_score = !chooses_by_logit(spec.routing),
          .group_size = group_size,
          .group_reciprocal = ((1 << 20) + group_size - 1) / group_size};
}

// Calls f(std::integral_constant<int, kPerLane>{}) with the least kPerLane of 1, 2, 4, ... 32 that
// has room for the experts: 32 * kPerLane >= num_experts.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // f is for the host or for the device, as the caller is
#endif
template <typename Function>
SWITCHYARD_HOST_DEVICE auto with_per_lane(int num_experts, Function&& f) {
  if (num_experts <= 32) return f(std::integral_constant<int, 1>{});
  if (num_experts <= 64) return f(std::integral_constant<int, 2>{});
  if (num_experts <= 128) return f(std::integral_constant<int, 4>{});
  if (num_experts <= 256) return f(std::integral_constant<int, 8>{});
  if (num_experts <= 512) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 32>{});
}

// The result of lane k: slot k's expert and weight. {kNoExpert, 0} in lanes from top_k on.
struct Choice {
  std::int32_t id;
  float weight;
};

// The parts of route_warp(). Warps that rehearse may run only some; the result then means nothing.
enum RoutePart : std::uint32_t {
  kScorePart = 1,
  kChoicePart = 2,  // including groups and look-up
  kWeightPart = 4,
  kAllRouteParts = kScorePart | kChoicePart | kWeightPart
};

// The status of a token's routing, the same in all lanes.
struct RouteStatus {
  int num_nan;                       // NaN logits
  std::uint32_t bad_hashed_id_mask;  // bit k: slot k's hashed id is not in [0, E), and was skipped
};

// The following is also compiled where a test emulates a warp: see tests/routing/emulated_warp.h.
#if defined(__CUDACC__) || defined(SWITCHYARD_EMULATED_WARP)

namespace warp {

inline constexpr int kLanes = 32;
inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

// Volatile, so that values derived from the lane are computed anew for each token. Hoisted out of
// the caller's loop over tokens they would occupy dozens of registers.
__device__ __forceinline__ int lane_idx() {
#if defined(SWITCHYARD_EMULATED_WARP)
  return emulated_lane();
#else
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
#endif
}

__device__ __forceinline__ std::uint32_t lanes_below(int lane) { return (1u << lane) - 1; }

__device__ __forceinline__ float nan() { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ bool is_nan(float value) { return value != value; }

// Calls visit(values[j], j) for each j in order; values of one j are a row of 32 experts. It is
// unrolled four times only. That keeps the pipelines busy and the code small, which a token runs
// once and cold. The array is rotated instead of the index, so that indices stay constants.
template <int kPerLane, typename Visit>
__device__ __forceinline__ void for_each_row(float (&values)[kPerLane], Visit visit) {
  constexpr int kStep = kPerLane < 4 ? kPerLane : 4;
  static_assert(kPerLane % kStep == 0, "kPerLane is 1, 2, 3 or a multiple of 4");
#pragma unroll 1
  for (int first = 0; first < kPerLane; first += kStep) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) visit(values[i], first + i);
    if constexpr (kPerLane > kStep) {
      float visited[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) visited[i] = values[i];
#pragma unroll
      for (int j = 0; j < kPerLane - kStep; ++j) values[j] = values[j + kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) values[kPerLane - kStep + i] = visited[i];
    }
  }
}

// The same operations on values in memory: value j of lane l is values[32 j + l]. Each lane uses
// only its own, so no lane waits for another's stores.
struct MemoryRows {
  float* values;   // [32 count]
  OrderKey* keys;  // [32 count], scratch
  int count;
};
template <typename Visit>
__device__ __forceinline__ void for_each_row(MemoryRows& rows, Visit visit) {
  const int lane = lane_idx();
#pragma unroll 1
  for (int j = 0; j < rows.count; ++j) visit(rows.values[j * kLanes + lane], j);
}

template <int kPerLane>
__device__ __forceinline__ int num_rows(float (&)[kPerLane]) {
  return kPerLane;
}
__device__ __forceinline__ int num_rows(const MemoryRows& rows) { return rows.count; }

// The number of this lane's values that are NaN.
template <int kPerLane>
__device__ __forceinline__ int count_nan(float (&values)[kPerLane]) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) count += is_nan(values[j]) ? 1 : 0;
  return count;
}
__device__ __forceinline__ int count_nan(MemoryRows& rows) {
  int count = 0;
  for_each_row(rows, [&](float value, int) { count += is_nan(value) ? 1 : 0; });
  return count;
}

// The largest of this lane's values but NaN.
template <int kPerLane>
__device__ __forceinline__ float max_of_lane(float (&values)[kPerLane]) {
  float max = values[0];
#pragma unroll
  for (int j = 1; j < kPerLane; ++j) max = fmaxf(max, values[j]);  // ignores NaN
  return max;
}
__device__ __forceinline__ float max_of_lane(MemoryRows& rows) {
  float max = nan();
  for_each_row(rows, [&](float value, int) { max = fmaxf(max, value); });
  return max;
}

// Makes the value of expert `id`, which is the same for all lanes, NaN.
template <int kPerLane>
__device__ __forceinline__ void erase(int lane, float (&values)[kPerLane], std::int32_t id) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (lane + j * kLanes == id) values[j] = nan();
  }
}
__device__ __forceinline__ void erase(int lane, MemoryRows& rows, std::int32_t id) {
  if (id % kLanes == lane) rows.values[id] = nan();
}

// Returns start + lane 0's value + lane 1's + ... in this order, over the first `count` lanes; the
// others' values must be 0. The sums form a dependent chain, but a shorter one than a butterfly's
// five dependent shuffles, because these shuffles overlap.
__device__ __forceinline__ float sum_in_lane_order(float start, float value, int count) {
  constexpr int kBatch = 8;
  float sum = start;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    float values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = __shfl_sync(kAllLanes, value, first + i);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += values[i];
  }
  return sum;
}

// The sum of term(value) over all lanes' values, in the order of route.cpp's sum_of(): 16 running
// sums over experts 16 apart, then these in order.
template <typename Rows, typename Term>
__device__ __forceinline__ float sum_over_experts(int lane, Rows& values, Term term) {
  constexpr int kRunningSums = 16;
  float sum = 0.0f;
  for_each_row(values, [&](float value, int) {
    const float mine = term(value);
    sum += mine;
    sum += __shfl_down_sync(kAllLanes, mine, kRunningSums);
  });
  return sum_in_lane_order(0.0f, lane < kRunningSums ? sum : 0.0f, kRunningSums);
}

// The largest number among all lanes' values; -infinity if all are NaN.
__device__ __forceinline__ float max_over_lanes(float value) {
  const OrderKey key = __reduce_max_sync(kAllLanes, order_key(value));
  return key == kNeverChosen ? -INFINITY : value_of(key);
}

// The value of expert `id`, which may differ from lane to lane; 0 for kNoExpert.
template <typename Rows>
__device__ __forceinline__ float value_of_expert(Rows& values, std::int32_t id) {
  float found = 0.0f;
  for_each_row(values, [&](float value, int j) {
    const float other = __shfl_sync(kAllLanes, value, id % kLanes);
    if (id >= 0 && id / kLanes == j) found = other;
  });
  return found;
}

// ---- Scores ----

// A softmax over all experts. `sum` is of softmax_term(logit, max).
struct Softmax {
  float max;
  float sum;
};

template <typename Rows>
__device__ __forceinline__ Softmax softmax_over_experts(int lane, Rows& logits) {
  const float max = max_over_lanes(max_of_lane(logits));
  return {max,
          sum_over_experts(lane, logits, [&](float logit) { return softmax_term(logit, max); })};
}

// Replaces logits by scores. NaN stays NaN.
template <typename Rows>
__device__ __forceinline__ void score_all(ScoreFunction function, const Softmax& softmax,
                                          Rows& values) {
  switch (function) {
    case ScoreFunction::kSoftmax: {
      const float inverse = 1.0f / softmax.sum;
      for_each_row(values, [&](float& value, int) {
        const float score = rounded_product(softmax_term(value, softmax.max), inverse);
        value = is_nan(value) ? value : score;
      });
      return;
    }
    case ScoreFunction::kSigmoid:
      for_each_row(values,
                   [](float& value, int) { value = is_nan(value) ? value : sigmoid(value); });
      return;
    case ScoreFunction::kSqrtSoftplus:
      for_each_row(values,
                   [](float& value, int) { value = is_nan(value) ? value : sqrt_softplus(value); });
      return;
  }
}

// ---- Groups ----

__device__ __forceinline__ int group_of(const DeviceRouting& routing, int expert) {
  return expert * routing.group_reciprocal >> 20;
}

struct TopTwo {
  OrderKey first = kNeverChosen;
  OrderKey second = kNeverChosen;
};

__device__ __forceinline__ TopTwo merge(const TopTwo& a, const TopTwo& b) {
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

// Returns the two best candidates of `group`, which may differ from lane to lane and may be no
// group.
//   candidate(value, j)  the quantity that this lane's expert of row j is chosen by, or NaN if the
//                        expert may not be chosen
template <typename Rows, typename Candidate>
__device__ __forceinline__ TopTwo best_of_group(const DeviceRouting& routing, int lane, int group,
                                                Rows& values, Candidate candidate) {
  const int begin = group * routing.group_size;
  const int end = begin + routing.group_size;
  TopTwo best;
  if (routing.group_size % kLanes == 0) {
    // Here all experts of a row belong to one group.
    for_each_row(values, [&](float value, int j) {
      const OrderKey key = order_key(candidate(value, j));
      TopTwo row;
      row.first = __reduce_max_sync(kAllLanes, key);
      const std::uint32_t holders = __ballot_sync(kAllLanes, key == row.first);
      row.second = __reduce_max_sync(
          kAllLanes, lane == __ffs(static_cast<int>(holders)) - 1 ? kNeverChosen : key);
      if (begin <= j * kLanes && j * kLanes < end) best = merge(best, row);
    });
    return best;
  }
  // First each lane finds the two best among the lanes of its group from itself upwards, doubling
  // the distance at each step. The group's lowest lane of each row then has the two best of that
  // row.
  for_each_row(values, [&](float value, int j) {
    TopTwo run;
    run.first = order_key(candidate(value, j));
    const int first_of_row = j * kLanes;
    const int my_end = (group_of(routing, first_of_row + lane) + 1) * routing.group_size;
    const int num_above = min(my_end - first_of_row, kLanes) - 1 - lane;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const TopTwo above{__shfl_down_sync(kAllLanes, run.first, distance),
                         __shfl_down_sync(kAllLanes, run.second, distance)};
      if (distance <= num_above) run = merge(run, above);
    }
    const int lowest_lane = max(begin - first_of_row, 0) % kLanes;
    const TopTwo row{__shfl_sync(kAllLanes, run.first, lowest_lane),
                     __shfl_sync(kAllLanes, run.second, lowest_lane)};
    if (begin < first_of_row + kLanes && first_of_row < end) best = merge(best, row);
  });
  return best;
}

// Returns a mask. Bit j: this lane's expert of row j is in one of the best top_k_groups groups. A
// group without candidates is never among them.
template <int kPerLane, typename Candidate>
__device__ __forceinline__ std::uint32_t experts_of_best_groups(const DeviceRouting& routing,
                                                                int lane, float (&values)[kPerLane],
                                                                Candidate candidate) {
  const int top_k_groups = routing.spec.top_k_groups;
  // keys[j] is the key of group lane + 32 j.
  OrderKey keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) keys[j] = kNeverChosen;
#pragma unroll 1
  for (int row = 0; row * kLanes < routing.spec.num_groups; ++row) {
    const TopTwo best = best_of_group(routing, lane, lane + row * kLanes, values, candidate);
    OrderKey key = best.first;
    if (routing.spec.group_score == GroupScore::kSumTopTwo && best.second != kNeverChosen) {
      key = order_key(value_of(best.first) + value_of(best.second));
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = j == row ? key : keys[j];
  }

  // Bit j: group lane + 32 j competes.
  std::uint32_t competing = 0;
  if (routing.spec.num_groups <= kLanes) {
    int num_better = 0;
    constexpr int kBatch = 8;
#pragma unroll 1
    for (int first = 0; first < routing.spec.num_groups; first += kBatch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const OrderKey other = __shfl_sync(kAllLanes, keys[0], first + i);
        if (other > keys[0] || (other == keys[0] && first + i < lane)) ++num_better;
      }
    }
    competing = keys[0] != kNeverChosen && num_better < top_k_groups ? 1 : 0;
  } else if constexpr (kPerLane > 1) {
    // No model has so many groups. This finds the key of the last group that competes, from its
    // highest bit down: the largest number that at least top_k_groups keys reach. Keys are taken as
    // unsigned numbers, of which kNeverChosen is 0.
    const auto ordinal = [&](int j) { return static_cast<std::uint32_t>(keys[j]) ^ 0x80000000u; };
    std::uint32_t last = 0;
#pragma unroll 1
    for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
      int count = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) count += ordinal(j) >= (last | bit) ? 1 : 0;
      if (__reduce_add_sync(kAllLanes, count) >= top_k_groups) last |= bit;
    }
    int num_better = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) num_better += ordinal(j) > last ? 1 : 0;
    int num_equal = top_k_groups - __reduce_add_sync(kAllLanes, num_better);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const bool equals = ordinal(j) == last && last != 0;
      const std::uint32_t equals_mask = __ballot_sync(kAllLanes, equals);
      const int rank = __popc(equals_mask & lanes_below(lane));
      if (ordinal(j) > last || (equals && rank < num_equal)) competing |= 1u << j;
      num_equal -= __popc(equals_mask);
    }
  }

  std::uint32_t allowed = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int group = group_of(routing, lane + j * kLanes);
    const std::uint32_t bits = __shfl_sync(kAllLanes, competing, group % kLanes);
    allowed |= (bits >> (group / kLanes) & 1u) << j;
  }
  return allowed;
}

// Does the same for values in memory, where group keys are, too.
template <typename Candidate>
__device__ __forceinline__ std::uint32_t experts_of_best_groups(const DeviceRouting& routing,
                                                                int lane, MemoryRows& values,
                                                                Candidate candidate) {
  const int top_k_groups = routing.spec.top_k_groups;
  const int rows = (routing.spec.num_groups + kLanes - 1) / kLanes;
  OrderKey* const keys = values.keys + lane;  // keys[32 j]: of group lane + 32 j
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    const TopTwo best = best_of_group(routing, lane, lane + row * kLanes, values, candidate);
    OrderKey key = best.first;
    if (routing.spec.group_score == GroupScore::kSumTopTwo && best.second != kNeverChosen) {
      key = order_key(value_of(best.first) + value_of(best.second));
    }
    keys[row * kLanes] = key;
  }
  // The key of the last group is found as for many groups above, whatever their number.
  const auto ordinal = [&](int j) {
    return static_cast<std::uint32_t>(keys[j * kLanes]) ^ 0x80000000u;
  };
  std::uint32_t last = 0;
#pragma unroll 1
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    int count = 0;
#pragma unroll 1
    for (int j = 0; j < rows; ++j) count += ordinal(j) >= (last | bit) ? 1 : 0;
    if (__reduce_add_sync(kAllLanes, count) >= top_k_groups) last |= bit;
  }
  int num_better = 0;
#pragma unroll 1
  for (int j = 0; j < rows; ++j) num_better += ordinal(j) > last ? 1 : 0;
  int num_equal = top_k_groups - __reduce_add_sync(kAllLanes, num_better);
  std::uint32_t competing = 0;  // bit j: group lane + 32 j competes
#pragma unroll 1
  for (int j = 0; j < rows; ++j) {
    const bool equals = ordinal(j) == last && last != 0;
    const std::uint32_t equals_mask = __ballot_sync(kAllLanes, equals);
    const int rank = __popc(equals_mask & lanes_below(lane));
    if (ordinal(j) > last || (equals && rank < num_equal)) competing |= 1u << j;
    num_equal -= __popc(equals_mask);
  }
  std::uint32_t allowed = 0;
#pragma unroll 1
  for (int j = 0; j < values.count; ++j) {
    const int group = group_of(routing, lane + j * kLanes);
    const std::uint32_t bits = __shfl_sync(kAllLanes, competing, group % kLanes);
    allowed |= (bits >> (group / kLanes) & 1u) << j;
  }
  return allowed;
}

// ---- Choice ----

template <int kSize>
struct SortingNetwork {
  // Batcher's odd-even merge sort: Knuth, The Art of Computer Programming 5.2.2, algorithm M.
  template <typename Visit>
  SWITCHYARD_HOST_DEVICE static constexpr void for_each_comparator(Visit visit) {
    for (int p = 1; p < kSize; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int j = k % p; j + k < kSize; j += 2 * k) {
          for (int i = j; i < j + k && i + k < kSize; ++i) {
            if (i / (2 * p) == (i + k) / (2 * p)) visit(i, i + k);
          }
        }
      }
    }
  }
  SWITCHYARD_HOST_DEVICE static constexpr int count() {
    int count = 0;
    for_each_comparator([&](int, int) { ++count; });
    return count;
  }
  SWITCHYARD_HOST_DEVICE static constexpr int index_of(int comparator, bool second) {
    int index = 0;
    for_each_comparator([&](int a, int b) {
      if (comparator-- == 0) index = second ? b : a;
    });
    return index;
  }
};

template <int kFirst, int kSecond, int kSize>
__device__ __forceinline__ void compare_exchange(OrderKey (&keys)[kSize]) {
  const OrderKey better = max(keys[kFirst], keys[kSecond]);
  keys[kSecond] = min(keys[kFirst], keys[kSecond]);
  keys[kFirst] = better;
}

template <int kSize, int... kComparators>
__device__ __forceinline__ void sort_descending(OrderKey (&keys)[kSize],
                                                std::integer_sequence<int, kComparators...>) {
  using Network = SortingNetwork<kSize>;
  (compare_exchange<Network::index_of(kComparators, false), Network::index_of(kComparators, true)>(
       keys),
   ...);
}

// The expert and value of slot `lane`; kNoExpert if no candidate was left.
struct Chosen {
  std::int32_t id;
  float value;
};

// The keys of the best candidates. Lane k has slot k's, and the lane that held it.
struct BestKeys {
  OrderKey key = kNeverChosen;
  int owner = 0;
  bool ties = false;  // of this lane: it held a key that another slot or lane has, too
};

template <int kPerLane, typename Candidate>
__device__ __forceinline__ BestKeys best_keys(int lane, float (&values)[kPerLane], int top_k,
                                              Candidate candidate) {
  OrderKey keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) keys[j] = order_key(candidate(values[j], j));
  sort_descending(keys, std::make_integer_sequence<int, SortingNetwork<kPerLane>::count()>{});

  // The chosen keys are right whichever of several equal ones is taken first. The experts they
  // belong to are found afterwards, outside this chain of dependent steps.
  BestKeys mine;
#pragma unroll 1
  for (int slot = 0; slot < top_k; ++slot) {
    const OrderKey best = __reduce_max_sync(kAllLanes, keys[0]);
    const bool holds = keys[0] == best && best != kNeverChosen;
    const std::uint32_t holders = __ballot_sync(kAllLanes, holds);
    const bool pops = holds && (holders & lanes_below(lane)) == 0;
    mine.ties |= holds && !pops;
    if constexpr (kPerLane > 1) mine.ties |= pops && keys[1] == best;
    if (lane == slot) {
      mine.key = best;
      mine.owner = __ffs(static_cast<int>(holders)) - 1;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const OrderKey next = j + 1 < kPerLane ? keys[j + 1] : kNeverChosen;
      keys[j] = pops ? next : keys[j];
    }
  }
  return mine;
}

// A lane whose best key is taken looks for the next among all of its own.
template <typename Candidate>
__device__ __forceinline__ BestKeys best_keys(int lane, MemoryRows& values, int top_k,
                                              Candidate candidate) {
  OrderKey* const keys = values.keys + lane;
  OrderKey head = kNeverChosen;
  for_each_row(values, [&](float value, int j) {
    const OrderKey key = order_key(candidate(value, j));
    keys[j * kLanes] = key;
    head = max(head, key);
  });
  BestKeys mine;
#pragma unroll 1
  for (int slot = 0; slot < top_k; ++slot) {
    const OrderKey best = __reduce_max_sync(kAllLanes, head);
    const bool holds = head == best && best != kNeverChosen;
    const std::uint32_t holders = __ballot_sync(kAllLanes, holds);
    const bool pops = holds && (holders & lanes_below(lane)) == 0;
    if (lane == slot) {
      mine.key = best;
      mine.owner = __ffs(static_cast<int>(holders)) - 1;
    }
    if (pops) {
      head = kNeverChosen;
      bool taken = false;
#pragma unroll 1
      for (int j = 0; j < values.count; ++j) {
        const OrderKey key = keys[j * kLanes];
        if (key == best && !taken) {
          taken = true;
          keys[j * kLanes] = kNeverChosen;
        } else {
          head = max(head, key);
        }
      }
    }
    mine.ties |= holds && (!pops || head == best);
  }
  return mine;
}

// Takes the best top_k candidates, best first. candidate() is as in best_of_group().
template <typename Rows, typename Candidate>
__device__ __forceinline__ Chosen take_best(int lane, Rows& values, int top_k,
                                            Candidate candidate) {
  const BestKeys mine = best_keys(lane, values, top_k, candidate);
  const OrderKey my_key = mine.key;
  const int my_owner = mine.owner;
  const float my_candidate = my_key == kNeverChosen ? nan() : value_of(my_key);
  Chosen chosen{kNoExpert, 0.0f};
  if (!__any_sync(kAllLanes, mine.ties)) {
    // In this case each chosen key belongs to one expert only.
    for_each_row(values, [&](float value, int j) {
      const float other_candidate = __shfl_sync(kAllLanes, candidate(value, j), my_owner);
      const float other_value = __shfl_sync(kAllLanes, value, my_owner);
      if (other_candidate == my_candidate) chosen = {my_owner + j * kLanes, other_value};
    });
    return chosen;
  }
  // Slots with equal keys are neighbours: each takes the first expert with that key after the
  // previous slot's.
  float last_candidate = nan();
  int last_id = kNoExpert;
#pragma unroll 1
  for (int slot = 0; slot < top_k; ++slot) {
    const float slot_candidate = __shfl_sync(kAllLanes, my_candidate, slot);
    if (is_nan(slot_candidate)) break;
    const int from = slot_candidate == last_candidate ? last_id + 1 : 0;
    int first = INT32_MAX;
    for_each_row(values, [&](float value, int j) {
      const int expert = lane + j * kLanes;
      if (candidate(value, j) == slot_candidate && expert >= from) first = min(first, expert);
    });
    last_candidate = slot_candidate;
    last_id = __reduce_min_sync(kAllLanes, first);
    if (lane == slot) chosen.id = last_id;
  }
  chosen.value = value_of_expert(values, chosen.id);
  return chosen;
}

// ---- Weights ----

// Dividing a softmax over all experts by the sum over the chosen leaves the softmax over the
// chosen, so the others' terms are needed only if something is added to that sum.
__device__ __forceinline__ bool softmax_is_over_chosen(const RoutingSpec& spec) {
  return spec.top_k_before_score || (spec.renormalize && spec.renormalize_epsilon == 0.0f);
}

// Computes the weight of a chosen expert from its logit, chosen.value.
//   softmax  over all experts; read only if softmax_is_over_chosen() is false
__device__ __forceinline__ float weigh_by_logit(const DeviceRouting& routing, Softmax softmax,
                                                const Chosen& chosen) {
  const bool present = chosen.id != kNoExpert;
  switch (routing.spec.score) {
    case ScoreFunction::kSoftmax: {
      const bool over_chosen = softmax_is_over_chosen(routing.spec);
      if (over_chosen) softmax.max = max_over_lanes(present ? chosen.value : nan());
      const float term = present ? softmax_term(chosen.value, softmax.max) : 0.0f;
      if (over_chosen) softmax.sum = sum_in_lane_order(0.0f, term, routing.top_k);
      return softmax.sum > 0.0f ? term / softmax.sum : 0.0f;
    }
    case ScoreFunction::kSigmoid: return present ? sigmoid(chosen.value) : 0.0f;
    case ScoreFunction::kSqrtSoftplus: return present ? sqrt_softplus(chosen.value) : 0.0f;
  }
  return 0.0f;
}

// See route.cpp's sparse_mixer(). Overwrites the logits of chosen experts.
template <typename Rows>
__device__ __forceinline__ float weigh_by_sparse_mixer(const DeviceRouting& routing, int lane,
                                                       Rows& logits, const Chosen& chosen) {
  const float threshold = 2.0f * routing.spec.jitter_eps;
  float weight = 0.0f;
#pragma unroll 1
  for (int round = 0; round < routing.top_k; ++round) {
    const std::int32_t id = __shfl_sync(kAllLanes, chosen.id, round);
    const float best = __shfl_sync(kAllLanes, chosen.value, round);
    if (id == kNoExpert) break;
    const float sum = sum_over_experts(lane, logits, [&](float logit) {
      const float term = softmax_term(logit, best);
      return sparse_mixer_drops(logit, best, threshold) ? 0.0f : term;
    });
    if (lane == round) weight = 1.0f / sum;
    erase(lane, logits, id);
  }
  return weight;
}

__device__ __forceinline__ float renormalize_and_scale(const DeviceRouting& routing, float weight) {
  if (routing.spec.renormalize) {
    const float sum = sum_in_lane_order(routing.spec.renormalize_epsilon, weight, routing.top_k);
    if (sum == INFINITY) {
      // An infinite score outweighs every finite one and shares with its equals.
      const int num_infinite = __popc(__ballot_sync(kAllLanes, weight == sum));
      weight = weight == sum ? 1.0f / static_cast<float>(num_infinite) : 0.0f;
    } else if (sum != 0.0f) {
      weight /= sum;
    }
  }
  return weight * routing.spec.scale;
}

}  // namespace warp

// Reads this lane's logits of a token: logits[j] is row[lane + 32 j], NaN from num_experts on.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const float* row, int num_experts,
                                            float (&logits)[kPerLane]) {
  const int lane = warp::lane_idx();
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int expert = lane + j * warp::kLanes;
    logits[j] = expert < num_experts ? row[expert] : warp::nan();
  }
}

// Loads them into memory. rows.count: the number of rows that the experts take.
__device__ __forceinline__ void load_logits(const float* row, int num_experts,
                                            warp::MemoryRows& rows) {
  const int lane = warp::lane_idx();
#pragma unroll 1
  for (int j = 0; j < rows.count; ++j) {
    const int expert = lane + j * warp::kLanes;
    rows.values[expert] = expert < num_experts ? row[expert] : warp::nan();
  }
}

// Routes one token. All 32 lanes of a warp must call it together, with the same arguments but for
// logits and mine. Control flow depends on `routing` and on values that all lanes share. If the
// compiler can see that the caller's control flow does, too (a warp index by way of __shfl_sync(),
// say), it omits the code for diverged lanes, a third of the whole.
//   logits           float[kPerLane], 32 kPerLane >= E: lane l's are those of experts l, l + 32,
//                    ..., and NaN where there is no such expert, as load_logits() gives;
//                    or warp::MemoryRows of at most 32 rows; overwritten
//   correction_bias  [E], global memory; read only if the spec has one
//   hashed_ids       [K]; read only with RoutingMethod::kHash
//   mine             out: slot `lane`
//   parts            kAllRouteParts, or fewer to bring only their code into the cache
template <typename Rows>
__device__ __forceinline__ RouteStatus route_warp(const DeviceRouting& routing, Rows& logits,
                                                  const float* correction_bias,
                                                  const std::int32_t* hashed_ids, Choice& mine,
                                                  std::uint32_t parts = kAllRouteParts) {
  using namespace warp;
  const int lane = lane_idx();
  const RoutingSpec& spec = routing.spec;

  const bool top_k_method = spec.method == RoutingMethod::kTopK;
  const bool by_score = top_k_method && routing.chooses_by_score;
  RouteStatus status{};
  Softmax softmax{};
  if ((parts & kScorePart) != 0) {
    status.num_nan = __reduce_add_sync(kAllLanes, count_nan(logits));
    status.num_nan -= num_rows(logits) * kLanes - routing.num_experts;
    if (spec.score == ScoreFunction::kSoftmax && spec.method != RoutingMethod::kSparseMixer &&
        (by_score || !softmax_is_over_chosen(spec))) {
      softmax = softmax_over_experts(lane, logits);
    }
    if (by_score) score_all(spec.score, softmax, logits);
  }

  Chosen chosen{};
  if ((parts & kChoicePart) == 0) {
    // A rehearsal that leaves out the choice goes on with expert 0 in every slot.
  } else if (spec.method == RoutingMethod::kHash) {
    chosen.id = lane < routing.top_k ? hashed_ids[lane] : kNoExpert;
    const bool exists = 0 <= chosen.id && chosen.id < routing.num_experts;
    status.bad_hashed_id_mask = __ballot_sync(kAllLanes, lane < routing.top_k && !exists);
    if (!exists) chosen.id = kNoExpert;
    chosen.value = value_of_expert(logits, chosen.id);
    if (is_nan(chosen.value)) chosen.id = kNoExpert;
  } else {
    // The bias is read again where it is needed: that takes fewer registers than keeping it.
    const int num_biased = top_k_method && spec.has_correction_bias ? routing.num_experts : 0;
    std::uint32_t allowed = kAllLanes;
    const auto candidate = [&](float value, int j) {
      const int expert = lane + j * kLanes;
      const float bias = expert < num_biased ? __ldg(correction_bias + expert) : 0.0f;
      return allowed >> j & 1u ? rounded_sum(value, bias) : nan();
    };
    if (top_k_method && spec.num_groups > 1) {
      allowed = experts_of_best_groups(routing, lane, logits, candidate);
    }
    chosen = take_best(lane, logits, routing.top_k, candidate);
  }

  if ((parts & kWeightPart) == 0) return status;
  float weight;
  if (spec.method == RoutingMethod::kSparseMixer) {
    weight = weigh_by_sparse_mixer(routing, lane, logits, chosen);
  } else if (by_score) {
    weight = chosen.id == kNoExpert ? 0.0f : chosen.value;
  } else {
    weight = weigh_by_logit(routing, softmax, chosen);
  }
  mine = {chosen.id, renormalize_and_scale(routing, weight)};
  return status;
}

#endif

}  // namespace switchyard::routing
