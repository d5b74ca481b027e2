// Filling the ring: a task's weights, and tokens that lie in slots.
#pragma once

#include "gpu/ptx/bulk_copy.cuh"
#include "gpu/tile/multiply.cuh"
#include "gpu/tile/params.h"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// True if the blocks of the pair have different tiles and the same weights.
template <typename C>
__device__ __forceinline__ bool with_two_tiles(const TileTask& task) {
  return kPairsTiles<C> && task.two_tiles != 0;
}

// The scales of the weights of the task's first stage. Each stage has kWeightScales of them.
template <typename C>
__device__ __forceinline__ const float* weight_scales(const ExpertParams& experts, int hidden,
                                                      const TileTask& task) {
  const FfnParams& ffn = experts.ffn(task.shared != 0);
  const bool first = task.kind == TaskKind::kGemm1;
  // Scales are stored per pair of boxes. A block has both boxes of a pair, or one if its tasks have
  // one box.
  const std::uint32_t pairs =
      protocol::ceil_div(first ? ffn.gemm1_rows : ffn.gemm2_rows, 2u * kTileRows);
  const std::uint32_t pair = kBoxes<C> == 1 ? task.block / 2 : task.block;
  const auto depth = static_cast<std::uint32_t>(first ? hidden : ffn.intermediate);
  // A block past the last row has no scales of its own. It multiplies zeros, so any will do.
  const std::size_t at = std::size_t{task.expert} * pairs + min(pair, pairs - 1);
  return (first ? ffn.gemm1_scales : ffn.gemm2_scales) +
         (at * protocol::ceil_div(depth, kStageColumns<C>) + task.first_k_block) * kWeightScales;
}

// The task's boxes of four-bit weights from its first stage on.
template <typename C>
__device__ __forceinline__ const std::byte* weight_boxes(const ExpertParams& experts, int hidden,
                                                         const TileTask& task) {
  const FfnParams& ffn = experts.ffn(task.shared != 0);
  const bool first = task.kind == TaskKind::kGemm1;
  const std::uint32_t boxes =
      protocol::ceil_div<std::uint32_t>(first ? ffn.gemm1_rows : ffn.gemm2_rows, kTileRows);
  const auto depth = static_cast<std::uint32_t>(first ? hidden : ffn.intermediate);
  // A block past the last box multiplies what the last one does, and stores nothing.
  const std::size_t box = std::size_t{task.expert} * boxes + min(task.block, boxes - 1);
  using Box = FourBitBox<C::kNumerics.weight.storage>;
  return (first ? ffn.gemm1_boxes : ffn.gemm2_boxes) +
         box * protocol::ceil_div(depth, Box::kColumns) * Box::kBytes +
         task.first_k_block * kBoxBytes<C>;
}

// The place of a task's weights.
struct WeightSource {
  const CUtensorMap& map;
  // True if a box has rows of gate and then as many of up. It decides which coordinate of the map
  // counts groups of rows.
  bool halves;
  int groups;                        // groups of rows in a box, each with a coordinate of its own
  std::uint64_t policy;              // how long the L2 cache keeps them
  const float* scales;               // of the first stage; null if stages hold products of scales
  const std::byte* boxes = nullptr;  // of four-bit weights, in place of the map; see weight_boxes()
};

// How many stages must be free before they are filled together: a look at a barrier takes a thread
// as long as a stage of four-bit weights takes the math warps. A launch that has few stages in its
// ring fills one after the other.
template <typename C>
__device__ __forceinline__ std::uint32_t stages_together(std::uint32_t stages) {
  if constexpr (C::kStagesTogether == 1) return 1;
  // Math warps may keep a stage while they wait for the next one.
  return stages >= C::kStagesTogether + 2 ? C::kStagesTogether : 1;
}
// The number of parts that a stage of a task has.
template <typename C>
__device__ __forceinline__ std::uint32_t parts_of_stage(const TileTask& task, std::uint32_t kb) {
  if constexpr (kStageParts<C> == 1) return 1;
  return kb + 1 == task.k_blocks ? task.last_parts : kStageParts<C>;
}
// Waits until the ring has room for so many stages of a task from `place` on. Stages become free in
// order, so the last one stands for all. Returns false if the pass was given up.
template <bool kWarp, typename C>
__device__ __forceinline__ bool await_room(const TilePipeline<C>& pipeline,
                                           const Ring<StageLayout<C>>& ring, RingPlace place,
                                           std::uint32_t stages) {
  for (std::uint32_t i = 1; i < stages; ++i) place.advance(ring.stages);
  return ring.template await_free<kWarp>(pipeline.waiter(), place);
}

