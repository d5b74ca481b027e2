// The loading warps: weights, tokens, gather and pack. They fill the ring.
#pragma once

#include "gpu/quantize.cuh"
#include "gpu/ranks.cuh"
#include "gpu/scheduler.cuh"

namespace switchyard::gpu {

// --- Weights: one thread. Streams the tasks' weight rows; they wait for nothing but a free stage.

// Whether the blocks of the pair have a tile each, and the same weights.
template <typename P>
__device__ __forceinline__ bool with_two_tiles(const TaskDescriptor& task) {
  return P::kHalves == 2 && task.two_tiles != 0;
}

// Both blocks of a pair, for what is loaded into the same place of either's ring.
inline constexpr std::uint16_t kBothOfPair = (1 << kPair) - 1;

// A box of kTileRows rows, into this block's ring or, `paired`, into that of both blocks of the
// pair. Which coordinate counts groups of rows depends on the map.
__device__ __forceinline__ void load_box(const CUtensorMap& map, std::uint32_t to,
                                         std::uint32_t barrier, int k, int second, int third,
                                         int expert, std::uint64_t policy, bool paired) {
  if (paired) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
            to),
        "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(second), "r"(third), "r"(expert),
        "h"(kBothOfPair), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(second), "r"(third), "r"(expert), "l"(policy)
        : "memory");
  }
}
// Contiguous bytes, in multiples of 16.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The scales of the weights of the task's first stage; kWeightScales for each stage.
template <typename P>
__device__ __forceinline__ const float* weight_scales(const Pass<P>& pass,
                                                      const TaskDescriptor& task) {
  constexpr std::uint32_t kStageColumns = kStageRowBytes / P::kElementBytes;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const bool first = task.work == Work::kGemm1;
  // Of two boxes: a block's in large passes, in small ones that of two blocks.
  const std::uint32_t pairs =
      protocol::ceil_div(first ? ffn.gemm1_rows : ffn.gemm2_rows, 2u * kTileRows);
  const std::uint32_t pair = P::kHalves == 1 ? task.block / 2 : task.block;
  const auto depth = static_cast<std::uint32_t>(first ? pass.layer.hidden : ffn.intermediate);
  // A block past the last row has no scales, and multiplies zeros.
  const std::size_t at = std::size_t{task.expert} * pairs + min(pair, pairs - 1);
  return (first ? ffn.gemm1_scales : ffn.gemm2_scales) +
         (at * protocol::ceil_div(depth, kStageColumns) + task.first_k_block) * kWeightScales;
}

template <bool kGated, typename P>
__device__ __forceinline__ void weights_role(const Pass<P>& pass) {
  // To load before the next task must be known, lest the ring run dry. A ticket taken early is a
  // task that nobody else can do, which matters where there are no more tasks than blocks.
  constexpr std::uint32_t stages_ahead = P::kAlone ? 4 : 12 / P::kHalves;
  // As createpolicy.fractional makes them: weights read once need not stay in the L2 cache.
  constexpr std::uint64_t kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;
  constexpr int kStageColumns = kStageRowBytes / P::kElementBytes;
  constexpr std::uint32_t kWeightScaleBytes = kWeightScales * sizeof(float);
  constexpr int boxes = P::kHalves;
  TaskReader reader(pass);
  RingPlace place;
  // The first time around is a rehearsal, while the first task is being found.
  for (std::uint32_t rehearsal = untold<1>();; rehearsal = 0) {
    TaskDescriptor task{};
    task.k_blocks = 1;
    if (rehearsal == 0) {
      if (!reader.template next_gemm<TraceRole::kWeights, false>(task)) return;
    }
    const Ring<P> ring = pass.ring();
    const bool first = task.work == Work::kGemm1;
    const FfnParams& ffn = pass.ffn(task.shared != 0);
    const bool halves = first && kGated && boxes != 1;
    const WeightMaps& maps = first ? ffn.gemm1_maps : ffn.gemm2_maps;
    const CUtensorMap& map = P::kAlone && first                ? ffn.small_gemm1_map
                             : P::kAlone || task.one_tile != 0 ? maps.once
                                                               : maps.again;
    // Of a gated first GEMM, half of a box's rows are gate's and half up's.
    const int groups = kTileRows / kRowGroup / (first && kGated ? 2 : 1);
    const std::uint64_t policy = task.one_tile != 0 ? kEvictFirst : kEvictLast;
    const std::uint32_t last_but_few =
        task.k_blocks > stages_ahead ? task.k_blocks - stages_ahead : 0;
    const float* scales = nullptr;
    constexpr bool kWithScales = P::kScaled && !kJoinedScales<P>;
    if constexpr (kWithScales) scales = weight_scales(pass, task);
    for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
      if (!ring.await_free(pass.waiter(), place)) return;
      if (rehearsal != 0) break;
      if (kb == 0) trace_stamp(pass, TraceRole::kWeights, reader.index(), &TraceRecord::begin);
      if (kb == last_but_few) demand(pass);
      const std::uint32_t full = ring.full_barrier(place.stage);
      arrive_expect_bytes(full, boxes * kBoxBytes + (kWithScales ? kWeightScaleBytes : 0));
      const int k = static_cast<int>(task.first_k_block + kb) * kStageColumns;
#pragma unroll
      for (int i = 0; i < boxes; ++i) {
        // What both blocks of a pair multiply with, each loads half of.
        const bool both = with_two_tiles<P>(task);
        if (both && i != static_cast<int>(rank_in_pair())) continue;
        const int group = (static_cast<int>(task.block) * boxes + i) * groups;
        load_box(map, ring.weights(place.stage) + i * kBoxBytes, full, k, halves ? group : 0,
                 halves ? 0 : group, static_cast<int>(task.expert), policy, both);
      }
      if constexpr (kWithScales) {
        load_bytes(ring.weight_scales(place.stage), scales, kWeightScaleBytes, full);
        scales += kWeightScales;
      }
      place.advance(ring.stages);
    }
    if (rehearsal == 0) trace_stamp(pass, TraceRole::kWeights, reader.index(), &TraceRecord::end);
  }
}

