// The choice of a grouped GEMM's configuration by the rows of each expert, for the kernel that
// makes it (choose.cuh), for the host, and for tests without a GPU. It is tuner::select() of a
// table, with the heights of tiles taken out of the candidates: many candidates share a height.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "base/host_device.h"
#include "protocol/partition.h"

namespace switchyard::gpu {

// How a call's work is cut. A configuration decides this, apart from what the launch fixes.
struct GroupedCut {
  protocol::TileShape tile;
  std::uint32_t most_stages;
  std::uint32_t band;  // see GroupedSchedule
  std::uint32_t log2_splits;
};

// Returns the shape of tiles of at most half the rows.
SWITCHYARD_HOST_DEVICE constexpr protocol::TileShape half_as_high(protocol::TileShape shape) {
  const int height = shape.max_height / 2;
  return {height, shape.granule < height ? shape.granule : height, shape.least};
}
// The rule for token-major tiles of blocks that stand alone: half as high where every task still
// finds a block at once. A call then takes as long as its longest task, which is half as long. (On
// an H200, 27 points of RaMP's models in FP8 with experts of more than 64 rows: 21 to 35 % less;
// with a second wave it would be 5 to 19 % more.)
SWITCHYARD_HOST_DEVICE constexpr bool takes_half(std::uint32_t tiles_of_half,
                                                 std::uint32_t tasks_of_tile,
                                                 std::uint32_t blocks) {
  return tiles_of_half <= blocks / tasks_of_tile;
}

// A lane keeps the tiles of its experts for every height in a register.
inline constexpr std::uint32_t kMostHeights = 16;

// Division by a height, as a multiplication: exact below 2^32 / height rows of an expert, which are
// 2^24 for the highest tiles; of more rows there may be a tile too many.
struct TileHeights {
  std::uint32_t rows[kMostHeights];
  std::uint32_t reciprocals[kMostHeights];  // 2^32 / rows, rounded up

  static constexpr std::uint32_t reciprocal_of(std::uint32_t height) {
    return static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + height - 1) / height);
  }
  // ceil(expert_rows / rows[i]). Unused heights have a reciprocal of 0, and no tiles.
  SWITCHYARD_HOST_DEVICE constexpr std::uint32_t tiles(std::uint32_t i,
                                                       std::uint32_t expert_rows) const {
    return static_cast<std::uint32_t>(std::uint64_t{expert_rows + rows[i] - 1} * reciprocals[i] >>
                                      32);
  }
};

// A configuration of the table: 48 bytes, which are three loads.
struct alignas(16) Candidate {
  float a, b, c, d;             // of the cost model
  std::uint32_t height;         // an index in TileHeights
  std::uint32_t tasks_of_tile;  // blocks of weight rows * splits * blocks of a task
  std::uint32_t entry;          // its number in the table
  std::uint32_t band;
  std::uint16_t max_height, granule, least;  // of the tile
  std::uint16_t most_stages, log2_splits;
  std::uint16_t padding[3];

  SWITCHYARD_HOST_DEVICE constexpr GroupedCut cut() const {
    return {{max_height, granule, least}, most_stages, band, log2_splits};
  }
};
static_assert(sizeof(Candidate) == 48);

// Parameters that all candidates of a table share.
struct ChoiceRule {
  TileHeights heights;
  std::uint32_t num_sms;
  bool rounded_waves, of_experts;  // see tuner::Form
};

// The work that the experts' rows make for a candidate.
struct ExpertWork {
  std::uint32_t tiles;    // of its height
  std::uint32_t experts;  // that have rows
  std::uint32_t highest;  // rows of the highest tile
};

// Predicts the time of a candidate. It computes in float, in the order of tuner::select() and
// without fusing, so that host and device agree (but for the logarithm's last bit).
SWITCHYARD_HOST_DEVICE inline float predicted_us(const Candidate& candidate, const ExpertWork& work,
                                                 const ChoiceRule& rule) {
  const std::uint32_t grid = work.tiles * candidate.tasks_of_tile;
  const float waves = rule.rounded_waves
                          ? static_cast<float>(protocol::ceil_div(grid, rule.num_sms))
                          : static_cast<float>(grid) / static_cast<float>(rule.num_sms);
  const auto tasks =
      static_cast<float>(rule.of_experts ? work.experts * candidate.tasks_of_tile : grid);
#if defined(__CUDA_ARCH__)
  const float linear = __fadd_rn(__fadd_rn(candidate.a, __fmul_rn(candidate.b, waves)),
                                 __fmul_rn(candidate.c, tasks));
  if (candidate.d == 0) return linear;
  const float last = rule.of_experts ? static_cast<float>(work.highest) : logf(tasks + 1);
  return __fadd_rn(linear, __fmul_rn(candidate.d, last));
#else
  const float last = rule.of_experts ? static_cast<float>(work.highest) : std::log(tasks + 1);
  return candidate.a + candidate.b * waves + candidate.c * tasks + candidate.d * last;
#endif
}

// True if a time is to be chosen over another. Ties go to the table's earlier entry.
SWITCHYARD_HOST_DEVICE constexpr bool is_better(float time, std::uint32_t entry, float than_time,
                                                std::uint32_t than_entry) {
  return time < than_time || (time == than_time && entry < than_entry);
}

// Returns the best of one or more candidates.
inline const Candidate& choose(std::span<const Candidate> candidates, const ChoiceRule& rule,
                               std::span<const std::uint32_t> expert_rows) {
  std::uint32_t tiles[kMostHeights] = {}, experts = 0, most = 0;
  for (const std::uint32_t rows : expert_rows) {
    if (rows != 0) ++experts;
    most = most < rows ? rows : most;
    for (std::uint32_t h = 0; h < kMostHeights; ++h) tiles[h] += rule.heights.tiles(h, rows);
  }
  const Candidate* best = nullptr;
  float least = 0;
  for (const Candidate& candidate : candidates) {
    const std::uint32_t height = rule.heights.rows[candidate.height];
    const ExpertWork work{tiles[candidate.height], experts, most < height ? most : height};
    const float time = predicted_us(candidate, work, rule);
    if (best != nullptr && !is_better(time, candidate.entry, least, best->entry)) continue;
    best = &candidate;
    least = time;
  }
  return *best;
}

}  // namespace switchyard::gpu
