// How a pass orders and cuts its work. A layer chooses by rules that were measured on H100 and
// H200; what is given here takes a rule's place: for a tuner, and for tests that force every
// choice. No choice changes what is computed; only `splits` changes the order in which it is
// summed.
#pragma once

#include <optional>

namespace switchyard {

struct Schedule {
  // Passes of at most so many tokens have the kernel for few tokens, in which every block routes
  // all tokens for itself and its tasks are the smallest. 0: none; at most kMostSmallTokens. The
  // rule: 32 tokens, and 6144 logits in bf16 or 3072 in FP8. (Passes of several ranks, and those of
  // more than 512 slots, never have it.)
  std::optional<int> small_tokens;
  // From so many rows per expert on, on average, blocks come in pairs that share a task's tokens.
  // 0: in all passes that are not small; -1: in none. The rule: 96.
  std::optional<int> paired_rows;
  // The second GEMM of a tile, or of a band of tiles, is handed out when the first of the tile
  // (band) so many places later has been. At least 1. The rule: two rounds of all blocks.
  std::optional<int> lag;
  // Tiles of an expert that are taken up together and share the weights they read, where experts
  // have several: 1, or a power of two up to 64. The rule: those of 2048 rows, if a tile's first
  // GEMM has 4096 rows of weights or more.
  std::optional<int> band;
  // Parts that K of the second GEMM is cut into in small passes, each summed by itself and rounded
  // to bf16: 1, 2 or 4. The rule: as many as give every block a task.
  std::optional<int> splits;

  bool operator==(const Schedule&) const = default;
};

inline constexpr int kMostSmallTokens = 32, kMostLag = 1 << 20, kMostBand = 64, kMostSplits = 4;

}  // namespace switchyard
