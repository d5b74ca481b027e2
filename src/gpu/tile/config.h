// The shape of a tile's multiplication, and the numbers it works on: plain values, for the host and
// for kernels. A tile is a block of output, weight rows x token rows.
#pragma once

#include <cstdint>

#include "base/quantize.h"
#include "gpu/pipeline/roles.h"
#include "gpu/tile/four_bit.h"
#include "protocol/partition.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// The rows of a box of weights: each math warpgroup multiplies its half with one instruction. A
// task has one box or several.
inline constexpr int kTileRows = kInstructionRows * kMathGroups;
// The bytes of each token in a stage, and of each weight row of a type that is as wide.
inline constexpr int kStageRowBytes = kSwizzleRowBytes;
// Rows of gate, then as many rows of up, where a gated FFN's first matrices are interleaved.
inline constexpr int kRowGroup = 8;
// The unit, in rows, in which tokens come into the ring.
inline constexpr std::uint32_t kUnitRows = 16;

// The operand that takes the rows of the matrix instruction; the other takes its columns.
enum class Orientation : std::uint8_t {
  kWeightMajor,  // a thread has two weight rows of many tokens
  kTokenMajor    // a thread has two tokens of many weight rows
};

struct TileConfig {
  int weight_rows;                 // of a block's task
  protocol::TileShape token_rows;  // of a tile
  int stages;                      // in the ring, at most
  Orientation orientation;
  int cluster;          // blocks that may do a task together
  int most_log2_split;  // the second GEMM's K may be cut into 1 << this parts

  constexpr int boxes() const { return weight_rows / kTileRows; }
  constexpr int max_height() const { return token_rows.max_height; }
};

// The scale group of tokens with one scale for all columns.
inline constexpr int kWholeRow = 1 << 30;

// One side of the products: weights or tokens.
struct Operand {
  // The elements in memory and in the ring. Those of four bits come in boxes: see tile/four_bit.h.
  DType storage;
  DType compute;  // of the elements that the matrix instruction takes
  // An fp32 scale covers so many columns of a token, or so many rows and columns of weights; 0:
  // there are no scales.
  int scale_group;

  constexpr int element_bytes() const { return static_cast<int>(size_of(storage)); }
};
struct Numerics {
  Operand weight, token;

  // Operands that are multiplied in the type that they are stored in.
  static constexpr Numerics stored_as(DType type, int scale_group = 0) {
    const Operand operand{type, type, scale_group};
    return {operand, operand};
  }
  constexpr bool scaled() const { return token.scale_group != 0; }
  constexpr bool four_bit() const { return is_four_bit(weight.storage); }
  // Weights of four bits become E5M2 on their way to the matrix instruction.
  constexpr bool makes_codes() const { return four_bit() && token.compute == DType::kF8E4M3; }
  constexpr int weight_bytes() const { return weight.element_bytes(); }
  constexpr int weight_bits() const { return four_bit() ? 4 : 8 * weight_bytes(); }
  constexpr int token_bytes() const { return token.element_bytes(); }
  // The columns of a stage, or of each of its parts: a token has kStageRowBytes of them. A weight
  // row of a narrower type has fewer bytes.
  constexpr int stage_columns() const { return kStageRowBytes / token_bytes(); }
  constexpr int weight_row_bytes() const { return stage_columns() * weight_bytes(); }
  // The multiple that columns and rows of a matrix are padded to, for the copy engine.
  constexpr int alignment() const {
    return four_bit() ? static_cast<int>(kMxGroup) : 16 / weight_bytes();
  }
};

// Values that follow from a configuration. The functions of this room take it as a type C with
//   TileConfig kTile, Numerics kNumerics
//   TokenSource kTokens   how tokens come into the ring
//   int kSlotRows         rows of a slot for a tile of tokens, at least kTile.max_height()
//   int kStagedTokens     tokens that a math warpgroup transposes from weight rows at a time
// The layer's policies are such types, with more members.
template <typename C>
inline constexpr int kBoxes = C::kTile.boxes();
template <typename C>
inline constexpr std::uint32_t kMaxHeight = static_cast<std::uint32_t>(C::kTile.max_height());
template <typename C>
inline constexpr bool kScaled = C::kNumerics.scaled();
template <typename C>
inline constexpr bool kTokenMajor = C::kTile.orientation == Orientation::kTokenMajor;
// The parts of a stage. Each has kStageRowBytes of a token, and K's last stage may have fewer. The
// loading threads, and looks at barriers, take no longer for a stage of several parts than for one
// of a single part.
template <typename C>
inline constexpr std::uint32_t kStageParts = [] {
  if constexpr (requires { C::kStageParts; }) {
    return std::uint32_t{C::kStageParts};
  } else {
    return 1u;
  }
}();
template <typename C>
inline constexpr std::uint32_t kPartColumns =
    static_cast<std::uint32_t>(C::kNumerics.stage_columns());
template <typename C>
inline constexpr std::uint32_t kStageColumns = kStageParts<C>* kPartColumns<C>;
template <typename C>
inline constexpr bool kFourBit = C::kNumerics.four_bit();
template <typename C, bool = kFourBit<C>>
struct BoxOf {
  static constexpr std::uint32_t kBytes = kTileRows * C::kNumerics.weight_row_bytes();
};
template <typename C>
struct BoxOf<C, true> {
  // As many boxes of four-bit weights as have a stage's columns. They follow each other in memory.
  using Box = FourBitBox<C::kNumerics.weight.storage>;
  static constexpr std::uint32_t kBytes = kStageColumns<C> / Box::kColumns * Box::kBytes;
};
// The bytes of a stage in one box of weights.
template <typename C>
inline constexpr std::uint32_t kBoxBytes = BoxOf<C>::kBytes;
// True if the blocks of a pair may have different tiles and the same weights. Each then loads half
// of the boxes.
template <typename C>
inline constexpr bool kPairsTiles = C::kTile.cluster == 2 && kBoxes<C> == 2;

