// Quantizing h in passes that store it in bf16 first.
#pragma once

#include "gpu/schedule/progress.cuh"
#include "gpu/tile/epilogue.cuh"
#include "gpu/tile/quantize.cuh"
#include "gpu/tokens/quantize_row.cuh"

namespace switchyard::gpu {

// The part of h that a math warpgroup has stored in bf16. All parts that share a scale make a
// group: of 128 columns, which two blocks' warpgroups share where gate and up make it, or of all
// columns. The last of them makes the codes and scales of the whole group, and tells of all parts.
// To find out which is the last takes a round trip to the L2 cache. So it is put off until the next
// tile's first tokens have arrived, if it is a first GEMM's, which waits for nothing that depends
// on it. With few registers there are none to keep it in while tiles are multiplied: the last part
// does it at once, and the other block's warps work in the meantime.
//
// A group of all columns is long: one warpgroup takes 40 us for 110 rows of 2880. So its rows are
// cut into pieces. The last part's warpgroup takes one after the other until none is left, and
// those that stored shortly before it take some when they come here again. Nobody waits for
// another's pieces but GEMM2.
template <bool kGated, typename P>
class StoredPart {
 public:
  static constexpr bool kExists = kQuantizesStoredRows<P>;
  // True if finish() is to be called within the next tile of a first GEMM, else before every tile.
  static constexpr bool kPutsOff = kExists && !kFewRegisters<P>;
  __device__ StoredPart(const Progress<P>& progress, const HiddenSlots<P>& hidden)
      : progress_(progress), hidden_(hidden) {}

  // Counts the part, and leaves the rest to finish() or does it. Called when the warpgroup has
  // issued its stores and has met at a barrier since.
  __device__ void put_off(const TileTask& task) {
    if constexpr (kExists) {
      tile_ = task.tile;
      if constexpr (!kRowScales<P>) group_ = task.block / kBlocks;
      rows_ = task.rows;
      shared_ = task.shared != 0;
      if (reread_thread_index<kWarpgroup>() == 0) {
        before_ = fetch_add_released_gpu(progress_.parts_stored(tile_, group_), 1u << shift());
      }
      if constexpr (!kPutsOff) quantize_if_complete<true>();
    }
  }
  // Does what was put off, if anything. Called by all of the warpgroup.
  __device__ void finish() {
    if constexpr (kExists) {
      if (rows_ != 0) quantize_if_complete<false>();
    }
    // Known numbers need no registers within the next tile.
    if constexpr (!kPutsOff) tile_ = rows_ = before_ = 0, shared_ = false;
  }