// --- Tokens: a warp, of which one thread loads the packed rows of the tile.

// Into this block's ring or, `paired`, into that of both blocks of the pair.
__device__ __forceinline__ void load_tokens(const CUtensorMap& map, std::uint32_t to,
                                            std::uint32_t barrier, int k, int row, bool paired) {
  if (paired) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(row), "h"(kBothOfPair)
        : "memory");
  } else {
    load_rows(map, to, barrier, k, row);
  }
}

// A task's tokens, packed or of h, or this block's share of them: each block of a pair loads half,
// for both.
template <typename P>
class TileRows {
 public:
  __device__ TileRows(const Pass<P>& pass, const TaskDescriptor& task)
      : first_(task.work == Work::kGemm1),
        slot_(task.tile % (first_ ? pass.layer.packed_slots : pass.layer.h_slots)),
        maps_(first_ ? pass.layer.x_maps : pass.ffn(task.shared != 0).h_maps),
        paired_(!P::kAlone && pass.call.paired != 0 && !with_two_tiles<P>(task)) {
    const std::uint32_t share = paired_ ? rank_in_pair() : 0, shares = paired_ ? kPair : 1;
    begin_ = task.units * share / shares;
    units_ = task.units * (share + 1) / shares - begin_;
  }
  // A stage of columns from k on, of which `to` and `full` are the tokens and the barrier.
  __device__ void load(std::uint32_t to, std::uint32_t full, std::uint32_t k) const {
    constexpr std::uint32_t kUnitsOfMany = TokenMaps::kManyRows / kUnitRows;
    static_assert(TokenMaps::kFewRows == kUnitRows);
    auto row = static_cast<int>(slot_ * kSlotRows<P> + begin_ * kUnitRows);
    to += begin_ * kUnitBytes;
#pragma unroll 1
    for (std::uint32_t i = 0; i < units_ / kUnitsOfMany; ++i) {
      load_tokens(maps_.many, to, full, static_cast<int>(k), row, paired_);
      to += kUnitsOfMany * kUnitBytes;
      row += TokenMaps::kManyRows;
    }
#pragma unroll 1
    for (std::uint32_t i = 0; i < units_ % kUnitsOfMany; ++i) {
      load_tokens(maps_.few, to, full, static_cast<int>(k), row, paired_);
      to += kUnitBytes;
      row += TokenMaps::kFewRows;
    }
  }
  // The first group's scales of the slot's tokens, kSlotRows for each group of columns.
  __device__ const float* scales(const LayerParams& layer) const {
    return (first_ ? layer.packed_scales : layer.h_scales) +
           std::size_t{slot_} * (first_ ? layer.x_groups : layer.h_groups) * kSlotRows<P>;
  }
  static constexpr std::uint32_t kUnitBytes = kUnitRows * kStageRowBytes;

 private:
  bool first_;
  std::uint32_t slot_;
  const TokenMaps& maps_;
  bool paired_;
  std::uint32_t begin_, units_;
};

// All stages of a task's tokens, by one thread or, in small passes, by the gather threads, of which
// each arrives and one of the first warp loads. False if the pass was given up.
template <typename P>
__device__ __forceinline__ bool load_tile(const Pass<P>& pass, const TaskDescriptor& task,
                                          RingPlace& place, std::uint32_t thread) {
  const Ring<P> ring = pass.ring();
  const TileRows<P> rows(pass, task);
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!ring.template await_free<P::kAlone>(pass.waiter(), place)) return false;
    const std::uint32_t full = ring.full_barrier(place.stage);
    if (!P::kAlone || (thread < 32 && elect())) {
      const std::uint32_t block = task.first_k_block + kb;
      const std::uint32_t scale_bytes =
          P::kScaled ? task.units * kUnitRows * static_cast<std::uint32_t>(sizeof(float)) : 0;
      arrive_expect_bytes(full, task.units * TileRows<P>::kUnitBytes + scale_bytes);
      rows.load(ring.tokens(place.stage), full, block * (kStageRowBytes / P::kElementBytes));
      if constexpr (P::kScaled) {
        load_bytes(ring.token_scales(place.stage), rows.scales(pass.layer) + block * kSlotRows<P>,
                   scale_bytes, full);
      }
    } else {
      arrive(full);
    }
    place.advance(ring.stages);
  }
  return true;
}

