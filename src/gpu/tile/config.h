// The shape of a tile's multiplication, and the numbers it works on: plain values, for the host and
// for kernels. A tile is a block of output, weight rows x token rows.
#pragma once

#include <cstdint>

#include "base/quantize.h"
#include "gpu/pipeline/roles.h"
#include "protocol/partition.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// A box of weights: the rows that both math warpgroups multiply with one instruction each. Tasks
// have one box or several.
inline constexpr int kTileRows = kInstructionRows * kMathGroups;
// A stage holds so many bytes of each weight row and of each token.
inline constexpr int kStageRowBytes = kSwizzleRowBytes;
inline constexpr std::uint32_t kBoxBytes = kTileRows * kStageRowBytes;
// Rows of gate, then rows of up, where a gated FFN's first matrices are interleaved.
inline constexpr int kRowGroup = 8;
// Tokens come into the ring in units of so many rows.
inline constexpr std::uint32_t kUnitRows = 16;

// What takes the rows of the matrix instruction; the other takes its columns.
enum class Orientation : std::uint8_t {
  kWeightMajor,  // a thread has two weight rows of many tokens
  kTokenMajor    // a thread has two tokens of many weight rows
};

struct TileConfig {
  int weight_rows;                 // of a block's task
  protocol::TileShape token_rows;  // of a tile
  int stages;                      // of the ring, at most
  Orientation orientation;
  int cluster;          // blocks that may do a task together
  int most_log2_split;  // the second GEMM's K may be cut in 1 << this parts

  constexpr int boxes() const { return weight_rows / kTileRows; }
  constexpr int max_height() const { return token_rows.max_height; }
};

// Weights and tokens have element types of their own. Scales, in fp32, are shared by scale_group
// columns, and for weights by as many rows; 0: there are none.
struct Numerics {
  DType weight, token;
  int scale_group;

  constexpr bool scaled() const { return scale_group != 0; }
  constexpr int weight_bytes() const { return static_cast<int>(size_of(weight)); }
  constexpr int token_bytes() const { return static_cast<int>(size_of(token)); }
  // Columns of a stage. The types differ one day in how many bytes of weights that takes.
  constexpr int stage_columns() const { return kStageRowBytes / token_bytes(); }
};

// What follows from a configuration. The functions of this room take it as a type C with
//   TileConfig kTile, Numerics kNumerics
//   TokenSource kTokens   how tokens come into the ring
//   int kSlotRows         rows of a slot for a tile of tokens, at least kTile.max_height()
//   int kStagedTokens     tokens that a math warpgroup turns from weight rows into rows at a time
// The layer's policies are such types, with more in them.
template <typename C>
inline constexpr int kBoxes = C::kTile.boxes();
template <typename C>
inline constexpr std::uint32_t kMaxHeight = static_cast<std::uint32_t>(C::kTile.max_height());
template <typename C>
inline constexpr bool kScaled = C::kNumerics.scaled();
template <typename C>
inline constexpr bool kTokenMajor = C::kTile.orientation == Orientation::kTokenMajor;
template <typename C>
inline constexpr std::uint32_t kStageColumns =
    static_cast<std::uint32_t>(C::kNumerics.stage_columns());
// A pair's blocks may have a tile each and the same weights: each then loads half of the boxes.
template <typename C>
inline constexpr bool kPairsTiles = C::kTile.cluster == 2 && kBoxes<C> == 2;

// Stages whose tokens are written by ordinary copies; see TokenSource.
template <typename C>
inline constexpr bool kGathers = C::kTokens == TokenSource::kGathered;

// Token-major tiles have, with each stage, the products of its tokens' scales with those of its
// weights, which are two: of gate and up, or of the first 128 rows and the next. Weight-major tiles
// have both kinds of scales as they are.
template <typename C>
inline constexpr bool kJoinedScales = kScaled<C>&& kTokenMajor<C>;
// A weight-major warp has few columns of a token, so codes of h are made when several warps have
// stored theirs. A token-major one makes them in its epilogue.
template <typename C>
inline constexpr bool kQuantizesStoredRows = kScaled<C> && !kTokenMajor<C>;
// Floats of a stage: the weights' four (see FfnParams::gemm1_scales) and one for each token; or two
// for each token.
inline constexpr std::uint32_t kWeightScales = 4, kScaleSets = 2;

// What a stage of the ring holds; see pipeline/ring.cuh. It has room for tiles of at most `height`
// tokens; where math warps are short of registers, for the highest, so that they know its size when
// they are compiled.
template <typename C>
struct StageLayout {
  static constexpr bool kFixed = kJoinedScales<C>;
  static constexpr std::uint32_t kTokensAt = kBoxes<C> * kBoxBytes;
  static constexpr std::uint32_t bytes(std::uint32_t height) {
    return kTokensAt + (kFixed ? kMaxHeight<C> : height) * kStageRowBytes;
  }
  static constexpr std::uint32_t count(std::uint32_t height) {
    constexpr auto kMost = static_cast<std::uint32_t>(C::kTile.stages);
    static_assert(kMost <= kMaxStages);
    const std::uint32_t fit = kRingBytes / bytes(height);
    return fit < kMost ? fit : kMost;
  }
  static constexpr std::uint32_t kStages = count(0), kStageBytes = bytes(0);
  static constexpr std::uint32_t kTokenScalesAt = kWeightScales * sizeof(float);
  static constexpr std::uint32_t kScaleSetBytes = kMaxHeight<C> * sizeof(float);
  static constexpr std::uint32_t kScaleBytes = !kScaled<C>        ? 0
                                               : kJoinedScales<C> ? kScaleSets * kScaleSetBytes
                                                                  : kTokenScalesAt + kScaleSetBytes;
};

}  // namespace switchyard::gpu
