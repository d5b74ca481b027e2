// The rules of the schedule: what a pass does unless the caller chooses otherwise
// (switchyard/schedule.h). Each is a function of numbers, for the host, for kernels, and for tests
// without a GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/host_device.h"
#include "gpu/route/limits.h"
#include "gpu/schedule/params.h"
#include "protocol/partition.h"
#include "switchyard/schedule.h"

namespace switchyard::gpu {

// --- The choice of a pass's launch.

enum class Launch : std::uint8_t { kSmall, kSmallLow, kLow, kTallLow, kSingle, kPaired };

constexpr bool is_low(Launch launch) {
  return launch == Launch::kSmallLow || launch == Launch::kLow || launch == Launch::kTallLow;
}

struct LaunchFacts {
  std::int64_t tokens;  // of this rank
  int num_experts, top_k, num_ranks;
  int small_tokens,
      small_logits;  // the policy's; with more logits, routing takes every block too long
  bool pairs_fit;    // at least one pair of blocks is resident
  // The most tokens of any rank: over ranks what all have promised. Empty: the kernels for low
  // passes do not take the call.
  std::optional<std::int64_t> low_tokens;
  bool small_low = true;         // there is a kernel for small low passes
  int tall_rows = kTallLowRows;  // the most of the higher tiles of low passes
};

// Two blocks that share the tokens of a tile read a third less from the L2 cache. Below about so
// many rows per expert that saves less than the 2 us that a launch of clusters costs.
inline constexpr int kPairedRows = 96;

// The most rows per expert of a pass whose tiles have up to kLowRows, over all ranks. Beyond,
// experts have so many tiles that higher ones take less time. The same holds beyond 26 rows of low
// passes whose higher tiles have up to 32, and beyond as many times more of higher ones.
inline constexpr int kLowRowsPerExpert = 11;
constexpr int low_rows_per_expert(int tall_rows) { return 26 * tall_rows / kTallLowRows; }
// The fewest tokens of a low pass that would be small, where no kernel is for both. (On H200s, low
// passes of 16 tokens over two GPUs, each of which reads about as many weights as one GPU for 8,
// took 0.57 to 0.75 of the time of small ones for 8.)
inline constexpr int kLowTokens = 4;
// The most rows of any low pass.
constexpr std::int64_t most_low_rows(const Schedule& asked, int tall_rows, int num_experts) {
  return std::int64_t{asked.low_rows.value_or(low_rows_per_expert(tall_rows))} * num_experts;
}
// The most rows that a low pass may have on this rank: another one may break its promise.
constexpr std::int64_t low_rows_here(const Schedule& asked, int tall_rows, int num_experts,
                                     int num_ranks) {
  const std::int64_t most = most_low_rows(asked, tall_rows, num_experts);
  return num_ranks == 1 || most == 0 ? most : std::numeric_limits<std::int64_t>::max();
}

constexpr Launch choose_launch(const Schedule& asked, const LaunchFacts& facts) {
  // Passes of several ranks are never small: the kernel is compiled for one.
  const bool small =
      facts.num_ranks == 1 && facts.tokens * facts.top_k <= kMaxOwnSlots &&
      (asked.small_tokens ? facts.tokens <= *asked.small_tokens
                          : facts.tokens <= facts.small_tokens &&
                                facts.tokens * facts.num_experts <= facts.small_logits);
  if (facts.low_tokens) {
    const std::int64_t rows = *facts.low_tokens * facts.num_ranks * facts.top_k;
    const bool low = rows <= std::int64_t{kLowRowsPerExpert} * facts.num_experts;
    if (rows <= most_low_rows(asked, facts.tall_rows, facts.num_experts)) {
      if (small && facts.small_low && (low || asked.low_rows)) return Launch::kSmallLow;
      const bool stays_small =
          facts.small_low || asked.small_tokens || asked.splits || facts.tokens < kLowTokens;
      if (!small || !stays_small) return low ? Launch::kLow : Launch::kTallLow;
    }
  }
  if (small) return Launch::kSmall;
  const int paired_rows = asked.paired_rows.value_or(kPairedRows);
  // (The host does not know other ranks' tokens and assumes as many as its own.)
  const std::int64_t rows = facts.tokens * facts.num_ranks * facts.top_k;
  const bool many = paired_rows >= 0 && rows >= std::int64_t{paired_rows} * facts.num_experts;
  return many && facts.pairs_fit ? Launch::kPaired : Launch::kSingle;
}

// --- The rounds of a pass; see RoundState.

struct RoundFacts {
  std::int64_t tokens;  // of this rank
  int num_experts, top_k, num_ranks;
  double weight_bytes;  // that this rank reads in a pass
  double products;      // of its rows in all GEMMs, if ranks have equal shares
  bool fp8;             // products of FP8, twice as fast
};

// The time that a second round costs if the late rank turns out to be hardly late: weights are read
// once more, as far as that is not hidden behind products, and the kernel drains and fills once
// more. This takes longer, the longer the tasks are: about a sixth of a pass was measured, see
// docs/lab/ranks-and-arrivals.md. Waiting as long as the mistake costs is never worse than twice
// the best.
constexpr double patience_ns(const RoundFacts& facts) {
  constexpr double kBetweenNs = 20'000;
  constexpr double kBytesPerNs = 4000;
  constexpr double kProductsPerNs = 325'000;  // of bf16
  constexpr double kShareOfPass = 1.0 / 6;
  // With so many rows per expert, products take as long as reading its weights.
  constexpr double kBalancedRows = 200;
  // (The host does not know other ranks' tokens and assumes as many as its own.)
  const double rows = static_cast<double>(facts.tokens) * facts.num_ranks * facts.top_k /
                      std::max(1, facts.num_experts);
  // The readings of weights that it adds: two rounds of half the rows, and one of all, each take at
  // least one.
  const double more = std::clamp(2 - rows / kBalancedRows, 0.0, 1.0);
  const double pass_ns = facts.products / (kProductsPerNs * (facts.fp8 ? 2 : 1));
  return kBetweenNs + more * facts.weight_bytes / kBytesPerNs + kShareOfPass * pass_ns;
}

// Passes of fewer tokens wait for all ranks, unless the caller gives a patience: most of their time
// is reading weights.
inline constexpr std::int64_t kLeastTokensOfRounds = 2048;
inline constexpr std::uint64_t kWaitsForAll = ~std::uint64_t{0};  // the patience of such a pass

// Chooses the sources whose rows a pass takes up in its first round, a bit for each rank; 0: it
// waits on. `here`: ranks whose counts are here. `ahead`: ranks that compute without having waited
// for this one, so that their rows come before all others. `patient`: there is time to wait.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t first_sources(std::uint32_t all, std::uint32_t here,
                                                             std::uint32_t ahead, bool patient) {
  if (ahead != 0) return ahead;
  return here == all || !patient ? here : 0;
}