// True if ordinary copies write the tokens of a stage; see TokenSource.
template <typename C>
inline constexpr bool kGathers = C::kTokens == TokenSource::kGathered;

// True if a launch decides whether ordinary copies write them.
template <typename C>
inline constexpr bool kMayGather = requires {
  requires C::kMayGather;
};

// True if a stage holds products of scales. Token-major tiles have, with each stage, the scales of
// its tokens multiplied by the two scales of its weights: of gate and up, or of the first 128 rows
// and the next. Weight-major tiles have both kinds of scales as they are.
template <typename C>
inline constexpr bool kJoinedScales = kScaled<C>&& kTokenMajor<C>;
// True if h is stored in bf16 and quantized afterwards. A weight-major warp has few columns of a
// token, so codes of h need the results of several warps. A token-major warp makes them in its
// epilogue.
template <typename C>
inline constexpr bool kQuantizesStoredRows = kScaled<C> && !kTokenMajor<C>;
// The rows of a slot for h, over kSlotRows: more than one where even the highest tile is stored in
// bf16 first, behind the place for its codes.
template <typename C>
inline constexpr std::uint32_t kHiddenStretch = [] {
  if constexpr (requires { C::kHiddenStretch; }) {
    return std::uint32_t{C::kHiddenStretch};
  } else {
    return 1u;
  }
}();
// The scales of a stage, in floats: either four of the weights (see FfnParams::gemm1_scales) and
// one for each token, or two for each token.
inline constexpr std::uint32_t kWeightScales = 4, kScaleSets = 2;

template <typename C>
inline constexpr bool kMakesCodes = C::kNumerics.makes_codes();

// True if all columns of a token share a scale, and all of its h: the matrix unit then sums all
// products of a tile, which are scaled at its end. In memory all groups have that scale.
template <typename C>
inline constexpr bool kRowScales = C::kNumerics.token.scale_group == kWholeRow;

// True if something else may take the end of the ring for as long as the kernel runs. The number of
// stages is then a parameter of the launch.
template <typename C>
inline constexpr bool kLendsRing = requires {
  requires C::kLendsRing;
};

// True if several blocks share a multiprocessor. Threads have few registers then.
template <typename C>
inline constexpr bool kFewRegisters = [] {
  if constexpr (requires { C::kBlocksPerSM; }) {
    return C::kBlocksPerSM > 1;
  } else {
    return false;
  }
}();

// True if operands of four-bit weights stay in registers from one tile to the next.
template <typename C>
inline constexpr bool kHoldsOperands = kFourBit<C> && !(kMakesCodes<C> && kFewRegisters<C>);
// True if the tiles of all heights make the operands of four-bit weights in the same registers; see
// OperandRegisters.
template <typename C>
inline constexpr bool kTiesOperands = requires {
  requires C::kTiesOperands;
};

// The bytes of the ring: a block has it all, unless it shares the multiprocessor with another.
template <typename C>
inline constexpr std::uint32_t kRing = [] {
  if constexpr (requires { C::kRingBytes; }) {
    return std::uint32_t{C::kRingBytes};
  } else {
    return gpu::kRingBytes;
  }
}();

// The contents of a stage of the ring; see pipeline/ring.cuh. A stage has room for tiles of at most
// `height` tokens. Where math warps are short of registers or instructions, it always has room for
// the highest tile, so that its size is a constant of the kernel.
template <typename C>
struct StageLayout {
  static constexpr bool kFixed = kJoinedScales<C> || kStageParts<C> != 1;
  static constexpr bool kFixedCount = kFixed && !kLendsRing<C>;
  static constexpr bool kMayGather = gpu::kMayGather<C>;
  // (The swizzle wants multiples of 1024.)
  static constexpr std::uint32_t kTokensAt =
      protocol::round_up<std::uint32_t>(kBoxes<C> * kBoxBytes<C>, 1024);
  static constexpr std::uint32_t bytes(std::uint32_t height) {
    return kTokensAt + kStageParts<C> * (kFixed ? kMaxHeight<C> : height) * kStageRowBytes;
  }
  // The bytes of tokens in each of several parts.
  static constexpr std::uint32_t kTokenPartBytes = kMaxHeight<C> * kStageRowBytes;
  // The stages of so many bytes of the ring; the other count() is of all.
  static constexpr std::uint32_t count(std::uint32_t height, std::uint32_t ring_bytes) {
    constexpr auto kMost = static_cast<std::uint32_t>(C::kTile.stages);
    static_assert(kMost <= kMaxStages);
    const std::uint32_t fit = ring_bytes / bytes(height);
    return fit < kMost ? fit : kMost;
  }
  static constexpr std::uint32_t count(std::uint32_t height) { return count(height, kRing<C>); }
  static constexpr std::uint32_t kStages = count(0), kStageBytes = bytes(0);
  static constexpr std::uint32_t kTokenScalesAt = kWeightScales * sizeof(float);
  static constexpr std::uint32_t kScaleSetBytes = kMaxHeight<C> * sizeof(float);
  static constexpr std::uint32_t kScaleBytes = !kScaled<C>        ? 0
                                               : kJoinedScales<C> ? kScaleSets * kScaleSetBytes
                                                                  : kTokenScalesAt + kScaleSetBytes;
};

}  // namespace switchyard::gpu
