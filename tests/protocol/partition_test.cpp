#include "protocol/partition.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace switchyard::protocol {
namespace {

TEST(ExpertPartition, OwnerInvertsTheShards) {
  for (int experts = 1; experts <= 130; ++experts) {
    for (int ranks = 1; ranks <= 20; ++ranks) {
      const ExpertPartition partition{experts, ranks};
      int covered = 0;
      for (int r = 0; r < ranks; ++r) {
        ASSERT_EQ(partition.begin(r), covered);
        ASSERT_LE(partition.count(r), partition.max_count());
        ASSERT_GE(partition.count(r), experts / ranks);
        for (int e = partition.begin(r); e < partition.end(r); ++e) {
          ASSERT_EQ(partition.owner(e), r) << experts << " experts, " << ranks << " ranks";
        }
        covered = partition.end(r);
      }
      ASSERT_EQ(covered, experts);
    }
  }
}

TEST(TokenTiles, CoverTheRowsWithFewEvenTiles) {
  for (const TileShape shape : {TileShape{128, 16}, TileShape{256, 8}, TileShape{64, 64}}) {
    for (std::uint32_t rows = 0; rows < 3000; ++rows) {
      const TokenTiles tiles(rows, shape);
      const auto most = static_cast<std::uint32_t>(shape.max_height);
      ASSERT_LE(tiles.count, ceil_div(rows, most));
      std::uint32_t covered = 0;
      for (std::uint32_t t = 0; t < tiles.count; ++t) {
        ASSERT_EQ(tiles.begin(t), covered);
        ASSERT_GT(tiles.end(t), tiles.begin(t)) << "an empty tile of " << rows << " rows";
        ASSERT_LE(tiles.end(t) - tiles.begin(t), most);
        covered = tiles.end(t);
      }
      ASSERT_EQ(covered, rows);
      ASSERT_EQ(tiles.height % static_cast<std::uint32_t>(shape.granule), 0u);
    }
  }
}

// Experts one after another in bands: both of a pair name each other, are tall and in one band, and
// a tile is alone only where it must be.
TEST(TilePair, JoinsNeighboursOfABand) {
  const TileShape shape{128, 128, 16};
  const std::uint32_t least = 65;
  std::mt19937 random(11);
  std::uint32_t pairs = 0;
  for (const std::uint32_t band : {1u, 2u, 8u, 16u}) {
    std::uint32_t before = 0;  // tiles of earlier experts
    for (int expert = 0; expert < 2000; ++expert) {
      const TokenTiles tiles(static_cast<std::uint32_t>(random() % 3000), shape);
      const auto place_of = [&](std::uint32_t t) { return (before + t) % band; };
      const auto pair_of = [&](std::uint32_t t) {
        return TilePair(tiles, t, place_of(t), band, least);
      };
      const auto rows_of = [&](std::uint32_t t) { return tiles.end(t) - tiles.begin(t); };
      for (std::uint32_t t = 0; t < tiles.count; ++t) {
        const TilePair pair = pair_of(t);
        if (pair.two) {
          ++pairs;
          ASSERT_TRUE(t == pair.first || t == pair.first + 1);
          const std::uint32_t other = t == pair.first ? t + 1 : t - 1;
          ASSERT_LT(other, tiles.count);
          ASSERT_TRUE(pair_of(other).two);
          ASSERT_EQ(pair_of(other).first, pair.first);
          ASSERT_EQ((before + t) / band, (before + other) / band);
          ASSERT_GE(rows_of(t), least);
          ASSERT_GE(rows_of(other), least);
        } else if (t + 1 < tiles.count && !pair_of(t + 1).two) {
          ASSERT_TRUE(place_of(t + 1) == 0 || rows_of(t + 1) < least) << "two that could be joined";
        }
      }
      before += tiles.count;
    }
  }
  EXPECT_GT(pairs, 30000u);
}

}  // namespace
}  // namespace switchyard::protocol