 private:
  static constexpr std::uint32_t kBlocks = kGated ? 2 : 1;  // that make 128 columns
  __device__ std::uint32_t shift() const { return 4 * (group_ % PassWords::kGroupsOfWord); }
  // Makes the group's codes if this part is its last. Of a group of all columns, makes those of
  // pieces of the rows if all parts are stored and this one is among the last; if others are still
  // missing, `kComesAgain` leaves it to finish() to look once more.
  template <bool kComesAgain>
  __device__ void quantize_if_complete() {
    const FfnParams& ffn = progress_.experts.ffn(shared_);
    const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
    const std::uint32_t thread = reread_thread_index<kWarpgroup>();
    const std::uint32_t blocks = progress_.tasks(ffn.gemm1_rows) << progress_.paired;
    const std::uint32_t parts =
        kMathGroups * (kRowScales<P> ? blocks : min(kBlocks, blocks - group_ * kBlocks));
    if constexpr (!kRowScales<P>) {
      const bool last = thread == 0 && (before_ >> shift() & 15) + 1 == parts;
      if (last) fence_gpu();
      if (named_barrier_any<kWarpgroup>(group_barrier(math_group()), last)) {
        quantize(intermediate, thread);
        named_barrier<kWarpgroup>(group_barrier(math_group()));
        if (thread == 0) add_release_gpu(progress_.gemm1_done(tile_), parts);
      }
      rows_ = 0;
      return;
    }
    const std::uint32_t pieces = protocol::ceil_div(rows_, kPieceRows);
    // The word has the stored parts and, above them, the pieces that were taken.
    std::uint32_t* const word = progress_.parts_stored(tile_, 0);
    constexpr std::uint32_t kTaken = 1u << 16;
    // The first warp's lanes below this number tell it to all threads: 0 for none, the next
    // piece's number and one, or kLater.
    constexpr std::uint32_t kLater = 32;
    static_assert(P::kTile.max_height() < kLater * kPieceRows);
    std::uint32_t number = 0;
    bool takes = false;
    if (thread == 0) {
      const std::uint32_t later = parts - 1 - before_ % kTaken;
      const bool helps = later != 0 && later < kHelpersOfPiece * pieces;
      takes = later == 0 || (!kComesAgain && helps && load_acquire_gpu(word) % kTaken == parts);
      if (takes) fence_gpu();
      if (kComesAgain && helps) number = kLater;
    }
#pragma unroll 1
    for (;;) {
      if (takes) {
        const std::uint32_t piece = atomicAdd(word, kTaken) / kTaken;
        number = piece < pieces ? piece + 1 : 0;
      }
      if (thread < 32) number = __shfl_sync(~0u, number, 0);
      number = named_barrier_count<kWarpgroup>(group_barrier(math_group()),
                                               thread < 32 && thread < number);
      if (number == 0 || (kComesAgain && number == kLater)) break;
      quantize_rows(intermediate, (number - 1) * kPieceRows, thread);
      named_barrier<kWarpgroup>(group_barrier(math_group()));
      if (thread == 0) {
        add_release_gpu(progress_.gemm1_done(tile_),
                        parts * number / pieces - parts * (number - 1) / pieces);
      }
    }
    if (number == 0) rows_ = 0;
  }
  __device__ void quantize(std::uint32_t intermediate, std::uint32_t thread) const {
    constexpr std::uint32_t kRows = kWarpgroup / kGroupLanes;
    constexpr auto kSlotRows = static_cast<std::uint32_t>(P::kSlotRows);
    const HiddenParams& layer = hidden_.layer;
    const std::uint32_t column = group_ * kQuantGroup + thread % kGroupLanes * kLaneColumns;
    const std::size_t slot = tile_ % layer.h_slots;
    std::byte* const to = layer.h + slot * kSlotRows * kHiddenStretch<P> * layer.h_stride;
    const std::uint16_t* const from = hidden_.rows(tile_);
    float* const scales = layer.h_scales + (slot * layer.h_groups + group_) * kSlotRows;
#pragma unroll 1
    for (std::uint32_t row0 = 0; row0 < rows_; row0 += kRows) {
      const std::uint32_t row = row0 + thread / kGroupLanes;
      const std::size_t at = std::size_t{row} * layer.h_stride + column;
      const bool exists = row < rows_ && column < intermediate;
      uint4 first{}, second{};
      if (exists) {
        // Loads bypass the L1 cache, which may still hold the slot's previous tile.
        const auto* const vectors = reinterpret_cast<const uint4*>(from + at);
        first = __ldcg(vectors);
        second = __ldcg(vectors + 1);
      }
      float scale = 0;
      const uint4 codes = quantize_together(first, second, scale);
      if (!exists) continue;
      store_vector(to + at, codes);
      if (thread % kGroupLanes == 0) scales[row] = scale;
    }
  }
  // High tiles have more rows in flight: the registers of their sums are free now.
  static constexpr bool kHigh = P::kTile.max_height() > kInstructionRows && !kFewRegisters<P>;
  static constexpr std::uint32_t kRowLanes = kHigh ? 8 : 16, kPieceRows = kWarpgroup / kRowLanes;
  // So many of the last parts, for each piece, look whether all are stored.
  static constexpr std::uint32_t kHelpersOfPiece = 2;
  // The same where all columns of a row share a scale, for rows from `row0` on. All groups get it.
  __device__ void quantize_rows(std::uint32_t intermediate, std::uint32_t row0,
                                std::uint32_t thread) const {
    constexpr auto kSlotRows = static_cast<std::uint32_t>(P::kSlotRows);
    const HiddenParams& layer = hidden_.layer;
    const std::size_t slot = tile_ % layer.h_slots;
    std::byte* const to = layer.h + slot * kSlotRows * kHiddenStretch<P> * layer.h_stride;
    const std::uint16_t* const from = hidden_.rows(tile_);
    float* const scales = layer.h_scales + slot * layer.h_groups * kSlotRows;
    const std::uint32_t groups = protocol::ceil_div<std::uint32_t>(intermediate, kQuantGroup);
    constexpr std::uint32_t kAtOnce = kHigh ? 16 : kFewRegisters<P> ? 4 : 8;
    const std::uint32_t row = row0 + thread / kRowLanes;
    const std::size_t at = std::size_t{row} * layer.h_stride;
    const float scale =
        quantize_row<kRowLanes, kAtOnce>(from + at, to + at, row < rows_ ? intermediate : 0);
#pragma unroll 1
    for (std::uint32_t group = thread % kRowLanes; row < rows_ && group < groups;
         group += kRowLanes) {
      scales[group * kSlotRows + row] = scale;
    }
  }

  const Progress<P> progress_;
  const HiddenSlots<P> hidden_;
  // The task that is put off; rows_ is 0 if there is none.
  std::uint32_t tile_ = 0, group_ = 0, rows_ = 0;
  bool shared_ = false;
  std::uint32_t before_ = 0;  // in the first thread: the word's value before this part was counted
};

}  // namespace switchyard::gpu
