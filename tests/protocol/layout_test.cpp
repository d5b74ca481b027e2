#include "protocol/layout.h"

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

LayoutParams params(int ranks, int experts, int top_k) {
  LayoutParams p;
  p.num_ranks = ranks;
  p.num_experts = experts;
  p.top_k = top_k;
  p.hidden = 40;
  p.max_tokens = 33;
  p.cells_per_token = top_k + 1;
  p.element_bytes = 2;
  return p;
}

TEST(HeapLayout, RegionsAreDisjointAndInside) {
  for (const int ranks : {1, 2, 5, 8}) {
    for (const int experts : {1, 8, 60}) {
      for (const int top_k : {1, 8}) {
        LayoutParams limits = params(ranks, experts, top_k);
        limits.quantised = top_k == 8;
        const HeapLayout layout(limits);
        std::vector<std::byte> heap(layout.bytes());
        std::byte* base = heap.data();
        const auto at = [base](const void* p) { return static_cast<const std::byte*>(p) - base; };
        const auto row_words = static_cast<std::size_t>(experts + ranks);
        // The first and last address of every region, in the order of the regions.
        const std::vector<std::pair<std::ptrdiff_t, std::ptrdiff_t>> regions = {
            {0, sizeof(Control)},
            {at(layout.counts_epoch(base, 0, 0)),
             at(layout.counts(base, 1, ranks - 1) + row_words)},
            {at(layout.arrived(base, 0, 0)),
             at(layout.arrived(base, layout.max_tiles() - 1, ranks - 1) + 1)},
            {at(layout.finished(base, 0, 0)),
             at(layout.finished(base, ranks - 1, layout.max_tiles() - 1) + 1)},
            {at(layout.rows(base)), at(layout.rows(base) + layout.max_rows())},
            {at(layout.pool(base, 0)),
             at(layout.pool(base, static_cast<std::uint64_t>(ranks) * 33))},
            {at(layout.cell(base, 0, 0)), at(layout.cell(base, 33, 0))}};
        for (std::size_t i = 0; i < regions.size(); ++i) {
          ASSERT_LT(regions[i].first, regions[i].second);
          const std::ptrdiff_t next = i + 1 < regions.size()
                                          ? regions[i + 1].first
                                          : static_cast<std::ptrdiff_t>(layout.bytes());
          ASSERT_LE(regions[i].second, next) << "region " << i;
        }
        // Rows of the counts matrix do not overlap either, in both parities.
        ASSERT_LE(at(layout.counts(base, 0, ranks - 1) + row_words),
                  at(layout.counts_epoch(base, 1, 0)));
      }
    }
  }
}

TEST(HeapLayout, UsedBytesNeverExceedTheReservation) {
  for (const bool quantised : {false, true}) {
    LayoutParams p = params(4, 16, 4);
    p.quantised = quantised;
    const HeapLayout layout(p);
    EXPECT_LE(layout.bytes_used(33, 3 * 33, layout.max_rows(), layout.max_tiles()), layout.bytes());
  }
}

TEST(HeapLayout, QuantisedTokensAreCodesThenScales) {
  for (const int hidden : {8, 40, 128, 136, 7168}) {
    LayoutParams p = params(2, 8, 2);
    p.hidden = hidden;
    const HeapLayout plain(p);
    EXPECT_EQ(plain.token_bytes(), plain.cell_bytes());
    p.quantised = true;
    const HeapLayout layout(p);
    const auto columns = static_cast<std::uint64_t>(hidden);
    EXPECT_EQ(layout.cell_bytes(), columns * 2);
    EXPECT_EQ(layout.token_bytes() % 16, 0u);
    EXPECT_EQ(layout.scale_offset() % 16, 0u);
    EXPECT_GE(layout.scale_offset(), columns);
    EXPECT_GE(layout.token_bytes(),
              layout.scale_offset() + ceil_div<std::uint64_t>(columns, 128) * 4);
    EXPECT_LT(layout.token_bytes(), columns + columns / 32 + 40);
  }
}

}  // namespace
}  // namespace switchyard::protocol