// Loads all stages of a task's weights, by one thread. on_stage(kb) is called when the ring has
// room for stage kb. With `rehearsal` it returns after the first wait. Returns false if the pass
// was given up.
template <typename C, typename OnStage>
__device__ __forceinline__ bool load_weights(const TilePipeline<C>& pipeline,
                                             const Ring<StageLayout<C>>& ring,
                                             const WeightSource& source, const TileTask& task,
                                             RingPlace& place, bool rehearsal, OnStage&& on_stage) {
  constexpr bool kWithScales = kScaled<C> && !kJoinedScales<C> && !kFourBit<C>;
  constexpr std::uint32_t kScales = kWithScales ? kWeightScales * sizeof(float) : 0;
  const float* scales = source.scales;
  const std::uint32_t together = stages_together<C>(ring.stages);
  for (std::uint32_t kb = 0; kb < task.k_blocks;) {
    // (The compiler sees that a group of one is one.)
    const std::uint32_t end = C::kStagesTogether == 1 ? kb + 1 : min(kb + together, task.k_blocks);
    if (!await_room<false>(pipeline, ring, place, end - kb)) return false;
    if (rehearsal) break;
#pragma unroll 1
    for (; kb < end; ++kb) {
      const std::uint32_t full = ring.full_barrier(place.stage);
      on_stage(kb);
      const std::uint32_t box = kBoxBytes<C> / kStageParts<C> * parts_of_stage<C>(task, kb);
      arrive_expect_bytes(full, kBoxes<C> * box + kScales);
      if constexpr (kFourBit<C>) {
        static_assert(kBoxes<C> == 1, "blocks of a pair have weights of their own");
        load_bytes(ring.weights(place.stage), source.boxes + std::size_t{kb} * kBoxBytes<C>, box,
                   full, source.policy);
      } else {
        const int k = static_cast<int>((task.first_k_block + kb) * kStageColumns<C>);
#pragma unroll
        for (int i = 0; i < kBoxes<C>; ++i) {
          // If both blocks of a pair multiply with the same weights, each loads half of them.
          const bool both = with_two_tiles<C>(task);
          if (both && i != static_cast<int>(rank_in_pair())) continue;
          const int group = (static_cast<int>(task.block) * kBoxes<C> + i) * source.groups;
          load_box(source.map, ring.weights(place.stage) + i * kBoxBytes<C>, full, k,
                   source.halves ? group : 0, source.halves ? 0 : group,
                   static_cast<int>(task.expert), source.policy, both);
        }
      }
      if constexpr (kWithScales) {
        load_bytes(ring.weight_scales(place.stage), scales, kScales, full);
        scales += kWeightScales;
      }
      place.advance(ring.stages);
    }
  }
  return true;
}

// Tokens in slots, such as packed rows and h. A slot has room for a tile of kSlotRows tokens.
struct SlottedTokens {
  const TokenMaps& maps;
  std::uint32_t slot;
  const float* scales;        // of all slots; see first_scale()
  std::uint32_t groups;       // of columns; each has a scale
  std::uint32_t stretch = 1;  // the rows from a slot to the next, over kSlotRows

  // The first row of the tile, divided by kRowsOfPlace.
  template <typename C>
  static constexpr auto kRowsOfPlace = static_cast<std::uint32_t>(C::kSlotRows);
  __device__ std::uint32_t place() const { return slot * stretch; }
  // The address of the first group's scale of the slot's first token. Each group of columns has
  // kSlotRows scales.
  template <typename C>
  __device__ const float* first_scale() const {
    return scales + std::size_t{slot} * groups * static_cast<std::uint32_t>(C::kSlotRows);
  }
  // The scales of four neighbouring tokens, of one group after the other from `group` on. Loads
  // bypass the L1 cache, which may still hold those of the slot's previous tile.
  template <typename C>
  struct Scales {
    const float* at;
    __device__ float4 next() {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(at));
      at += kMaxHeight<C>;
      return four;
    }
  };
  template <typename C>
  __device__ Scales<C> scales_of(const TileTask& task, std::uint32_t token) const {
    return {first_scale<C>() + task.first_k_block * kMaxHeight<C> + token};
  }
};