// The same by a whole warp, with the tokens' scales multiplied by the weights'. A lane has those of
// four neighbouring tokens.
template <typename P>
__device__ __forceinline__ bool load_scaled_tile(const Pass<P>& pass, const TaskDescriptor& task,
                                                 RingPlace& place, bool rehearsal) {
  constexpr std::uint32_t kStageColumns = kStageRowBytes / P::kElementBytes;
  static_assert(kMaxHeight<P> == 4 * 32 && kStageColumns == kQuantGroup);
  const Ring<P> ring = pass.ring();
  const TileRows<P> rows(pass, task);
  const std::uint32_t lane = threadIdx.x % 32;
  const float* of_tokens = rows.scales(pass.layer) + task.first_k_block * kMaxHeight<P> + 4 * lane;
  const float* of_weights = weight_scales(pass, task);
  // Of two stages under way: the trip of one takes as long as a stage is multiplied. Tokens' past
  // the L1 cache, which may remember another tile of the slot.
  struct Scales {
    float4 tokens;
    float weights[kScaleSets];
  } scales[2];
  const auto fetch = [&](Scales& next) {
    next.tokens = __ldcg(reinterpret_cast<const float4*>(of_tokens));
#pragma unroll
    for (std::uint32_t set = 0; set < kScaleSets; ++set) {
      next.weights[set] = __ldg(of_weights + set * (kWeightScales - 1));
    }
    of_tokens += kMaxHeight<P>;
    of_weights += kWeightScales;
  };
  std::uint32_t block = task.first_k_block;
  const std::uint32_t end = block + task.k_blocks;
  fetch(scales[0]);
  if (block + 1 < end) fetch(scales[1]);
  for (;;) {
#pragma unroll
    for (Scales& of : scales) {
      if (block == end) return true;
      if (!ring.template await_free<true>(pass.waiter(), place)) return false;
      const std::uint32_t full = ring.full_barrier(place.stage);
      if (elect()) {
        rows.load(ring.tokens(place.stage), full, block * kStageColumns);
      }
#pragma unroll
      for (std::uint32_t set = 0; set < kScaleSets; ++set) {
        const float weight = of.weights[set];
        store_shared_vector(
            ring.joined_scales(place.stage, set) + 16 * lane,
            {__float_as_uint(of.tokens.x * weight), __float_as_uint(of.tokens.y * weight),
             __float_as_uint(of.tokens.z * weight), __float_as_uint(of.tokens.w * weight)});
      }
      __syncwarp();
      if (rehearsal) return true;
      if (lane == 0) arrive_expect_bytes(full, task.units * TileRows<P>::kUnitBytes);
      place.advance(ring.stages);
      if (++block + 1 < end) fetch(of);
    }
  }
}

template <typename P>
__device__ __forceinline__ void tokens_role(const Pass<P>& pass) {
  if (!kJoinedScales<P> && !elect()) return;
  TaskReader reader(pass);
  RingPlace place;
  const auto stamp = [&](TraceStamp which) {
    if (!kJoinedScales<P> || threadIdx.x % 32 == 0) {
      trace_stamp(pass, TraceRole::kTokens, reader.index(), which);
    }
  };
  // The first time around is a rehearsal, on a tile without rows: of the first expert, if this rank
  // has one.
  for (std::uint32_t rehearsal = pass.local_experts() != 0 ? untold<1>() : 0;; rehearsal = 0) {
    TaskDescriptor task{};
    task.k_blocks = 1;
    if (rehearsal == 0) {
      if (!reader.template next_gemm<TraceRole::kTokens, kJoinedScales<P>>(task)) return;
      const bool first = task.work == Work::kGemm1;
      const bool there = pass.waiter().wait(
          first ? protocol::Phase::kDispatch : protocol::Phase::kExperts, task.tile, [&] {
            return first
                       ? load_acquire_gpu(pass.packed(task.tile)) >= RowPart::kUnits * task.rows &&
                             pass.h_slot_free(task.tile)
                       : pass.gemm1_complete(task.tile);
          });
      // In a pair, rows that are not there would come into the other block's ring, too.
      if (kJoinedScales<P> ? !__all_sync(~0u, there) : !there) return;
      if (!kJoinedScales<P> || elect()) demand(pass);
      fence_async_proxy();
      stamp(&TraceRecord::begin);
    }
    if constexpr (kJoinedScales<P>) {
      if (!load_scaled_tile(pass, task, place, rehearsal != 0)) return;
    } else if (rehearsal == 0) {
      if (!load_tile(pass, task, place, 0)) return;
    }
    if (rehearsal == 0) stamp(&TraceRecord::end);
  }
}

// --- Gather: two warps, in small passes. They take the rows of the first GEMM from where they are,
// 16 bytes per thread at a time. (A TMA of packed rows is three times as fast: the compiler puts
// three empty shared-memory loads before each cp.async.)

__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies if `valid`, else writes zeros.
__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_word_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Eight threads of the gather warps take the 128 bytes of a row's stage. A thread keeps its place
// in the swizzle from one round of rows to the next.
inline constexpr std::uint32_t kRowsAtOnce = kGatherThreads / 8;
template <typename P>  // of an expert's rows
inline constexpr std::uint32_t kMostRounds = P::kSmallTokens / kRowsAtOnce;
inline constexpr std::uint32_t kRoundBytes = kRowsAtOnce * kStageRowBytes;
static_assert(kRowsAtOnce % 8 == 0);
__device__ __forceinline__ std::uint32_t swizzled_place(std::uint32_t row, std::uint32_t chunk) {
  return row * kStageRowBytes + ((chunk ^ (row & 7)) << 4);
}

