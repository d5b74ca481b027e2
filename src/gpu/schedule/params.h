// Which experts, tiles and tasks a rank has.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kMaxDeviceRanks = 32;  // see ExpertSource

// Which of the host's two launches a kernel is for. Small passes have at most a policy's
// kSmallTokens and kSmallLogits; with more logits every block's routing takes longer than the
// barrier that it saves. How many that are is measured, see docs/decisions/0020.
enum class PassSize { kSmall, kLarge };
// Who tells other blocks that a block has stored its part of a tile. Telling means to wait until
// all of it has reached the L2 cache, 1 us.
enum class Teller {
  kScheduler,  // while the math warps are at the next tile
  kMath        // each for itself, at once: for passes in which another block waits for it
};

struct PartitionParams {
  // This rank's experts, which are numbered from 0 in weights and tasks.
  int first_expert, local_experts;
  int rank_begin[kMaxDeviceRanks + 1];  // each rank's first expert
  std::uint32_t levels;                 // the most experts that a rank has; 1 for one rank
};

// The order of tasks; see protocol::Workload, and rules.h for how it is chosen.
struct TileOrder {
  std::uint32_t log2_band;      // of tiles taken up together where experts have several
  std::uint32_t banded_lag;     // then
  std::uint32_t lag;            // where no expert has more than one tile
  std::uint32_t forced_splits;  // of GEMM2's K in small passes: 0, or 1 + their log2
};

struct ScheduleParams {
  std::uint32_t max_tiles;
  TileOrder order;
};

}  // namespace switchyard::gpu