// Returns the place of a token's 16 bytes `chunk`, of 128, in a stage's tokens. The copy engine
// would put them there, too.
__device__ __forceinline__ std::uint32_t swizzled_place(std::uint32_t row, std::uint32_t chunk) {
  return row * kStageRowBytes + ((chunk ^ (row & 7)) << 4);
}

template <typename C>
inline constexpr TokenBoxes kTokenBoxes = [] {
  if constexpr (requires { C::kSlotBoxes; }) {
    return C::kSlotBoxes;
  } else {
    return kUsualTokenBoxes;
  }
}();
template <typename C>
inline constexpr std::uint32_t kUnitBytes = kStageRowBytes* kTokenBoxes<C>.few;
// The rows of a tile that are loaded, in units of the smaller box.
template <typename C>
__device__ __forceinline__ std::uint32_t token_units(const TileTask& task) {
  if constexpr (kTokenBoxes<C>.few == kUnitRows) return task.units;
  return protocol::ceil_div(task.rows, kTokenBoxes<C>.few);
}
template <typename C>
__device__ __forceinline__ std::uint32_t token_bytes(const TileTask& task) {
  return token_units<C>(task) * kUnitBytes<C>;
}

// True if other warps load the rows: load_scaled_tile() then loads their scales only.
template <typename Rows>
inline constexpr bool kScalesAlone = requires {
  requires Rows::kScalesAlone;
};

// The rows of a task's tokens that this block loads. If both blocks of a pair have the same tile,
// each loads half of its rows for both.
// Tokens: SlottedTokens, or others with maps and a place in them.
template <typename C, typename Tokens>
class TileRows {
 public:
  __device__ TileRows(const TilePipeline<C>& pipeline, const Tokens& tokens, const TileTask& task)
      : place_(tokens.place()),
        maps_(tokens.maps),
        paired_(C::kTile.cluster != 1 && pipeline.paired != 0 && !with_two_tiles<C>(task)) {
    const std::uint32_t share = paired_ ? rank_in_pair() : 0, shares = paired_ ? kPair : 1;
    const std::uint32_t units = token_units<C>(task);
    begin_ = units * share / shares;
    units_ = units * (share + 1) / shares - begin_;
  }
  // Loads the columns from k on into so many parts of a stage, whose tokens are at `to` and whose
  // barrier is `full`.
  __device__ void load(std::uint32_t to, std::uint32_t full, std::uint32_t k,
                       std::uint32_t parts = 1) const {
    constexpr TokenBoxes kBoxes = kTokenBoxes<C>;
    constexpr std::uint32_t kUnitsOfMany = kBoxes.many / kBoxes.few;
    auto row = static_cast<int>(place_ * Tokens::template kRowsOfPlace<C> + begin_ * kBoxes.few);
    to += begin_ * kUnitBytes<C>;
    const auto load_parts = [&](const CUtensorMap& map) {
#pragma unroll 1
      for (std::uint32_t part = 0; part < (kStageParts<C> == 1 ? 1 : parts); ++part) {
        load_rows(map, to + part * StageLayout<C>::kTokenPartBytes, full,
                  static_cast<int>(k + part * kPartColumns<C>), row, paired_);
      }
    };
#pragma unroll 1
    for (std::uint32_t i = 0; i < units_ / kUnitsOfMany; ++i) {
      load_parts(maps_.many);
      to += kUnitsOfMany * kUnitBytes<C>;
      row += static_cast<int>(kBoxes.many);
    }
#pragma unroll 1
    for (std::uint32_t i = 0; i < units_ % kUnitsOfMany; ++i) {
      load_parts(maps_.few);
      to += kUnitBytes<C>;
      row += static_cast<int>(kBoxes.few);
    }
  }

 private:
  std::uint32_t place_;
  const TokenMaps& maps_;
  bool paired_;
  std::uint32_t begin_, units_;
};