// All stages of a tile of h, from bf16: a row to eight threads. False if the pass was given up.
template <typename P>
__device__ __forceinline__ bool quantize_tile(const Pass<P>& pass, const TaskDescriptor& task,
                                              RingPlace& place, std::uint32_t thread) {
  static_assert(kLateRows == kRowsAtOnce && kGroupLanes == 8);
  const LayerParams& layer = pass.layer;
  const Ring<P> ring = pass.ring();
  const std::uint32_t row = thread / kGroupLanes, chunk = thread % kGroupLanes;
  const auto depth = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  const std::uint32_t column0 = task.first_k_block * kQuantGroup + chunk * kLaneColumns;
  const std::uint16_t* const from = rows_of_h(pass, task.tile) + row * layer.h_stride + column0;
  uint4 values[kLateStages][2];
#pragma unroll
  for (std::uint32_t i = 0; i < kLateStages; ++i) {
    values[i][0] = values[i][1] = uint4{0, 0, 0, 0};
    if (i < task.k_blocks && row < task.rows && column0 + i * kQuantGroup < depth) {
      // Past the L1 cache, which may remember another tile of the slot.
      const auto* const vectors = reinterpret_cast<const uint4*>(from + i * kQuantGroup);
      values[i][0] = __ldcg(vectors);
      values[i][1] = __ldcg(vectors + 1);
    }
  }
  // The array is turned instead of the index: eight copies of this code would each be fetched anew,
  // which takes longer than to execute one.
#pragma unroll 1
  for (std::uint32_t i = 0; i < task.k_blocks; ++i) {
    if (!ring.template await_free<true>(pass.waiter(), place)) return false;
    float scale = 0;
    const uint4 codes = quantize_together(values[0][0], values[0][1], scale);
#pragma unroll
    for (std::uint32_t j = 1; j < kLateStages; ++j) {
      values[j - 1][0] = values[j][0];
      values[j - 1][1] = values[j][1];
    }
    store_shared_vector(ring.tokens(place.stage) + swizzled_place(row, chunk), codes);
    if (chunk == 0) store_shared_float(ring.token_scales(place.stage) + 4 * row, scale);
    arrive(ring.full_barrier(place.stage));
    place.advance(ring.stages);
  }
  return true;
}

template <typename P>
__device__ __forceinline__ void gather_role(const Pass<P>& pass) {
  const std::uint32_t thread = threadIdx.x - 32 * kTokensWarp;
  const std::uint32_t my_row = thread / 8, my_chunk = thread % 8;
  const std::uint32_t my_place = swizzled_place(my_row, my_chunk);
  TaskReader reader(pass);
  RingPlace place;
  const auto stamp = [&](std::uint32_t index, TraceStamp which) {
    if (thread == 0) trace_stamp(pass, TraceRole::kTokens, index, which);
  };
  // The first time around is a rehearsal, on a tile without rows, while the first task is
  // described. Code that is fetched when weights have begun to stream comes behind them,
  // microseconds later.
  for (std::uint32_t rehearsal = untold<1>();; rehearsal = 0) {
    TaskDescriptor task{};
    task.k_blocks = 1;
    if (rehearsal == 0) {
      if (P::kTraced && reader.index() != ~0u) stamp(reader.index(), &TraceRecord::end);
      stamp(reader.index() + 1, &TraceRecord::ready);
      task = reader.template next<true>();
      if (task.work == Work::kStop) return;
      if (task.work == Work::kCombine) continue;
      if (thread == 0) trace_task(pass, TraceRole::kTokens, reader.index(), task);
    }
    // Given up or not, the block goes on: its other roles wait for these stages.
    pass.waiter().wait(protocol::Phase::kExperts, task.tile, [&] {
      return task.work == Work::kGemm1 ? pass.h_slot_free(task.tile)
                                       : pass.gemm1_complete(task.tile);
    });
    if (thread == 0 && rehearsal == 0) {
      demand(pass);
      stamp(reader.index(), &TraceRecord::begin);
    }
    if (task.work == Work::kGemm2) {
      if constexpr (P::kScaled) {
        if (pass.quantizes_late()) {
          if (!quantize_tile(pass, task, place, thread)) return;
          continue;
        }
      }
      fence_async_proxy();
      if (!load_tile(pass, task, place, thread)) return;
      continue;
    }
    const Ring<P> ring = pass.ring();
    const std::byte* from = pass.state().rows;
    const auto stride = static_cast<std::uint32_t>(pass.state().row_bytes / 16);
    const auto offset_of = [&](std::uint32_t row) {  // of this thread's chunk, in 16 bytes
      const std::uint32_t source =
          task.list == nullptr ? task.first_row + row : RowEntry::token(task.list[row]);
      return source * stride + my_chunk;
    };
    // All but the last few rows in whole rounds, which need no test of each.
    const std::uint32_t rounds = task.rows / kRowsAtOnce;
    const bool one_more = rounds * kRowsAtOnce + my_row < task.rows;
    const std::uint32_t last_offset = one_more ? offset_of(rounds * kRowsAtOnce + my_row) : 0;
    std::uint32_t offsets[kMostRounds<P>];
#pragma unroll
    for (std::uint32_t i = 0; i < kMostRounds<P>; ++i) {
      offsets[i] = i < rounds ? offset_of(i * kRowsAtOnce + my_row) : 0;
    }
    // Thread i has the scale of row i.
    const float* scale = nullptr;
    if constexpr (P::kScaled) {
      static_assert(P::kSmallTokens <= kGatherThreads);
      if (thread < task.rows) {
        const std::uint32_t source =
            task.list == nullptr ? task.first_row + thread : RowEntry::token(task.list[thread]);
        scale = pass.state().row_scales + source * pass.state().row_scale_stride;
      }
    }
    const auto copy_rows = [&](auto copy) {
      const std::uint32_t to = ring.tokens(place.stage) + my_place;
#pragma unroll
      for (std::uint32_t i = 0; i < kMostRounds<P>; ++i) {
        if (i >= rounds) break;
        copy(to + i * kRoundBytes, from + std::size_t{offsets[i]} * 16);
      }
      if (one_more) copy(to + rounds * kRoundBytes, from + std::size_t{last_offset} * 16);
      if (P::kScaled && scale != nullptr) {
        copy_word_async(ring.token_scales(place.stage) + 4 * thread, scale++);
      }
      // (Nobody waits for tickets in a small pass: see kTicketArrivalsAlone.)
      arrive_after_copies(rehearsal == 0 ? ring.full_barrier(place.stage)
                                         : shared_address(&pass.block.ticket_full));
      place.advance(ring.stages);
      from += kStageRowBytes;
    };
    const auto depth = static_cast<std::uint32_t>(pass.layer.hidden * P::kElementBytes);
    const std::uint32_t whole_blocks = rehearsal == 0 ? depth / kStageRowBytes : 1;
    for (std::uint32_t kb = 0; kb < whole_blocks; ++kb) {
      if (!ring.template await_free<true>(pass.waiter(), place)) return;
      copy_rows([](std::uint32_t to, const std::byte* source) { copy_async(to, source); });
    }
    if (whole_blocks < task.k_blocks) {
      if (!ring.template await_free<true>(pass.waiter(), place)) return;
      const bool inside = whole_blocks * kStageRowBytes + 16 * my_chunk < depth;
      copy_rows(
          [inside](std::uint32_t to, const std::byte* source) { copy_async(to, source, inside); });
    }
    if (rehearsal != 0) place = {};
  }
}

