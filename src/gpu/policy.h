// What the type that a layer computes in fixes about tiles, stages and registers: one policy for
// each, for the host and for the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/partition.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

inline constexpr int kWarpgroup = 128;
inline constexpr int kMathGroups = 2;
// Weight rows of one matrix instruction, and of the smallest task: one instruction for each math
// warpgroup.
inline constexpr int kInstructionRows = 64;
inline constexpr int kTileRows = kInstructionRows * kMathGroups;
// Of the tiles' tokens and weight rows, a stage holds so many bytes each.
inline constexpr int kStageRowBytes = 128;

// Small passes, of a policy's kSmallTokens and kSmallLogits at most, are routed by every block for
// itself, which saves a grid barrier, and have kernels of their own. Of more logits the routing
// takes longer than the barrier; how many that are is measured, see docs/decisions/0020.
inline constexpr std::uint32_t kMaxOwnSlots = 512;

struct BF16Policy {
  static constexpr bool kTraced = false;
  static constexpr bool kAlone = false;  // each block routes for itself
  static constexpr DType kCompute = DType::kBF16;
  static constexpr int kElementBytes = 2;
  static constexpr int kInstructionK = 16;
  static constexpr protocol::TileShape kTileShape{256, 32, 16};
  // Of a slot for tiles of h, in small passes too.
  static constexpr int kSlotRows = kTileShape.max_height;
  // Instructions, one below the other, that a math warpgroup's part of a large pass's task takes.
  static constexpr int kHalves = 1;
  // Whether stages carry scales, by which their products are multiplied.
  static constexpr bool kScaled = false;
  static constexpr int kSmallTokens = 32, kSmallLogits = 6144;
  // Registers per thread once the roles part. They share what the block got at launch, equal parts
  // in steps of 8: asking for more, setmaxnreg would wait for ever.
  static constexpr int kLoadingRegisters = 88;
  static constexpr int kMathRegisters = 208;
};

// E4M3 with scales: of weights for every 128 x 128, of tokens for every 128 columns. A stage is 128
// columns deep; its products are summed by the matrix unit, which keeps few bits, and then in fp32.
// That takes a second set of accumulators, so tiles have half as many tokens; they have twice as
// many weight rows, which for a gated FFN make 128 columns of h: what shares a scale.
struct FP8Policy {
  static constexpr bool kTraced = false;
  static constexpr bool kAlone = false;
  static constexpr DType kCompute = DType::kF8E4M3;
  static constexpr int kElementBytes = 1;
  static constexpr int kInstructionK = 32;
  static constexpr protocol::TileShape kTileShape{128, 128, 16};
  static constexpr int kSlotRows = kTileShape.max_height;
  static constexpr int kHalves = 2;
  static constexpr bool kScaled = true;
  static constexpr int kSmallTokens = 32, kSmallLogits = 3072;
  static constexpr int kLoadingRegisters = 72;
  static constexpr int kMathRegisters = 216;
};

// Of small passes, with their few tokens and smallest tasks.
template <typename P>
struct SmallPass : P {
  static constexpr bool kAlone = true;
  static constexpr protocol::TileShape kTileShape{std::max(P::kSmallTokens, P::kTileShape.least),
                                                  P::kSmallTokens, P::kTileShape.least};
  static constexpr int kHalves = 1;
  static constexpr int kLoadingRegisters = 152;
  static constexpr int kMathRegisters = 176;
};

// Of kernels that write down when their roles did what.
template <typename P>
struct Traced : P {
  static constexpr bool kTraced = true;
};

// The same, to be asked at run time.
struct PolicyFacts {
  DType compute;
  int element_bytes;
  protocol::TileShape tile;
  int large_rows;  // weight rows of a block's task in a large pass
  bool scaled;
  int small_tokens, small_logits;  // of a small pass, at most

  // Columns and rows that a matrix is filled up to, for the copy engine.
  int alignment() const { return 16 / element_bytes; }
};
template <typename P>
constexpr PolicyFacts facts_of() {
  return {P::kCompute, P::kElementBytes, P::kTileShape,  kTileRows * P::kHalves,
          P::kScaled,  P::kSmallTokens,  P::kSmallLogits};
}

}  // namespace switchyard::gpu
