// Words in device memory that the blocks of one GPU count in.
#pragma once

#include <cstdint>

#include "protocol/partition.h"

namespace switchyard::gpu {

// Barriers of all blocks, in the order in which a pass comes to them.
enum GridBarrier : std::uint32_t { kConverted, kLogitsReady, kSlotsCounted, kListsReady };

// There are two sets of words, for even and odd passes: a pass counts in one and clears the other
// for its successor, so no word is reset while a block may still read it.
struct PassWords {
  std::uint32_t* words;

  // Layout: the next tasks of both rounds, the choice of the first, grid barriers, counters, then
  // arrays.
  static constexpr std::uint32_t kBarriers = 4;
  SWITCHYARD_HOST_DEVICE std::uint32_t* next_task(std::uint32_t round = 0) const {
    return words + round;
  }
  // The sources of the first round, a bit for each rank; 0: not chosen yet. See RoundState.
  SWITCHYARD_HOST_DEVICE std::uint32_t* first_sources() const { return words + 2; }
  // Each barrier has a line of its own, because all blocks poll it.
  SWITCHYARD_HOST_DEVICE std::uint32_t* barrier(std::uint32_t i) const {
    return words + 32 * (1 + i);
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* counters() const { return words + 32 * (1 + kBarriers); }
  SWITCHYARD_HOST_DEVICE std::uint32_t* expert_rows() const { return counters() + 32; }
  SWITCHYARD_HOST_DEVICE std::uint32_t* gemm1_done(std::uint32_t num_experts) const {
    return expert_rows() + num_experts;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* gemm2_done(std::uint32_t num_experts,
                                                   std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + max_tiles;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* packed(std::uint32_t num_experts,
                                               std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + 2 * max_tiles;
  }
  // For each expert of another rank: how much of its rows has been sent.
  SWITCHYARD_HOST_DEVICE std::uint32_t* sent(std::uint32_t num_experts,
                                             std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + 3 * max_tiles;
  }
  // Each tile has words with four bits for every group of columns of h.
  static constexpr std::uint32_t kGroupsOfWord = 8;
  SWITCHYARD_HOST_DEVICE std::uint32_t* parts_stored(std::uint32_t num_experts,
                                                     std::uint32_t max_tiles) const {
    return sent(num_experts, max_tiles) + num_experts;
  }
  SWITCHYARD_HOST_DEVICE static constexpr std::uint32_t count(std::uint32_t num_experts,
                                                              std::uint32_t max_tiles,
                                                              std::uint32_t group_words) {
    return protocol::round_up(
        32 * (2 + kBarriers) + 2 * num_experts + (3 + group_words) * max_tiles, 32u);
  }
};

// The counters of a pass's statistics. All but the first four concern traffic with other ranks. The
// last two count bytes, of passes of few tokens.
enum PassCounter : std::uint32_t {
  kNanLogits,
  kNanTokens,
  kBadSlots,
  kDroppedSlots,
  kSentTokens,
  kSentRows,
  kReturnedRows,
  kRaisedFlags,
  kDispatchBytes,
  kCombineBytes,
  kNumPassCounters
};

}  // namespace switchyard::gpu
