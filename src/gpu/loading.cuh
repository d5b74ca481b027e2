// The loading warps that fill the ring: weights, tokens, gather. (The fourth: pack.cuh.)
#pragma once

#include "gpu/quantize.cuh"
#include "gpu/ranks.cuh"
#include "gpu/scheduler.cuh"

namespace switchyard::gpu {

// --- Weights: one thread. Streams the tasks' weight rows; they wait for nothing but a free stage.

// Whether the blocks of the pair have a tile each, and the same weights.
template <typename P>
__device__ __forceinline__ bool with_two_tiles(const TileTask& task) {
  return kPairsTiles<P> && task.two_tiles != 0;
}

// The scales of the weights of the task's first stage; kWeightScales for each stage.
template <typename P>
__device__ __forceinline__ const float* weight_scales(const Pass<P>& pass, const TileTask& task) {
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const bool first = task.work == Work::kGemm1;
  // Of two boxes: a block's in large passes, in small ones that of two blocks.
  const std::uint32_t pairs =
      protocol::ceil_div(first ? ffn.gemm1_rows : ffn.gemm2_rows, 2u * kTileRows);
  const std::uint32_t pair = kBoxes<P> == 1 ? task.block / 2 : task.block;
  const auto depth = static_cast<std::uint32_t>(first ? pass.layer.hidden : ffn.intermediate);
  // A block past the last row has no scales, and multiplies zeros.
  const std::size_t at = std::size_t{task.expert} * pairs + min(pair, pairs - 1);
  return (first ? ffn.gemm1_scales : ffn.gemm2_scales) +
         (at * protocol::ceil_div(depth, kStageColumns<P>) + task.first_k_block) * kWeightScales;
}

template <bool kGated, typename P>
__device__ __forceinline__ void weights_role(const Pass<P>& pass) {
  constexpr std::uint32_t kWeightScaleBytes = kWeightScales * sizeof(float);
  constexpr int boxes = kBoxes<P>;
  TaskReader reader(pass);
  RingPlace place;
  // The first time around is a rehearsal, while the first task is being found.
  for (std::uint32_t rehearsal = untold<1>();; rehearsal = 0) {
    TileTask task{};
    task.k_blocks = 1;
    if (rehearsal == 0) {
      if (!reader.template next_gemm<TraceRole::kWeights, false>(task)) return;
    }
    const Ring<StageLayout<P>> ring = pass.ring();
    const bool first = task.work == Work::kGemm1;
    const FfnParams& ffn = pass.ffn(task.shared != 0);
    const bool halves = first && kGated && boxes != 1;
    const WeightMaps& maps = first ? ffn.gemm1_maps : ffn.gemm2_maps;
    const CUtensorMap& map = P::kSize == PassSize::kSmall && first ? ffn.small_gemm1_map
                             : P::kSize == PassSize::kSmall || task.one_tile != 0 ? maps.once
                                                                                  : maps.again;
    // Of a gated first GEMM, half of a box's rows are gate's and half up's.
    const int groups = kTileRows / kRowGroup / (first && kGated ? 2 : 1);
    const std::uint64_t policy = task.one_tile != 0 ? kEvictFirst : kEvictLast;
    const std::uint32_t last_but_few =
        task.k_blocks > P::kStagesAhead ? task.k_blocks - P::kStagesAhead : 0;
    const float* scales = nullptr;
    constexpr bool kWithScales = kScaled<P> && !kJoinedScales<P>;
    if constexpr (kWithScales) scales = weight_scales(pass, task);
    for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
      if (!ring.await_free(pass.waiter(), place)) return;
      if (rehearsal != 0) break;
      if (kb == 0) trace_stamp(pass, TraceRole::kWeights, reader.index(), &TraceRecord::begin);
      if (kb == last_but_few) demand(pass);
      const std::uint32_t full = ring.full_barrier(place.stage);
      arrive_expect_bytes(full, boxes * kBoxBytes + (kWithScales ? kWeightScaleBytes : 0));
      const int k = static_cast<int>((task.first_k_block + kb) * kStageColumns<P>);
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

// A task's tokens, packed or of h, or this block's share of them: each block of a pair loads half,
// for both.
template <typename P>
class TileRows {
 public:
  __device__ TileRows(const Pass<P>& pass, const TileTask& task)
      : first_(task.work == Work::kGemm1),
        slot_(task.tile % (first_ ? pass.layer.packed_slots : pass.layer.h_slots)),
        maps_(first_ ? pass.layer.x_maps : pass.ffn(task.shared != 0).h_maps),
        paired_(P::kTile.cluster != 1 && pass.call.paired != 0 && !with_two_tiles<P>(task)) {
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
      load_rows(maps_.many, to, full, static_cast<int>(k), row, paired_);
      to += kUnitsOfMany * kUnitBytes;
      row += TokenMaps::kManyRows;
    }
#pragma unroll 1
    for (std::uint32_t i = 0; i < units_ % kUnitsOfMany; ++i) {
      load_rows(maps_.few, to, full, static_cast<int>(k), row, paired_);
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
__device__ __forceinline__ bool load_tile(const Pass<P>& pass, const TileTask& task,
                                          RingPlace& place, std::uint32_t thread) {
  const Ring<StageLayout<P>> ring = pass.ring();
  const TileRows<P> rows(pass, task);
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!ring.template await_free<kGathers<P>>(pass.waiter(), place)) return false;
    const std::uint32_t full = ring.full_barrier(place.stage);
    if (!kGathers<P> || (thread < 32 && elect())) {
      const std::uint32_t block = task.first_k_block + kb;
      const std::uint32_t scale_bytes =
          kScaled<P> ? task.units * kUnitRows * static_cast<std::uint32_t>(sizeof(float)) : 0;
      arrive_expect_bytes(full, task.units * TileRows<P>::kUnitBytes + scale_bytes);
      rows.load(ring.tokens(place.stage), full, block * kStageColumns<P>);
      if constexpr (kScaled<P>) {
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
__device__ __forceinline__ bool load_scaled_tile(const Pass<P>& pass, const TileTask& task,
                                                 RingPlace& place, bool rehearsal) {
  static_assert(kMaxHeight<P> == 4 * 32 && kStageColumns<P> == kQuantGroup);
  const Ring<StageLayout<P>> ring = pass.ring();
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
        rows.load(ring.tokens(place.stage), full, block * kStageColumns<P>);
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
    TileTask task{};
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
__device__ __forceinline__ bool quantize_tile(const Pass<P>& pass, const TileTask& task,
                                              RingPlace& place, std::uint32_t thread) {
  static_assert(kLateRows == kRowsAtOnce && kGroupLanes == 8);
  const LayerParams& layer = pass.layer;
  const Ring<StageLayout<P>> ring = pass.ring();
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
    TileTask task{};
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
      if constexpr (kScaled<P>) {
        if (pass.quantizes_late()) {
          if (!quantize_tile(pass, task, place, thread)) return;
          continue;
        }
      }
      fence_async_proxy();
      if (!load_tile(pass, task, place, thread)) return;
      continue;
    }
    const Ring<StageLayout<P>> ring = pass.ring();
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
    if constexpr (kScaled<P>) {
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
      if (kScaled<P> && scale != nullptr) {
        copy_word_async(ring.token_scales(place.stage) + 4 * thread, scale++);
      }
      // (Nobody waits for tickets in a small pass: see arrivals_of().)
      arrive_after_copies(rehearsal == 0 ? ring.full_barrier(place.stage)
                                         : shared_address(&pass.block.ticket_full));
      place.advance(ring.stages);
      from += kStageRowBytes;
    };
    const auto depth = static_cast<std::uint32_t>(pass.layer.hidden * P::kNumerics.token_bytes());
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

}  // namespace switchyard::gpu
