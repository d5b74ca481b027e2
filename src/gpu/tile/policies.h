// The tiles of this chip for each type of operands: what the layer's kernels and GroupedGemm's
// share.
#pragma once

#include "gpu/pipeline/roles.h"
#include "gpu/tile/config.h"

namespace switchyard::gpu {

struct PackedTiles {
  static constexpr TokenSource kTokens = TokenSource::kPacked;
  // The number of stages that must be free before their weights are requested together. It must be
  // less than the ring has: math warps release a stage only when they have issued the products of
  // the next.
  static constexpr std::uint32_t kStagesTogether = 1;
  // The number of tokens that a math warpgroup transposes from its 64 weight rows into rows of
  // tokens at a time.
  static constexpr int kStagedTokens = 16;
};

// A weight-major tile of 16 to `most` tokens.
constexpr TileConfig weight_major_tile(int most, int stages = kUsualStages) {
  return {.weight_rows = kTileRows,
          .token_rows = {most, 32, 16},
          .stages = stages,
          .orientation = Orientation::kWeightMajor,
          .cluster = kPair,
          .most_log2_split = 0};
}

struct BF16Tiles : PackedTiles {
  static constexpr Numerics kNumerics = Numerics::stored_as(DType::kBF16);
  static constexpr TileConfig kTile = weight_major_tile(256);
  static constexpr int kSlotRows = kTile.max_height();
  static constexpr RoleRegisters kRegisters{.loading = 88, .math = 208};
};

// The same tiles in fp16: the matrix instruction takes other operands, at the same rate. Its sums
// are fp32, and so is everything behind it, up to the output.
struct F16Tiles : BF16Tiles {
  static constexpr Numerics kNumerics = Numerics::stored_as(DType::kF16);
};

// Weights of four bits times tokens in bf16: the weights come to the matrix instruction through
// registers, which leaves GroupedGemm's epilogues room for the sums of 224 tokens.
template <DType kStored>
struct FourBitTiles : BF16Tiles {
  static constexpr Numerics kNumerics{{kStored, DType::kBF16, 32}, {DType::kBF16, DType::kBF16, 0}};
  static constexpr TileConfig kTile = weight_major_tile(224);
  static constexpr int kSlotRows = kTile.max_height();
};
using MXFP4Tiles = FourBitTiles<DType::kF4E2M1>;
using INT4Tiles = FourBitTiles<DType::kU4>;

// Weights of four bits that become E5M2, times tokens in E4M3 with a scale for each row. The matrix
// unit sums all products of a tile, so there is one sum, and tiles are as high as those of bf16.
struct MXFP4FP8Tiles : PackedTiles {
  static constexpr Numerics kNumerics{{DType::kF4E2M1, DType::kF8E4M3, 32},
                                      {DType::kF8E4M3, DType::kF8E4M3, kWholeRow}};
  // (The scales of more stages have no room.)
  static constexpr TileConfig kTile = weight_major_tile(256, 6);
  static constexpr int kSlotRows = kTile.max_height();
  static constexpr bool kTiesOperands = true;
  static constexpr RoleRegisters kRegisters{.loading = 72, .math = 216};
};

// Token-major tiles of 16 to 128 tokens and 256 weight rows, in E4M3 with scales: one for each
// 128 x 128 weights, one for each 128 columns of a token. A stage is 128 columns deep; the matrix
// unit sums its products, with few bits, and they are then summed in fp32. The second sum takes its
// own accumulators, so tiles have half as many tokens. They have twice as many weight rows, which
// for a gated FFN make 128 columns of h: the group that shares a scale.
struct FP8Tiles : PackedTiles {
  static constexpr Numerics kNumerics = Numerics::stored_as(DType::kF8E4M3, kQuantGroup);
  static constexpr TileConfig kTile{.weight_rows = 2 * kTileRows,
                                    .token_rows = {128, 128, 16},
                                    .stages = kUsualStages,
                                    .orientation = Orientation::kTokenMajor,
                                    .cluster = kPair,
                                    .most_log2_split = 0};
  static constexpr int kSlotRows = kTile.max_height();
  static constexpr RoleRegisters kRegisters{.loading = 72, .math = 216};
};

static_assert(suffice(BF16Tiles::kRegisters) && suffice(FP8Tiles::kRegisters),
              "the roles want more registers than the launch gives the block");

}  // namespace switchyard::gpu
