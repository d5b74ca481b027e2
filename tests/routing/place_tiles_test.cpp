// The tiles of a pass, in one round and in two: as kernels place them, by an emulated warp, from
// counts in which the sources of the other round have no rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "routing/emulated_warp.h"
// After it: code for warps.
namespace switchyard::gpu {
inline std::uint32_t max(std::uint32_t a, std::uint32_t b) { return std::max(a, b); }
inline std::uint32_t min(std::uint32_t a, std::uint32_t b) { return std::min(a, b); }
struct EmulatedThread {
  std::uint32_t x;
};
}  // namespace switchyard::gpu
#define threadIdx (EmulatedThread{static_cast<std::uint32_t>(test::EmulatedWarp::lane())})
#include "gpu/layer/policy.h"
#include "gpu/schedule/tiles.cuh"

namespace switchyard::gpu {
namespace {

using Policy = BF16Policy;

// Rows of one source with each expert.
using Counts = std::vector<std::uint32_t>;

class Plan {
 public:
  Plan(int experts, int ranks, int rank) {
    const protocol::ExpertPartition partition{experts, ranks};
    shape_.num_experts = experts;
    partition_.first_expert = partition.begin(rank);
    partition_.local_experts = partition.count(rank);
    params_.order.log2_band = 3;
    rows_.resize(static_cast<std::size_t>(experts));
    tile_begin_.resize(rows_.size() + 1);
    row_begin_.resize(rows_.size());
    state_.round = {};
    state_.round.last = true;
  }
  TileTable<Policy> table() {
    return {
        shape_, partition_, params_, {rows_.data(), tile_begin_.data(), row_begin_.data()}, state_};
  }
  TileTableState& state() { return state_; }
  // Places the rows of some sources, in the first round or the second.
  void place(const std::vector<Counts>& counts, std::uint32_t sources, std::uint32_t shared_rows) {
    for (std::size_t e = 0; e < rows_.size(); ++e) {
      rows_[e] = 0;
      for (std::size_t s = 0; s < counts.size(); ++s) {
        if ((sources >> s & 1) != 0) rows_[e] += counts[s][e];
      }
    }
    test::EmulatedWarp::run([&](int) { place_tiles(table(), shared_rows); });
  }
  void go_on() {
    state_.round.first_tile = table().num_tiles();
    state_.round.first_row = table().num_rows();
    state_.round.number = 1;
  }
  std::uint32_t begin() const { return static_cast<std::uint32_t>(partition_.first_expert); }
  std::uint32_t end() const {
    return begin() + static_cast<std::uint32_t>(partition_.local_experts);
  }

 private:
  ModelShape shape_{};
  PartitionParams partition_{};
  ScheduleParams params_{};
  std::vector<std::uint32_t> rows_, tile_begin_, row_begin_;
  TileTableState state_{};
};

// The rows of a round's tiles; each must be in one tile, and each tile have one.
void expect_tiled(Plan& plan, std::uint32_t tiles_before, std::uint32_t rows_before,
                  std::uint32_t shared_rows) {
  const TileTable<Policy> table = plan.table();
  std::uint32_t tile = tiles_before, row = rows_before;
  EXPECT_EQ(table.first_tile(), tiles_before);
  EXPECT_EQ(table.first_row(), rows_before);
  EXPECT_EQ(table.shared_of_round(),
            protocol::TokenTiles(shared_rows, Policy::kTile.token_rows).count);
  for (std::uint32_t t = 0; t < table.shared_of_round(); ++t) {
    EXPECT_TRUE(table.is_shared(tile));
    ++tile;
  }
  row += shared_rows;
  for (std::uint32_t e = plan.begin(); e < plan.end(); ++e) {
    const protocol::TokenTiles cut = table.tiles_of(e);
    EXPECT_EQ(table.block.tile_begin[e], tile);
    EXPECT_EQ(table.block.row_begin[e], row);
    for (std::uint32_t t = 0; t < cut.count; ++t) {
      EXPECT_FALSE(table.is_shared(tile));
      EXPECT_EQ(find_expert(table.block.tile_begin + plan.begin(), plan.end() - plan.begin(), tile),
                e - plan.begin());
      EXPECT_LT(cut.begin(t), cut.end(t));
      ++tile;
    }
    for (std::uint32_t r = 0; r < cut.rows; r += 7) {
      EXPECT_EQ(
          find_expert(table.block.row_begin + plan.begin(), plan.end() - plan.begin(), row + r),
          e - plan.begin());
    }
    row += cut.rows;
  }
  EXPECT_EQ(table.num_tiles(), tile);
  EXPECT_EQ(table.num_rows(), row);
}

TEST(PlaceTiles, InRounds) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 4);
    const int experts = 1 + static_cast<int>(random() % 70);
    const int rank = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const auto any = [&](std::uint32_t end) { return static_cast<std::uint32_t>(random() % end); };
    const std::uint32_t most = trial % 3 == 0 ? 3 : 700, all = (1u << ranks) - 1;
    std::vector<Counts> counts(static_cast<std::size_t>(ranks));
    std::uint64_t rows = 0;
    Plan plan(experts, ranks, rank);
    for (Counts& of_source : counts) {
      for (int e = 0; e < experts; ++e) of_source.push_back(any(3) == 0 ? 0 : any(most));
      for (std::uint32_t e = plan.begin(); e < plan.end(); ++e) rows += of_source[e];
    }
    const std::uint32_t own = any(600), shared = trial % 2 == 0 ? own : 0;
    const std::uint32_t first = trial % 5 == 0 ? all : 1 + any(all);
    const bool own_first = (first >> rank & 1) != 0;
    SCOPED_TRACE(::testing::Message() << "trial " << trial);
    plan.place(counts, first, own_first ? shared : 0);
    expect_tiled(plan, 0, 0, own_first ? shared : 0);
    const std::uint32_t shared_tiles = protocol::TokenTiles(shared, Policy::kTile.token_rows).count;
    std::uint32_t tiles = plan.table().num_tiles(), rounds = 1;
    if (first != all) {
      const std::uint32_t placed = plan.table().num_rows();
      std::set<std::uint32_t> shared_of_first;
      for (std::uint32_t t = 0; t < tiles; ++t) {
        if (plan.table().is_shared(t)) shared_of_first.insert(t);
      }
      plan.go_on();
      plan.place(counts, all & ~first, own_first ? 0 : shared);
      expect_tiled(plan, tiles, placed, own_first ? 0 : shared);
      // The second round asks for the first one's tiles, too.
      for (std::uint32_t t = 0; t < tiles; ++t) {
        EXPECT_EQ(plan.table().is_shared(t), shared_of_first.contains(t));
      }
      tiles = plan.table().num_tiles();
      rounds = 2;
    }
    EXPECT_EQ(plan.table().num_rows(), rows + shared);
    EXPECT_EQ(plan.state().shared_tiles.count, shared_tiles);
    // The memory that a pass has: most_tiles() in gpu/host/pass_memory.cpp.
    EXPECT_LE(tiles - shared_tiles,
              rounds * (plan.end() - plan.begin()) + rows / kMaxHeight<Policy>);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace switchyard::gpu
