// The rules of the schedule, each a function of numbers: what a pass does unless the caller says
// otherwise (switchyard/schedule.h). For the host, for kernels, and for tests without a GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/host_device.h"
#include "gpu/route/limits.h"
#include "gpu/schedule/params.h"
#include "protocol/partition.h"
#include "switchyard/schedule.h"

namespace switchyard::gpu {

// --- Which launch a pass has.

enum class Launch : std::uint8_t { kSmall, kSingle, kPaired };

struct LaunchFacts {
  std::int64_t tokens;  // of this rank
  int num_experts, top_k, num_ranks;
  int small_tokens, small_logits;  // the policy's; more logits take every block too long to route
  bool pairs_fit;                  // at least one pair of blocks is resident
};

// Two blocks that share the tokens of a tile read a third less from the L2 cache. Below about so
// many rows per expert, that does not make up for what a launch of clusters costs: 2 us.
inline constexpr int kPairedRows = 96;

constexpr Launch choose_launch(const Schedule& asked, const LaunchFacts& facts) {
  // What is small here may be large on another rank, and all must cut the same tiles.
  const bool small =
      facts.num_ranks == 1 && facts.tokens * facts.top_k <= kMaxOwnSlots &&
      (asked.small_tokens ? facts.tokens <= *asked.small_tokens
                          : facts.tokens <= facts.small_tokens &&
                                facts.tokens * facts.num_experts <= facts.small_logits);
  if (small) return Launch::kSmall;
  const int paired_rows = asked.paired_rows.value_or(kPairedRows);
  // (Of other ranks' tokens the host knows nothing, and takes them to be as many.)
  const std::int64_t rows = facts.tokens * facts.num_ranks * facts.top_k;
  const bool many = paired_rows >= 0 && rows >= std::int64_t{paired_rows} * facts.num_experts;
  return many && facts.pairs_fit ? Launch::kPaired : Launch::kSingle;
}

// --- In which order tiles are taken up.

struct OrderFacts {
  std::uint32_t blocks;           // of the launch
  std::uint32_t gemm1_rows;       // of weights: of the FFN that has fewer
  std::uint32_t task_rows;        // of weights, of a block's task
  std::uint32_t tile_height;      // rows of the highest tile
  std::uint32_t least_band_rows;  // fewer rows of weights are not worth a band
};

constexpr TileOrder choose_order(const Schedule& asked, const OrderFacts& facts) {
  const std::uint32_t tasks = std::max(1u, protocol::ceil_div(facts.gemm1_rows, facts.task_rows));
  // GEMM2 of a tile is taken up when its GEMM1 was handed out two rounds of all blocks ago:
  // measured against 0.6, 1, 1.25 and 3 rounds; see docs/decisions/0013.
  const std::uint32_t round = 2 * facts.blocks;
  // Where a tile is work for many blocks, the tiles of so many rows of an expert share the weights
  // that they read.
  constexpr std::uint32_t kBandRows = 2048;
  const std::uint32_t band = asked.band ? static_cast<std::uint32_t>(*asked.band)
                             : facts.gemm1_rows < facts.least_band_rows
                                 ? 1
                                 : kBandRows / facts.tile_height;
  TileOrder order{};
  order.log2_band = static_cast<std::uint32_t>(std::countr_zero(band));
  order.lag =
      asked.lag ? static_cast<std::uint32_t>(*asked.lag) : protocol::ceil_div(round, tasks) + 1;
  if (asked.splits) {
    order.forced_splits = 1 + std::countr_zero(static_cast<unsigned>(*asked.splits));
  }
  order.banded_lag = asked.lag || band == 1 ? order.lag : protocol::ceil_div(round, band * tasks);
  return order;
}

// Slots for tiles of h. A tile's h is needed from its GEMM1 to its GEMM2. Nobody waits for it with
// slots for twice the lag, or for one band more than those between.
constexpr std::uint64_t h_slots(const TileOrder& order, std::uint64_t tiles) {
  const std::uint64_t single = 2 * std::uint64_t{order.lag} + 2;
  const std::uint64_t banded = (std::uint64_t{order.banded_lag} + 2) << order.log2_band;
  return std::min(tiles, std::max(single, banded));
}

// --- How a pass is cut, which the device finds when it knows its tiles.

// The parts of GEMM2's K. Where there are fewer of its tasks than blocks, in a small pass, it is
// split into as many as give every block one, none shorter than `fewest` columns.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t log2_splits(const TileOrder& order,
                                                           std::uint32_t tasks, int depth,
                                                           int fewest, std::uint32_t most) {
  if (order.forced_splits != 0) return order.forced_splits - 1;
  std::uint32_t log2 = 0;
  while (log2 < most && tasks << (log2 + 1) <= kNominalBlocks && depth >> (log2 + 1) >= fewest) {
    ++log2;
  }
  return log2;
}

// The tokens of one combine task: as many as give every block one task, but no more than one for
// each math warp.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t log2_combine_chunk(std::uint32_t tokens,
                                                                  std::uint32_t blocks,
                                                                  std::uint32_t warps) {
  std::uint32_t log2 = 0;
  while (1u << log2 < warps && blocks << log2 < tokens) ++log2;
  return log2;
}

}  // namespace switchyard::gpu
