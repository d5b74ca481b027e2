// The choices that follow from the type that a layer computes in: policies for large, small and low
// passes, for the host and for the kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/route/params.h"
#include "gpu/schedule/params.h"
#include "gpu/tile/params.h"
#include "gpu/tile/policies.h"
#include "switchyard/schedule.h"

namespace switchyard::gpu {

// The choices that the policies of all types share for large passes.
struct LargePass {
  static constexpr bool kTraced = false;
  static constexpr PassSize kSize = PassSize::kLarge;
  static constexpr Start kStart = Start::kShared;
  static constexpr GateLoads kGate = GateLoads::kCopyEngine;
  static constexpr Publisher kPublisher = Publisher::kScheduler;
  static constexpr bool kLendsRing = true;  // to tables of many experts
  // True: the kernel is compiled for a world of one rank, whose passes have one round.
  static constexpr bool kOneRank = false;
  // True: the kernel is compiled for calls that give the routing, and for nothing else.
  static constexpr bool kGivenRouting = false;
  // True: a launch may do nothing but choose experts; see RouteCall::only_routes.
  static constexpr bool kMayOnlyRoute = false;
  static constexpr int kBlocksPerSM = 1;
  // Cells whose loads a warp has in flight together when it combines: 8 and a shared expert's.
  static constexpr std::uint32_t kCombinesAtOnce = 9;
  // The scheduler's pause between looks at its barriers: a warp that polls without pause takes
  // issue slots from the math warps.
  static constexpr unsigned kSchedulerRestNs = 32;
};

// Small passes use the slots of large ones for tiles of h.
struct BF16Policy : BF16Tiles, LargePass {
  // When the weights of so many stages are not yet requested, the scheduler takes the next ticket.
  // Later, the ring could run dry. Earlier, the block would hold a task that no other block can do.
  static constexpr std::uint32_t kStagesAhead = 12;
  // The loads of a lane that are in flight together when a warp copies a row.
  static constexpr std::uint32_t kCopyVectors = 8;
  static constexpr int kSmallTokens = 32, kSmallLogits = 6144;
};

struct FP8Policy : FP8Tiles, LargePass {
  static constexpr std::uint32_t kStagesAhead = 6;
  static constexpr std::uint32_t kCopyVectors = 4;  // the loading warps have few registers
  static constexpr int kSmallTokens = 32, kSmallLogits = 3072;
};

// The layer kernel has tiles as high as those of bf16: its tiles of all heights share the registers
// of the weights, and its loading warps leave the math warps more than GroupedGemm's do.
template <typename Tiles>
struct FourBitPolicy : Tiles, LargePass {
  static constexpr TileConfig kTile = weight_major_tile(BF16Tiles::kTile.max_height(), kMaxStages);
  static constexpr int kSlotRows = BF16Tiles::kSlotRows;
  static constexpr bool kMayOnlyRoute = true;  // for low passes
  static constexpr std::uint32_t kStagesAhead = 12, kStagesTogether = 4;
  static constexpr std::uint32_t kCopyVectors = 4;  // the loading warps have few registers
  static constexpr RoleRegisters kRegisters{.loading = 72, .math = 216};
  static constexpr bool kTiesOperands = true;
  static constexpr int kSmallTokens = 32, kSmallLogits = 6144;
};
struct MXFP4Policy : FourBitPolicy<MXFP4Tiles> {};
struct INT4Policy : FourBitPolicy<INT4Tiles> {};

// All columns of h share a scale, so h is stored in bf16 first, behind its codes.
struct MXFP4FP8Policy : MXFP4FP8Tiles, LargePass {
  static constexpr std::uint32_t kRingBytes = 188 * 1024;
  static constexpr Publisher kPublisher = Publisher::kMathFirst;
  static constexpr bool kMayOnlyRoute = true;  // for low passes
  static constexpr std::uint32_t kHiddenStretch = 3;
  static constexpr std::uint32_t kStagesAhead = 6;
  static constexpr std::uint32_t kCopyVectors = 4;  // the loading warps have few registers
  static constexpr int kSmallTokens = 32, kSmallLogits = 3072;
};

// The choices that small passes share: few tokens and the smallest tasks.
template <typename P>
struct SmallChoices : P {
  static constexpr PassSize kSize = PassSize::kSmall;
  static constexpr Start kStart = Start::kEveryBlock;
  static constexpr TokenSource kTokens = TokenSource::kGathered;
  static constexpr GateLoads kGate = GateLoads::kCaches;
  static constexpr Publisher kPublisher = Publisher::kMath;
  static constexpr bool kMayOnlyRoute = false;
  static constexpr bool kLendsRing = false;
  static constexpr bool kOneRank = true;
  static constexpr std::uint32_t kStagesAhead = 4;
  static constexpr std::uint32_t kStagesTogether = 4;
  static constexpr unsigned kSchedulerRestNs = 0;
};
// The tile of blocks that never form pairs.
constexpr TileConfig single_block_tile(protocol::TileShape rows, int stages, int most_log2_split) {
  return {.weight_rows = kTileRows,
          .token_rows = rows,
          .stages = stages,
          .orientation = Orientation::kWeightMajor,
          .cluster = 1,
          .most_log2_split = most_log2_split};
}
// log2 of the most parts that small passes may split GEMM2's K into; see log2_splits().
inline constexpr int kMaxLog2Splits = 2;
static_assert(1 << kMaxLog2Splits == kMostSplits);

template <typename P>
struct SmallPass : SmallChoices<P> {
  static constexpr TileConfig kTile =
      single_block_tile({std::max(P::kSmallTokens, P::kTile.token_rows.least), P::kSmallTokens,
                         P::kTile.token_rows.least},
                        P::kTile.stages, kMaxLog2Splits);
  static constexpr RoleRegisters kRegisters{.loading = 152, .math = 176};
  static constexpr int kStagedTokens = 32;
};

// The policy of passes whose tiles are all low, of weights of four bits. What bounds them is how
// fast warps turn codes into operands. Low tiles need few registers, so two blocks share a
// multiprocessor, and twice as many warps hide each other's waits. A gate has no room in so few
// registers. Weights that become E5M2 (makes_codes()) go to the warpgroup's instruction, which
// wants more registers. A part of their stages is as deep as two of bf16; those of higher tiles
// have one, because operands of two and more sums would want more registers than there are.
template <typename P, int kRows = kLowRows, std::uint32_t kParts = kMakesCodes<P> ? 2 : kLowParts>
struct LowPass : P {
  static constexpr int kBlocksPerSM = 2;
  static constexpr std::uint32_t kRingBytes = (kMakesCodes<P> && kParts == 1 ? 77 : 84) * 1024;
  static constexpr TileConfig kTile =
      single_block_tile({kRows, kLowRows, kLowRows}, kUsualStages, 0);
  static constexpr int kSlotRows = kRows;
  static constexpr std::uint32_t kStageParts = kParts, kStagesTogether = 1,
                                 kStagesAhead = (kMakesCodes<P> ? 6 : 12) / kParts;
  static constexpr std::uint32_t kCopyVectors = kMakesCodes<P> ? 2 : P::kCopyVectors;
  static constexpr TokenBoxes kSlotBoxes = kLowTokenBoxes;
  static constexpr bool kGivenRouting = true, kMayOnlyRoute = false;
  static constexpr GateLoads kGate = GateLoads::kCaches;
  static constexpr bool kLendsRing = false;
  // (Looks take energy, of which these passes are short.)
  static constexpr unsigned kSchedulerRestNs = 400;
  static constexpr std::uint32_t kCombinesAtOnce = 3;
  static constexpr int kMoved = kMakesCodes<P> ? 8 : 0;  // registers, from loading warps
  static constexpr RoleRegisters kRegisters{.loading = launch_registers(kBlocksPerSM) - 2 * kMoved,
                                            .math = launch_registers(kBlocksPerSM) + kMoved};
};
// The same with tiles of more tokens. Those in FP8 are half as many bytes, so stages have room for
// more of them, and threads have registers for the sums of 80.
template <typename P>
inline constexpr int kTallRows = kMakesCodes<P> ? 80 : kTallLowRows;
template <typename P>
using TallLowPass = LowPass<P, kTallRows<P>, kMakesCodes<P> ? 1 : kTallLowParts>;
template <typename P>
struct SmallLowPass : SmallChoices<LowPass<P>> {
  static constexpr std::uint32_t kStagesTogether = 1, kStagesAhead = 1;
  static constexpr TileConfig kTile =
      single_block_tile({kLowRows, kLowRows, kLowRows}, kUsualStages, kMaxLog2Splits);
};
// True for the policies of large passes that have a policy of low ones beside them, and of small
// low ones.
template <typename P>
inline constexpr bool kHasLowPass = kFourBit<P> && !P::kTraced;
template <typename P>
inline constexpr bool kHasSmallLowPass = kHasLowPass<P> && !kMakesCodes<P>;

// The conditions on a policy, each with the problem if it does not hold.
template <typename P>
struct ValidPolicy {
  static_assert(suffice(P::kRegisters, P::kBlocksPerSM),
                "the roles want more registers than the launch gives the block");
  static_assert(P::kOneRank || P::kStart == Start::kShared,
                "ranks count their rows between a shared start's lists and its tiles");
  static_assert(P::kTile.cluster <= static_cast<int>(kPair), "clusters are single blocks or pairs");
  static_assert(P::kNumerics.weight.compute == P::kNumerics.token.compute,
                "the matrix instruction takes operands of one type");
  static_assert(P::kSlotRows >= P::kTile.max_height(), "a slot has room for a tile of most tokens");
  static_assert(kStageParts<P> == 1 || P::kStagesTogether == 1,
                "stages of several parts are filled one by one");
  static_assert(kStageParts<P> == 1 || P::kSlotRows % kLowRows == 0,
                "stages of several parts are filled with the boxes of low passes");
};
static_assert(BF16Policy::kSmallTokens == kMostSmallTokens &&
              FP8Policy::kSmallTokens == kMostSmallTokens);
template struct ValidPolicy<BF16Policy>;
template struct ValidPolicy<SmallPass<BF16Policy>>;
template struct ValidPolicy<FP8Policy>;
template struct ValidPolicy<SmallPass<FP8Policy>>;
template struct ValidPolicy<MXFP4Policy>;
template struct ValidPolicy<SmallPass<MXFP4Policy>>;
template struct ValidPolicy<LowPass<MXFP4Policy>>;
template struct ValidPolicy<TallLowPass<MXFP4Policy>>;
template struct ValidPolicy<SmallLowPass<MXFP4Policy>>;
template struct ValidPolicy<MXFP4FP8Policy>;
template struct ValidPolicy<SmallPass<MXFP4FP8Policy>>;
template struct ValidPolicy<LowPass<MXFP4FP8Policy>>;
template struct ValidPolicy<TallLowPass<MXFP4FP8Policy>>;
template struct ValidPolicy<INT4Policy>;
template struct ValidPolicy<SmallPass<INT4Policy>>;
template struct ValidPolicy<LowPass<INT4Policy>>;
template struct ValidPolicy<TallLowPass<INT4Policy>>;
template struct ValidPolicy<SmallLowPass<INT4Policy>>;

// Kernels that record when each role did what.
template <typename P>
struct Traced : P {
  static constexpr bool kTraced = true;
};

// The facts of a large pass's policy as values, for the host.
struct PolicyFacts {
  Numerics numerics;
  TileConfig tile;
  int small_tokens, small_logits;  // the most that a small pass may have
  int hidden_stretch;              // see kHiddenStretch
  int stage_parts;                 // see kStageParts
};
template <typename P>
constexpr PolicyFacts facts_of() {
  return {P::kNumerics,    P::kTile,          P::kSmallTokens,
          P::kSmallLogits, kHiddenStretch<P>, kStageParts<P>};
}

}  // namespace switchyard::gpu