// --- Pack: warps that copy token rows into the tiles' slots, in the order of tiles.

// Of a packed row, the scale of the first group; that of the next is kMaxHeight behind it.
template <typename P>
__device__ __forceinline__ float* scales_of_row(const Pass<P>& pass, std::uint32_t row) {
  return pass.layer.packed_scales +
         std::size_t{row / kMaxHeight<P>} * pass.layer.x_groups * kMaxHeight<P> +
         row % kMaxHeight<P>;
}

// Rows counted over the shared expert's and then all experts' rows: kRows from row0 on, those up to
// `begin` and from `end` on left out. Called by one warp.
template <std::uint32_t kRows, typename P>
__device__ __forceinline__ void pack_rows(const Pass<P>& pass, std::uint32_t row0,
                                          std::uint32_t begin, std::uint32_t end,
                                          const RowPart& part = {}) {
  const LayerParams& layer = pass.layer;
  const BlockStorage<P>& block = pass.block;
  const PassState<P>& state = pass.state();
  // Asked anew where it is needed, as is `mine`: there are few registers.
  const auto lane = [] { return fresh_thread_index<32>(); };
  const auto row_bytes = static_cast<std::uint32_t>(layer.hidden * P::kElementBytes);
  const auto of_warp = [&] {  // of the pack warp's groups
    return *static_cast<const volatile std::uint32_t*>(&block.pack_row) / (kRows * gridDim.x);
  };
  if (kRows > 1 && lane() == 0) trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::ready);
  // Lane i < kRows finds row i's place.
  const std::uint32_t row = row0 + lane();
  // Tile and row of it, in one word, for there are few registers; likewise the expert and the
  // distance of the source.
  constexpr std::uint32_t kNone = ~0u;
  std::uint32_t place = kNone, list = 0;
  const auto told_anew = [](std::uint32_t& word) {
    asm volatile("" : "+r"(word));
    return word;
  };
  const auto mine = [&] { return told_anew(place) != kNone; };
  const auto tile_of = [&] { return place / kMaxHeight<P>; };
  const auto expert = [&] { return RowEntry::token(told_anew(list)); };
  const auto distance = [&] { return RowEntry::k(told_anew(list)); };
  // In the source's list; of own rows, as soon as it is known, the token.
  std::uint32_t position = row;
  const auto entry = [&] { return __ldcg(entry_of(pass, expert(), {distance(), position})); };
  if (row < row0 + kRows && row >= begin && row < end) {
    protocol::TokenTiles cut = state.shared_tiles;
    std::uint32_t of_expert = row, first_tile = 0;
    if (row >= cut.rows) {
      const std::uint32_t* const row_begin = block.row_begin + pass.first_expert();
      const std::uint32_t e = find_expert(row_begin, pass.local_experts(), row);
      of_expert = row - row_begin[e];
      first_tile = block.tile_begin[pass.first_expert() + e];
      cut = protocol::TokenTiles(block.expert_rows[pass.first_expert() + e], P::kTileShape);
      const SourceRow source = find_source(pass, e, of_expert);
      list = RowEntry::pack(e, source.distance);
      position = source.position;
      if (source.distance == 0) position = RowEntry::token(entry());
    }
    place = pass.place_of(cut, first_tile, of_expert);
  }
  // The tile that had the slot before is no longer needed once its GEMM1 is complete. What others
  // send must have come.
  const auto is_there = [&] { return !mine() || has_arrived(pass, expert(), distance()); };
  pass.waiter().wait_for(
      [&] {
        return __all_sync(~0u,
                          is_there() && (!mine() || tile_of() < layer.packed_slots ||
                                         pass.gemm1_complete(tile_of() - layer.packed_slots))) != 0;
      },
      [&] {
        // The first row that has not come, if that is what is missing.
        const std::uint32_t absent = __ballot_sync(~0u, !is_there());
        const int which = absent == 0 ? 0 : __ffs(absent) - 1;
        const std::uint32_t from = __shfl_sync(~0u, distance(), which);
        return protocol::Missing{protocol::Phase::kDispatch, pass.rank_at(absent == 0 ? 0 : from),
                                 tile_of(), pass.flag(), 0};
      });
  __syncwarp();
  if constexpr (P::kTraced && kRows > 1) {
    const std::uint32_t rows = __ballot_sync(~0u, mine());
    if (rows != 0 && lane() == __ffs(static_cast<int>(rows)) - 1u) {
      const int first_expert = static_cast<int>(pass.first_expert());
      trace_subject(pass, TraceRole::kPack, of_warp(),
                    {TraceKind::kPack, static_cast<std::int32_t>(tile_of()), -1,
                     pass.is_shared(tile_of()) ? -1 : first_expert + static_cast<int>(expert()),
                     __popc(rows), distance() == 0 ? -1 : pass.rank_at(distance())});
      trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::begin);
    }
  }
  if (distance() != 0) position = RowEntry::token(RowEntry::sent(entry(), layer));
  const std::uint32_t column = lane();
  const std::uint32_t from = RowEntry::pack(position, distance());
  const std::uint32_t my_row = mine() ? pass.packed_row(place) : kNone;