// --- The order of tiles.

// GEMM2 of a tile is taken up two rounds of all blocks after its GEMM1 was handed out. This was
// measured against 0.6, 1, 1.25 and 3 rounds; see docs/decisions/0013. Where a tile's h is made
// into codes when all of it is stored, it is six: of gpt-oss-20b with 1024 tokens, passes with 2,
// 3, 4, 5 and 6.5 took 385, 377, 363, 354 and 344 us on an H200.
inline constexpr std::uint32_t kRounds = 2, kRoundsWithCodes = 6;

struct OrderFacts {
  std::uint32_t blocks;            // of the launch
  std::uint32_t gemm1_rows;        // weight rows, of the FFN that has fewer
  std::uint32_t task_rows;         // weight rows of a block's task
  std::uint32_t tile_height;       // token rows of the highest tile
  std::uint32_t least_band_rows;   // with fewer weight rows a band is not worth it
  std::uint32_t gemm2_stages;      // stages of GEMM2's K, of the FFN that has fewer; at least 1
  std::uint32_t rounds = kRounds;  // of all blocks, between a tile's GEMM1 and its GEMM2
};

constexpr TileOrder choose_order(const Schedule& asked, const OrderFacts& facts) {
  const std::uint32_t tasks = std::max(1u, protocol::ceil_div(facts.gemm1_rows, facts.task_rows));
  const std::uint32_t between = facts.rounds * facts.blocks;
  // The token rows of a band. Where a tile is work for many blocks, the tiles of so many rows of an
  // expert share the weights that they read.
  constexpr std::uint32_t kBandRows = 2048;
  const std::uint32_t band = asked.band ? static_cast<std::uint32_t>(*asked.band)
                             : facts.gemm1_rows < facts.least_band_rows
                                 ? 1
                                 : kBandRows / facts.tile_height;
  TileOrder order{};
  order.log2_band = static_cast<std::uint32_t>(std::countr_zero(band));
  order.lag =
      asked.lag ? static_cast<std::uint32_t>(*asked.lag) : protocol::ceil_div(between, tasks) + 1;
  if (asked.splits) {
    // A part without a stage would never be asked for.
    const std::uint32_t splits =
        std::min(static_cast<std::uint32_t>(*asked.splits), std::bit_floor(facts.gemm2_stages));
    order.forced_splits = 1 + static_cast<std::uint32_t>(std::countr_zero(splits));
  }
  order.banded_lag = asked.lag || band == 1 ? order.lag : protocol::ceil_div(between, band * tasks);
  return order;
}

// The number of slots for tiles of h. A tile's h is needed from its GEMM1 to its GEMM2. No block
// waits for a slot if there are slots for twice the lag, or for one band more than those between.
constexpr std::uint64_t h_slots(const TileOrder& order, std::uint64_t tiles) {
  const std::uint64_t single = 2 * std::uint64_t{order.lag} + 2;
  const std::uint64_t banded = (std::uint64_t{order.banded_lag} + 2) << order.log2_band;
  return std::min(tiles, std::max(single, banded));
}

// --- How a pass is cut. The device decides this once it knows its tiles.

// log2 of the parts of GEMM2's K. If a small pass has fewer GEMM2 tasks than blocks, K is split
// into as many parts as give every block a task, none shorter than `fewest` columns. A part is no
// longer than so many columns either: the tasks of Mixtral's 14,336 columns end so far apart that
// blocks wait for the last (docs/lab/where-time-goes.md).
inline constexpr int kLongestPart = 8192;
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t log2_splits(const TileOrder& order,
                                                           std::uint32_t tasks, int depth,
                                                           int fewest, std::uint32_t most) {
  if (order.forced_splits != 0) return order.forced_splits - 1;
  std::uint32_t log2 = 0;
  while (log2 < most && ((tasks << (log2 + 1) <= kNominalBlocks && depth >> (log2 + 1) >= fewest) ||
                         depth >> log2 > kLongestPart)) {
    ++log2;
  }
  return log2;
}

// log2 of the tokens of one combine task: as many as give every block one task, but no more than
// one for each math warp.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t log2_combine_chunk(std::uint32_t tokens,
                                                                  std::uint32_t blocks,
                                                                  std::uint32_t warps) {
  std::uint32_t log2 = 0;
  while (1u << log2 < warps && blocks << log2 < tokens) ++log2;
  return log2;
}

}  // namespace switchyard::gpu
