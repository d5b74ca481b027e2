// How a pass orders and cuts its work. By default a layer follows rules that were measured on H100
// and H200. A value given here replaces a rule; tuners use that, and tests that force every choice.
// No choice changes the mathematical result. Only `splits` change the order of summation.
#pragma once

#include <optional>

namespace switchyard {

struct Schedule {
  // The most tokens of a small pass. In its kernel every block routes all tokens for itself, and
  // tasks are the smallest. At most kMostSmallTokens. The rule: 32 tokens, and 6144 logits in bf16
  // or 3072 in FP8; with MXFP4 times FP8, where a pass may be low, 3 tokens if `splits` is empty,
  // too. (Passes of several ranks, and those of more than 512 slots, are never small.) 0: none is.
  // Nor does a pass run the kernel for few tokens then, on one GPU or over ranks.
  std::optional<int> small_tokens{};
  // The fewest rows per expert, on average, at which blocks work in pairs that share a task's
  // tokens. 0: in all passes that are not small; -1: in none. The rule: 96.
  std::optional<int> paired_rows{};
  // The most rows per expert, on average, of a low pass: its tiles have at most 16 or 32 rows (80
  // of tokens in FP8), and two blocks share a multiprocessor. For weights of four bits, over ranks
  // with a promise (ForwardInput::max_tokens_per_rank), in layers that reserve no multiprocessors,
  // have no capacity, at most 512 places of experts and no traces. Where the call does not give the
  // routing, a launch before the pass finds it. 0: none is. The rule: 26, or 65 of tokens in FP8.
  std::optional<int> low_rows{};
  // The second GEMM of a tile (or band of tiles) is handed out after the first GEMM of the tile
  // (band) that stands `lag` places later. At least 1. The rule: two rounds of all blocks, or
  // six with MXFP4 times FP8.
  std::optional<int> lag{};
  // The tiles of an expert that are taken up together and share the weights they read, where
  // experts have several tiles: 1, or a power of two up to 64. The rule: the tiles of 2048 rows, if
  // a tile's first GEMM has 4096 rows of weights or more.
  std::optional<int> band{};
  // The parts that K of the second GEMM is cut into in small passes: 1, 2 or 4. Each part is summed
  // by itself and rounded to bf16. Where K is so short that a part would have no stage of the ring
  // (64 columns in bf16, 128 in FP8), there are fewer. The rule: as many as give every block a
  // task, and no part longer than 8192 columns.
  std::optional<int> splits{};

  bool operator==(const Schedule&) const = default;
};

// The same for a grouped GEMM on a GPU.
struct GroupedSchedule {
  // The most token rows of a tile: a multiple of 16, up to 256 in bf16 and up to 224 with four-bit
  // weights, whose tiles have 16 or a multiple of 32; 64 or 128 of FP8 weights. An expert's rows
  // are cut into tiles of about the same height. The rule: the most. Of FP8 weights 128, or 64
  // where blocks stand alone and all tasks then find a block at once.
  std::optional<int> tile_rows{};
  // The most stages of 64 columns (bf16; 128 of tokens in FP8) of a tile's weights and tokens that
  // a block has in shared memory at a time: 2 to 12. Fewer if they do not fit: 4 of tiles of 256
  // rows. Not of FP8 weights, where there are always 4. The rule: 12.
  std::optional<int> stages{};
  // Whether blocks work in pairs, on twice the weight rows of one tile (of FP8 weights on two
  // tiles), and load tokens once for both. The rule: from 96 rows per expert on, on average.
  std::optional<bool> paired{};
  // The tiles of an expert that are multiplied with one block of weight rows before the next block
  // has its turn: 1 or more. The rule: all of them.
  std::optional<int> band{};
  // The parts that K is cut into: 1, 2, 4 or 8; fewer if a part would have no stage. They are
  // summed in fp32, in their order. Tiles not of FP8 weights then have at most 64 rows, and calls
  // need memory for splits x rows x N sums, which the operator keeps. The rule: 1.
  std::optional<int> splits{};

  bool operator==(const GroupedSchedule&) const = default;
};
inline constexpr int kMostGroupedSplits = 8;

inline constexpr int kMostSmallTokens = 32, kMostLag = 1 << 20, kMostBand = 64, kMostSplits = 4;

}  // namespace switchyard