#pragma unroll 1
  for (std::uint32_t i = 0; i < kRows; ++i) {
    const std::uint32_t to = __shfl_sync(~0u, my_row, i);
    if (to == kNone) continue;
    const std::uint32_t at = RowEntry::k(__shfl_sync(~0u, from, i));
    const std::uint32_t from_token = RowEntry::token(__shfl_sync(~0u, from, i));
    const std::byte* const sent = at == 0 ? nullptr : layer.heap.pool(layer.mine, at, from_token);
    const auto copy_values = [&] {
      copy_row<kCopyVectors<P>>(layer.packed + std::size_t{to} * row_bytes,
                                at == 0 ? state.rows + from_token * state.row_bytes : sent,
                                row_bytes, part);
    };
    if constexpr (P::kScaled) {
      // The first scales are under way together with the values, not after them. (For more of them
      // there are no registers.)
      const auto* const scales =
          at == 0 ? state.row_scales + from_token * state.row_scale_stride
                  : reinterpret_cast<const float*>(sent + layer.heap.scale_offset());
      const std::uint32_t groups = part.index == 0 ? layer.x_groups : 0;
      const float first = column < groups ? __ldcg(scales + column) : 0;
      copy_values();
      float* const to_scales = scales_of_row(pass, to);
      if (column < groups) to_scales[column * kMaxHeight<P>] = first;
      for (std::uint32_t group = column + 32; group < groups; group += 32) {
        to_scales[group * kMaxHeight<P>] = __ldcg(scales + group);
      }
    } else {
      copy_values();
    }
  }
  fence_async_proxy();
  __syncwarp();
  if (mine() && pass.goes_on()) add_release_gpu(pass.packed(tile_of()), part.units());
  if (kRows > 1 && lane() == 0) trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::end);
}

// The first row of a tile of this rank's, or the number of rows if there are fewer tiles.
template <typename P>
__device__ __forceinline__ std::uint32_t first_row_of(const Pass<P>& pass, std::uint32_t tile) {
  if (tile >= pass.num_tiles()) return pass.num_rows();
  if (pass.is_shared(tile)) return pass.state().shared_tiles.begin(tile);
  const std::uint32_t e =
      pass.first_expert() +
      find_expert(pass.block.tile_begin + pass.first_expert(), pass.local_experts(), tile);
  const protocol::TokenTiles cut(pass.block.expert_rows[e], P::kTileShape);
  return pass.block.row_begin[e] + cut.begin(tile - pass.block.tile_begin[e]);
}

// Of the rows that the math warps pack, which have nothing else to do at first: the tiles whose
// first tasks all blocks take up at once.
template <typename P>
__device__ __forceinline__ std::uint32_t first_tiles(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  std::uint32_t rows = layer.routed.gemm1_rows;
  if (pass.state().shared_tiles.count != 0) rows = min(rows, layer.shared.gemm1_rows);
  return max(1u << pass.state().log2_band,
             protocol::ceil_div(gridDim.x, pass.tasks(rows) << pass.call.paired) + 1);
}
// And, of one rank, a few for each warp.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows_at_least(const Pass<P>& pass) {
  constexpr std::uint32_t kBytesOfWarp = 8192;
  const auto row_bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kElementBytes);
  return pass.distributed() ? 0 : kBytesOfWarp / row_bytes * gridDim.x * kMathWarps;
}
// Of the tiles whose slots nobody had before: nobody may wait for one who is to make it free.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows(const Pass<P>& pass) {
  return min(max(first_row_of(pass, first_tiles(pass)), first_rows_at_least(pass)),
             first_row_of(pass, pass.layer.packed_slots));
}

