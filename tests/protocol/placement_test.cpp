#include "protocol/placement.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace switchyard::protocol {
namespace {

// A rank's experts and what every rank has for them.
struct Owner {
  ExpertPartition experts;
  int rank;
  std::vector<std::vector<std::uint32_t>> counts;  // [source][expert over all ranks]
  Placement placement;

  Owner(std::mt19937& random, int ranks, int num_experts, int of)
      : experts{num_experts, ranks}, rank(of), placement(experts, of) {
    const auto roll = [&random](unsigned below) {
      return static_cast<std::uint32_t>(random() % below);
    };
    const unsigned empty_in = 1 + roll(6);
    for (int s = 0; s < ranks; ++s) {
      auto& row = counts.emplace_back();
      for (int e = 0; e < num_experts; ++e) row.push_back(roll(empty_in) == 0 ? 0 : roll(40));
    }
  }
  std::uint32_t count(int source, int expert) const {
    return counts[static_cast<std::size_t>(source)][static_cast<std::size_t>(expert)];
  }
  std::uint32_t place(int expert, RankSet sources) {
    return placement.place(expert, sources, [&](int source) { return count(source, expert); });
  }
};

// Sources come in random groups; the segments then have every row of every source once.
TEST(Placement, EveryRowIsInOneSegment) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 8);
    const int num_experts = 1 + static_cast<int>(random() % 30);
    Owner owner(random, ranks, num_experts,
                static_cast<int>(random() % static_cast<unsigned>(ranks)));
    for (int pass = 0; pass < 2; ++pass) {
      owner.placement.clear();
      for (int e = owner.experts.begin(owner.rank); e < owner.experts.end(owner.rank); ++e) {
        ASSERT_EQ(owner.placement.placed(e), 0u);
        while (owner.placement.placed(e) != all_ranks(ranks)) {
          const RankSet group = random() & all_ranks(ranks) & ~owner.placement.placed(e);
          std::uint32_t rows = 0;
          for (int s = 0; s < ranks; ++s) {
            if ((group & set_of(s)) != 0) rows += owner.count(s, e);
          }
          const std::uint32_t before = owner.placement.num_segments();
          ASSERT_EQ(owner.place(e, group), rows);
          ASSERT_EQ(owner.placement.num_segments(), before + (rows > 0 ? 1 : 0));
        }
      }
      std::set<std::tuple<int, int, std::uint32_t>> found;  // expert, source, position
      for (std::uint32_t segment = 0; segment < owner.placement.num_segments(); ++segment) {
        const int e = owner.placement.expert_of(segment);
        int last = 0;
        for (std::uint32_t row = 0; row < owner.placement.source_begin(segment, ranks); ++row) {
          const int source = owner.placement.source_of(segment, row);
          ASSERT_GE(source, last) << "rows stand in the order of sources";
          last = source;
          const std::uint32_t position = row - owner.placement.source_begin(segment, source);
          ASSERT_LT(position, owner.count(source, e));
          ASSERT_TRUE(found.emplace(e, source, position).second);
          ASSERT_EQ((owner.rank + owner.placement.distance_of(source)) % ranks, source);
        }
      }
      std::size_t all = 0;
      for (int e = owner.experts.begin(owner.rank); e < owner.experts.end(owner.rank); ++e) {
        for (int s = 0; s < ranks; ++s) all += owner.count(s, e);
      }
      ASSERT_EQ(found.size(), all);
    }
  }
}

TEST(Placement, SegmentsStayWhereTheyAre) {
  std::mt19937 random(5);
  Owner owner(random, 4, 9, 1);
  const int first = owner.experts.begin(1);
  owner.place(first, all_ranks(4));
  ASSERT_EQ(owner.placement.num_segments(), 1u);
  const std::uint32_t rows = owner.placement.source_begin(0, 4);
  for (int e = first + 1; e < owner.experts.end(1); ++e) {
    for (int s = 0; s < 4; ++s) owner.place(e, set_of(s));
  }
  EXPECT_EQ(owner.placement.expert_of(0), first);
  EXPECT_EQ(owner.placement.source_begin(0, 4), rows);
}

TEST(Placement, SetsOfRanks) {
  EXPECT_EQ(all_ranks(1), 1u);
  EXPECT_EQ(all_ranks(5), 31u);
  EXPECT_EQ(all_ranks(64), ~RankSet{0});
}

}  // namespace
}  // namespace switchyard::protocol