// Loads all stages of a task's tokens, by one thread or by the gather threads. All gather threads
// arrive; one of the first warp loads. Returns false if the pass was given up.
template <typename C, typename Tokens>
__device__ __forceinline__ bool load_tile(const TilePipeline<C>& pipeline, const Tokens& tokens,
                                          const TileTask& task, RingPlace& place,
                                          std::uint32_t thread) {
  const Ring<StageLayout<C>> ring = pipeline.ring();
  const TileRows<C, Tokens> rows(pipeline, tokens, task);
  constexpr bool kTogether = kFourBit<C> && C::kStagesTogether != 1;
  const std::uint32_t together = kTogether ? stages_together<C>(ring.stages) : 1;
  for (std::uint32_t kb = 0; kb < task.k_blocks;) {
    const std::uint32_t end = kTogether ? min(kb + together, task.k_blocks) : kb + 1;
    if (!await_room<kGathers<C>>(pipeline, ring, place, end - kb)) return false;
    // Ordinary copies may have written these stages before. Warps that multiply each by itself read
    // them without the fence that matrix units want.
    if constexpr (kGathers<C> && kFourBit<C>) fence_async_proxy_shared();
#pragma unroll 1
    for (; kb < end; ++kb) {
      const std::uint32_t full = ring.full_barrier(place.stage);
      if (!kGathers<C> || (thread < 32 && elect())) {
        const std::uint32_t block = task.first_k_block + kb, parts = parts_of_stage<C>(task, kb);
        // The scale of a whole row comes with its last columns.
        const bool with_scales = kScaled<C> && (!kRowScales<C> || kb + 1 == task.k_blocks);
        const std::uint32_t scale_bytes =
            with_scales ? task.units * kUnitRows * static_cast<std::uint32_t>(sizeof(float)) : 0;
        arrive_expect_bytes(full, parts * token_bytes<C>(task) + scale_bytes);
        const std::uint32_t to = ring.tokens(place.stage), k = block * kStageColumns<C>;
        if constexpr (kStageParts<C> == 1) {
          rows.load(to, full, k);  // (Rows of GroupedGemm know no parts.)
        } else {
          rows.load(to, full, k, parts);
        }
        if constexpr (kScaled<C>) {
          if (with_scales) {
            load_bytes(
                ring.token_scales(place.stage),
                tokens.template first_scale<C>() + block * static_cast<std::uint32_t>(C::kSlotRows),
                scale_bytes, full);
          }
        }
      } else {
        arrive(full);
      }
      place.advance(ring.stages);
    }
  }
  return true;
}

// Loads all stages of a task's tokens by a whole warp, and stores the tokens' scales multiplied by
// the weights'. `of_weights`: the weights' scales of the task's first stage. A lane handles the
// scales of four neighbouring tokens.
template <typename C, typename Tokens>
__device__ __forceinline__ bool load_scaled_tile(const TilePipeline<C>& pipeline,
                                                 const Tokens& tokens, const float* of_weights,
                                                 const TileTask& task, RingPlace& place,
                                                 bool rehearsal) {
  static_assert(kMaxHeight<C> == 4 * 32 && kStageColumns<C> == kQuantGroup);
  const Ring<StageLayout<C>> ring = pipeline.ring();
  using Rows = TileRows<C, Tokens>;
  const Rows rows(pipeline, tokens, task);
  const std::uint32_t lane = threadIdx.x % 32;
  auto of_tokens = tokens.template scales_of<C>(task, 4 * lane);
  // The scales of two stages are under way, because loading them takes as long as multiplying a
  // stage.
  struct Scales {
    float4 tokens;
    float weights[kScaleSets];
  } scales[2];
  const auto fetch = [&](Scales& next) {
    next.tokens = of_tokens.next();
#pragma unroll
    for (std::uint32_t set = 0; set < kScaleSets; ++set) {
      next.weights[set] = __ldg(of_weights + set * (kWeightScales - 1));
    }
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
      if (!ring.template await_free<true>(pipeline.waiter(), place)) return false;
      const std::uint32_t full = ring.full_barrier(place.stage);
      if (elect()) {
        rows.load(ring.tokens(place.stage), full, block * kStageColumns<C>);
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
      if (lane == 0) {
        arrive_expect_bytes(full, kScalesAlone<Rows> ? 0 : token_bytes<C>(task));
      }
      place.advance(ring.stages);
      if (++block + 1 < end) fetch(of);
    }
  }
}

}  // namespace switchyard::gpu