// A slot of this block's tokens. Of an expert, or of none; -1 is the shared expert.
struct OwnSlot {
  static constexpr std::int32_t kShared = -1, kNone = -2;
  std::uint32_t token = 0, position = 0;  // in the expert's list
  std::int32_t expert = kNone;
};
template <typename P>
__device__ __forceinline__ OwnSlot own_slot(const Pass<P>& pass, std::uint32_t token,
                                            std::uint32_t k) {
  const LayerParams& layer = pass.layer;
  if (k == static_cast<std::uint32_t>(layer.top_k)) return {token, token, OwnSlot::kShared};
  const std::size_t at = std::size_t{token} * layer.top_k + k;
  const std::int32_t expert = layer.ids[at];
  return {token, layer.positions[at], expert < 0 ? OwnSlot::kNone : expert};
}

// Those of the tokens that this block has routed, which nobody need look for: rows are read once
// for all their places. Of one rank, by the math warps, from before tiles are placed: until then
// they rehearse, on rows of no bytes, for what is fetched when weights have begun to stream comes
// behind them. Returns how many rows this warp has packed.
template <typename P>
__device__ __forceinline__ std::uint32_t pack_own_tokens(const Pass<P>& pass) {
  constexpr std::uint32_t kVectors = 8, kStep = 16 * 32;
  const LayerParams& layer = pass.layer;
  const BlockStorage<P>& block = pass.block;
  const PassState<P>& state = pass.state();
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kWarpgroup / 32;
  const auto row_bytes = static_cast<std::uint32_t>(layer.hidden * P::kElementBytes);
  const auto cells = static_cast<std::uint32_t>(layer.cells_per_token);
  const std::uint32_t token0 = pass.first_token(blockIdx.x);
  const std::uint32_t slots = (pass.first_token(blockIdx.x + 1) - token0) * cells;
  const std::uint32_t at_once = min(protocol::ceil_div(slots, std::uint32_t{kMathWarps}), 32u);
  std::uint32_t slot0 = warp * at_once, packed = 0;
  // Lane i < at_once has slot i.
  const auto find_slot = [&]() -> OwnSlot {
    const std::uint32_t slot = slot0 + lane;
    if (lane >= at_once || slot >= slots) return {};
    return own_slot(pass, token0 + slot / cells, slot % cells);
  };
  OwnSlot own = find_slot();
#pragma unroll 1
  for (std::uint32_t rehearsal = untold<1>();;) {
    // As first_rows() says, which these warps do not wait for.
    const std::uint32_t tiles = first_tiles(pass), rows = first_rows_at_least(pass);
    const std::uint32_t bytes = rehearsal != 0 ? 0 : row_bytes;
    const std::uint32_t groups = rehearsal != 0 ? 0 : layer.x_groups;
    std::uint32_t place = 0;
    bool mine = own.expert != OwnSlot::kNone;
    if (mine) {
      protocol::TokenTiles cut = state.shared_tiles;
      std::uint32_t first_row = 0, first_tile = 0;
      if (own.expert != OwnSlot::kShared) {
        cut = protocol::TokenTiles(block.expert_rows[own.expert], P::kTileShape);
        first_tile = block.tile_begin[own.expert];
        first_row = block.row_begin[own.expert];
      }
      place = pass.place_of(cut, first_tile, own.position);
      const std::uint32_t tile = place / kMaxHeight<P>;
      mine = rehearsal == 0 && tile < layer.packed_slots &&
             (tile < tiles || first_row + own.position < rows);
    }
    const std::uint32_t my_row = pass.packed_row(place);
    std::uint32_t left = __ballot_sync(~0u, mine);
    packed += __popc(left);
    left |= rehearsal;
#pragma unroll 1
    while (left != 0) {
      const std::uint32_t token = __shfl_sync(~0u, own.token, __ffs(static_cast<int>(left)) - 1);
      const std::uint32_t places = __ballot_sync(~0u, mine && own.token == token) | rehearsal;
      left &= ~places;
      const std::byte* const from = state.rows + token * state.row_bytes;
      const float* const scales = state.row_scales + token * state.row_scale_stride;
      const float first_scale = P::kScaled && lane < groups ? scales[lane] : 0;
      std::uint32_t chunk = 0;
#pragma unroll 1
      do {
        const std::uint32_t byte0 = chunk + 16 * lane;
        uint4 values[kVectors];
#pragma unroll
        for (std::uint32_t v = 0; v < kVectors; ++v) {
          const std::uint32_t byte = byte0 + v * kStep;
          if (byte < bytes) values[v] = *reinterpret_cast<const uint4*>(from + byte);
        }
#pragma unroll 1
        for (std::uint32_t rest = places; rest != 0; rest &= rest - 1) {
          const std::uint32_t to = __shfl_sync(~0u, my_row, __ffs(static_cast<int>(rest)) - 1);
          std::byte* const to_row = layer.packed + std::size_t{to} * row_bytes;
#pragma unroll
          for (std::uint32_t v = 0; v < kVectors; ++v) {
            const std::uint32_t byte = byte0 + v * kStep;
            if (byte < bytes) store_vector(to_row + byte, values[v]);
          }
        }
      } while ((chunk += kVectors * kStep) < bytes);
      if constexpr (P::kScaled) {
#pragma unroll 1
        for (std::uint32_t rest = places; rest != 0; rest &= rest - 1) {
          const std::uint32_t to = __shfl_sync(~0u, my_row, __ffs(static_cast<int>(rest)) - 1);
          float* const to_scales = scales_of_row(pass, to);
          if (lane < groups) to_scales[lane * kMaxHeight<P>] = first_scale;
          for (std::uint32_t group = lane + 32; group < groups; group += 32) {
            to_scales[group * kMaxHeight<P>] = scales[group];
          }
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (mine) add_release_gpu(pass.packed(place / kMaxHeight<P>), RowPart::kUnits);
    if (rehearsal == 0) {
      slot0 += kMathWarps * at_once;
      if (slot0 >= slots) return packed;
      own = find_slot();
    } else {
      rehearsal = 0;
      named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
      if (state.plan_failed) return packed;
    }
  }
}

// do_part(row, part) for this math warp's parts of `rows` rows: a row to a warp, or to several as
// far as they go, and neighbours to different blocks.
template <typename P, typename DoPart>
__device__ __forceinline__ void share_out(const Pass<P>& pass, std::uint32_t rows,
                                          DoPart&& do_part) {
  const std::uint32_t warps = gridDim.x * kMathWarps;
  const auto row_bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kElementBytes);
  const std::uint32_t log2 = RowPart::log2_of(rows, warps, row_bytes);
#pragma unroll 1
  for (std::uint32_t i = (threadIdx.x / 32 - 4) * gridDim.x + blockIdx.x; i >> log2 < rows;
       i += warps) {
    do_part(i >> log2, RowPart{i & ((1u << log2) - 1), log2});
  }
}

// The math warps' part of sending, while others wait for all ranks' counts.
template <typename P>
__device__ __forceinline__ void send_first_slots(const Pass<P>& pass) {
  if (!place_sends(pass)) {
    pass.block.pass.plan_failed = true;
    if (pass.call.paired != 0 && threadIdx.x == kWarpgroup) give_up_pair(pass);
  }
  named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
  const std::uint32_t slots = pass.state().first_sends;  // none if the pass was given up
  trace_math(pass, kFirstSendsRecord, &TraceRecord::begin);
  share_out(pass, slots, [&](std::uint32_t slot, const RowPart& part) {
    send_slots<1>(pass, slot, 0, slots, part);
  });
  trace_math_end(pass, kFirstSendsRecord,
                 {TraceKind::kSend, -1, -1, -1, static_cast<std::int32_t>(slots / gridDim.x)});
}

// And of packing.
template <typename P>
__device__ __forceinline__ void pack_first_rows(const Pass<P>& pass) {
  std::uint32_t packed = 0;
  if (pass.distributed()) {
    named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
    if (pass.state().plan_failed) return;
    trace_math(pass, kFirstRowsRecord, &TraceRecord::begin);
    const std::uint32_t rows = first_rows(pass);
    share_out(pass, rows, [&](std::uint32_t row, const RowPart& part) {
      pack_rows<1>(pass, row, 0, rows, part);
    });
    packed = rows / gridDim.x;
  } else {
    trace_math(pass, kFirstRowsRecord, &TraceRecord::begin);
    named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
    packed = pack_own_tokens(pass);
  }
  trace_math_end(pass, kFirstRowsRecord,
                 {TraceKind::kPack, -1, -1, -1, static_cast<std::int32_t>(packed)});
}

// In order of levels, of which the n-th is the n-th expert of every rank. Rows of a level are
// packed when those of the next levels have been sent: no rank waits for what another sends later
// than what that one waits for. (Places are kept in memory, and bounds are looked up again and
// again, for there are few registers.)
template <typename P>
__device__ __forceinline__ void pack_role(const Pass<P>& pass) {
  constexpr std::uint32_t kRows = kPackedTogether, kSlots = 8;
  const LayerParams& layer = pass.layer;
  volatile std::uint32_t &slot = pass.block.pack_slot, &row = pass.block.pack_row,
                         &slots_end = pass.block.pack_slots_end;
  // By all lanes, none of which may read the one value while another writes the other.
  const auto set = [](volatile std::uint32_t& word, std::uint32_t value) {
    __syncwarp();
    word = value;
    __syncwarp();
  };
  // Where the slots end that are sent before the group of rows at `row` is packed. Rows that wait
  // together are of the level of the last of them, which waits for what is sent last.
  const auto slots_before_row = [&] {
    if (row >= pass.num_rows()) return pass.num_sends();
    const std::uint32_t level =
        find_expert(pass.block.row_begin + pass.first_expert(), pass.local_experts(),
                    min(row + kRows, pass.num_rows()) - 1);
    return pass.block.ranks.send_begin[min(level + 1 + pass.state().send_lead, layer.levels) *
                                       static_cast<std::uint32_t>(layer.heaps.size() - 1)];
  };
  set(pass.block.pass.first_rows, first_rows(pass));
  set(slot, first_group<kSlots>(pass.state().first_sends / kSlots * kSlots));
  set(row, first_group<kRows>(pass.state().first_rows / kRows * kRows));
  const auto sends = [&] { return pass.distributed() && slot < pass.num_sends(); };
#pragma unroll 1
  while (sends() || row < pass.num_rows()) {
    if (sends()) {
      set(slots_end, slots_before_row());
#pragma unroll 1
      while (slot < slots_end) {
        send_slots<kSlots>(pass, slot, pass.state().first_sends, pass.num_sends());
        set(slot, slot + kSlots * gridDim.x);
      }
    }
    if (row < pass.num_rows()) {
      pack_rows<kRows>(pass, row, pass.state().first_rows, pass.num_rows());
      set(row, row + kRows * gridDim.x);
    }
  }
  if (pass.distributed()) raise_finished(pass);
}

}  // namespace switchyard::gpu
