#include "protocol/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace switchyard::protocol {
namespace {

// The routing of a whole world and every rank's placement of it.
struct WorldPlacements {
  ExpertPartition experts;
  TileShape tile{32, 16};
  std::vector<std::vector<std::vector<int>>> experts_of;  // [rank][token] -> experts
  std::vector<std::vector<std::uint32_t>> counts;         // [rank][expert]
  std::vector<Placement> placements;

  WorldPlacements(int ranks, int num_experts, int top_k, int max_tokens, unsigned seed)
      : experts{num_experts, ranks} {
    std::mt19937 random(seed);
    const double skew = std::uniform_real_distribution<>(0.2, 3.0)(random);
    for (int r = 0; r < ranks; ++r) {
      auto& tokens = experts_of.emplace_back(random() % static_cast<unsigned>(max_tokens + 1));
      auto& row = counts.emplace_back(static_cast<std::size_t>(num_experts));
      for (auto& chosen : tokens) {
        std::set<int> distinct;
        while (static_cast<int>(distinct.size()) < top_k) {
          const double u = std::uniform_real_distribution<>(0, 1)(random);
          distinct.insert(
              std::min(num_experts - 1, static_cast<int>(num_experts * std::pow(u, skew))));
          if (random() % 16 == 0) {
            distinct.insert(static_cast<int>(random() % static_cast<unsigned>(num_experts)));
          }
        }
        chosen.assign(distinct.begin(), distinct.end());
        chosen.resize(static_cast<std::size_t>(top_k));
        for (const int e : chosen) ++row[static_cast<std::size_t>(e)];
      }
    }
    for (int r = 0; r < ranks; ++r) {
      placements.emplace_back(experts, r, tile);
      placements.back().compute([this](int source, int expert) {
        return counts[static_cast<std::size_t>(source)][static_cast<std::size_t>(expert)];
      });
    }
  }
};

// Every row of every segment is one slot's: the owner finds there what the source says it put
// there.
TEST(Placement, OwnersFindWhatSourcesPlaced) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 8);
    const int num_experts = 2 + static_cast<int>(random() % 30);
    const int top_k =
        1 + static_cast<int>(random() % static_cast<unsigned>(std::min(num_experts, 6)));
    const WorldPlacements world(ranks, num_experts, top_k, 60, seed);
    // (expert, row) -> (source, position in the source's list)
    std::map<std::pair<int, std::uint32_t>, std::pair<int, std::uint32_t>> rows;
    for (int s = 0; s < ranks; ++s) {
      const auto r = static_cast<std::size_t>(s);
      std::vector<std::uint32_t> next(static_cast<std::size_t>(num_experts));
      for (const auto& chosen : world.experts_of[r]) {
        for (const int e : chosen) {
          const std::uint32_t position = next[static_cast<std::size_t>(e)]++;
          ASSERT_TRUE(rows.emplace(std::pair(e, world.placements[r].my_first_row(e) + position),
                                   std::pair(s, position))
                          .second)
              << "two slots in one row of expert " << e;
        }
      }
    }
    for (int owner = 0; owner < ranks; ++owner) {
      const Placement& mine = world.placements[static_cast<std::size_t>(owner)];
      for (int e = world.experts.begin(owner); e < world.experts.end(owner); ++e) {
        for (std::uint32_t row = 0; row < mine.rows(e); ++row) {
          const auto found = rows.find({e, row});
          ASSERT_NE(found, rows.end()) << "nobody has row " << row << " of expert " << e;
          const int source = mine.source_of(e, row);
          ASSERT_EQ(source, found->second.first);
          ASSERT_EQ(row - mine.source_begin(e, source), found->second.second);
          ASSERT_EQ((owner + mine.distance_of(source)) % ranks, source);
          rows.erase(found);
        }
        ASSERT_EQ(mine.source_begin(e, ranks), mine.rows(e));
      }
    }
    ASSERT_TRUE(rows.empty()) << "rows beyond a segment's end";
  }
}

TEST(Placement, EveryRankAgreesOnSegmentsAndTiles) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    const WorldPlacements world(5, 17, 3, 80, seed);
    std::uint32_t tile = 0;
    for (int d = 0; d < 5; ++d) {
      const Placement& owner = world.placements[static_cast<std::size_t>(d)];
      EXPECT_EQ(owner.my_first_tile(), tile);
      const std::uint32_t first = tile;
      for (int e = world.experts.begin(d); e < world.experts.end(d); ++e) {
        std::uint32_t rows = 0;
        for (const auto& row : world.counts) rows += row[static_cast<std::size_t>(e)];
        for (const Placement& placement : world.placements) {
          ASSERT_EQ(placement.rows(e), rows);
          ASSERT_EQ(placement.first_tile(e), tile);
        }
        tile += TokenTiles(rows, world.tile).count;
      }
      EXPECT_EQ(owner.num_tiles(), tile - first);
    }
    for (const Placement& placement : world.placements) {
      EXPECT_EQ(placement.num_tiles_of_all(), tile);
    }
  }
}

TEST(Placement, RanksWithoutExpertsHaveNoTiles) {
  const WorldPlacements world(8, 3, 2, 20, 1);
  int without = 0;
  for (int r = 0; r < 8; ++r) {
    if (world.experts.count(r) != 0) continue;
    ++without;
    EXPECT_EQ(world.placements[static_cast<std::size_t>(r)].num_tiles(), 0u);
  }
  EXPECT_EQ(without, 5);
}

}  // namespace
}  // namespace switchyard::protocol
