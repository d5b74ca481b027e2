// Gathering tokens: two warps copy the rows of the first GEMM from where they are, 16 bytes per
// thread at a time. (The copy engine loads packed rows three times as fast, because the compiler
// puts three empty shared-memory loads before each cp.async.)
#pragma once

#include "gpu/pipeline/copy_row.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/schedule/progress.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/load.cuh"
#include "gpu/tile/multiply.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {

// Eight threads of the gather warps copy a row's 128 bytes of a stage. A thread keeps its place in
// the swizzle from one round of rows to the next.
inline constexpr std::uint32_t kRowsAtOnce = kGatherThreads / 8;
template <typename P>  // of an expert's rows
inline constexpr std::uint32_t kMostRounds = kMaxHeight<P> / kRowsAtOnce;
inline constexpr std::uint32_t kRoundBytes = kRowsAtOnce * kStageRowBytes;
static_assert(kRowsAtOnce % 8 == 0);

// Fills all stages with a tile of h that it quantizes from bf16. Eight threads share a row. Returns
// false if the pass was given up.
template <typename P>
__device__ __forceinline__ bool quantize_tile(const TilePipeline<P>& pipeline,
                                              const HiddenSlots<P>& hidden,
                                              const ExpertParams& experts, const TileTask& task,
                                              RingPlace& place, std::uint32_t thread) {
  static_assert(kLateRows == kRowsAtOnce && kGroupLanes == 8);
  const Ring<StageLayout<P>> ring = pipeline.ring();
  const std::uint32_t row = thread / kGroupLanes, chunk = thread % kGroupLanes;
  const auto depth = static_cast<std::uint32_t>(experts.ffn(task.shared != 0).intermediate);
  const std::uint32_t column0 = task.first_k_block * kQuantGroup + chunk * kLaneColumns;
  const std::uint16_t* const from = hidden.rows(task.tile) + row * hidden.layer.h_stride + column0;
  uint4 values[kLateStages][2];
#pragma unroll
  for (std::uint32_t i = 0; i < kLateStages; ++i) {
    values[i][0] = values[i][1] = uint4{0, 0, 0, 0};
    if (i < task.k_blocks && row < task.rows && column0 + i * kQuantGroup < depth) {
      // Loads bypass the L1 cache, which may still hold the slot's previous tile.
      const auto* const vectors = reinterpret_cast<const uint4*>(from + i * kQuantGroup);
      values[i][0] = __ldcg(vectors);
      values[i][1] = __ldcg(vectors + 1);
    }
  }
  // The array is shifted and the index stays constant: with eight copies of this code, fetching
  // each would take longer than executing it.
#pragma unroll 1
  for (std::uint32_t i = 0; i < task.k_blocks; ++i) {
    if (!ring.template await_free<true>(pipeline.waiter(), place)) return false;
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

// Fills all stages with a first GEMM's tile. With `rehearsal` the tile has no rows, one stage is
// filled, and threads arrive at `rehearsal_barrier` instead. Returns false if the pass was given
// up.
template <typename P>
__device__ __forceinline__ bool gather_tile(const TilePipeline<P>& pipeline,
                                            const TokenRows& tokens, int hidden,
                                            const TileTask& task, RingPlace& place,
                                            std::uint32_t thread, bool rehearsal,
                                            std::uint32_t rehearsal_barrier) {
  const std::uint32_t my_row = thread / 8, my_chunk = thread % 8;
  const std::uint32_t my_place = swizzled_place(my_row, my_chunk);
  const Ring<StageLayout<P>> ring = pipeline.ring();
  const std::byte* from = tokens.rows;
  const auto stride = static_cast<std::uint32_t>(tokens.row_bytes / 16);
  const auto offset_of = [&](std::uint32_t row) {  // this thread's chunk, in units of 16 bytes
    const std::uint32_t source =
        task.list == nullptr ? task.first_row + row : SlotEntry::token(task.list[row]);
    return source * stride + my_chunk;
  };
  // All but the last few rows form whole rounds, which need no test for each row.
  const std::uint32_t rounds = task.rows / kRowsAtOnce;
  const bool one_more = rounds * kRowsAtOnce + my_row < task.rows;
  const std::uint32_t last_offset = one_more ? offset_of(rounds * kRowsAtOnce + my_row) : 0;
  std::uint32_t offsets[kMostRounds<P>];
#pragma unroll
  for (std::uint32_t i = 0; i < kMostRounds<P>; ++i) {
    offsets[i] = i < rounds ? offset_of(i * kRowsAtOnce + my_row) : 0;
  }
  // Thread i copies the scale of row i.
  const float* scale = nullptr;
  if constexpr (kScaled<P>) {
    static_assert(P::kSmallTokens <= kGatherThreads);
    if (thread < task.rows) {
      const std::uint32_t source =
          task.list == nullptr ? task.first_row + thread : SlotEntry::token(task.list[thread]);
      scale = tokens.row_scales + source * tokens.row_scale_stride;
    }
  }
  constexpr std::uint32_t kParts = kStageParts<P>;
  std::uint32_t part = 0;  // the next of the task's
  const auto end_stage = [&] {
    if (kScaled<P> && scale != nullptr) {
      copy_word_async(ring.token_scales(place.stage) + 4 * thread, scale++);
    }
    arrive_after_copies(!rehearsal ? ring.full_barrier(place.stage) : rehearsal_barrier);
    place.advance(ring.stages);
  };
  const auto copy_rows = [&](auto copy) {
    const std::uint32_t to =
        ring.tokens(place.stage) + part % kParts * StageLayout<P>::kTokenPartBytes + my_place;
#pragma unroll
    for (std::uint32_t i = 0; i < kMostRounds<P>; ++i) {
      if (i >= rounds) break;
      copy(to + i * kRoundBytes, from + std::size_t{offsets[i]} * 16);
    }
    if (one_more) copy(to + rounds * kRoundBytes, from + std::size_t{last_offset} * 16);
    from += kStageRowBytes;
    if (++part % kParts == 0) end_stage();
  };
  const auto await_stage = [&] {
    return part % kParts != 0 || ring.template await_free<true>(pipeline.waiter(), place);
  };
  const auto depth = static_cast<std::uint32_t>(hidden * P::kNumerics.token_bytes());
  const std::uint32_t whole_parts = !rehearsal ? depth / kStageRowBytes : 1;
  const std::uint32_t parts =
      kParts == 1 ? task.k_blocks : (task.k_blocks - 1) * kParts + task.last_parts;
  while (part < whole_parts) {
    if (!await_stage()) return false;
    copy_rows([](std::uint32_t to, const std::byte* source) { copy_async(to, source); });
  }
  if (whole_parts < parts) {
    if (!await_stage()) return false;
    const bool inside = whole_parts * kStageRowBytes + 16 * my_chunk < depth;
    copy_rows(
        [inside](std::uint32_t to, const std::byte* source) { copy_async(to, source, inside); });
  }
  if (part % kParts != 0) end_stage();
  return true;
}

}  // namespace switchyard::gpu
