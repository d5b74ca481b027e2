// The searches by which kernels find the expert of a tile or a row, by one thread and by a warp.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "routing/emulated_warp.h"
// After it: code for warps.
#include "gpu/tile/find_expert.cuh"

namespace switchyard::gpu {
namespace {

using test::EmulatedWarp;

// Where each expert's tiles begin, and whose each tile is.
template <typename Word>
struct Begins {
  std::vector<Word> begin;  // [experts + 1]
  std::vector<std::uint32_t> expert_of;

  explicit Begins(const std::vector<int>& tiles) {
    for (std::size_t e = 0; e < tiles.size(); ++e) {
      begin.push_back(static_cast<Word>(expert_of.size()));
      expert_of.insert(expert_of.end(), static_cast<std::size_t>(tiles[e]),
                       static_cast<std::uint32_t>(e));
    }
    begin.push_back(static_cast<Word>(expert_of.size()));
  }
};

template <typename Word>
void expect_found(const std::vector<int>& tiles) {
  const Begins<Word> b(tiles);
  const auto num_experts = static_cast<std::uint32_t>(tiles.size());
  std::vector<std::uint32_t> alone, together(b.expert_of.size());
  for (std::uint32_t i = 0; i < b.expert_of.size(); ++i) {
    alone.push_back(find_expert(b.begin.data(), num_experts, i));
  }
  EXPECT_EQ(alone, b.expert_of);
  EmulatedWarp::run([&](int lane) {
    for (std::uint32_t i = 0; i < b.expert_of.size(); ++i) {
      const std::uint32_t found =
          find_expert_together(b.begin.data(), num_experts, i, static_cast<std::uint32_t>(lane));
      // All lanes get the same; each is looked at in turn.
      if (static_cast<int>(i % EmulatedWarp::kLanes) == lane) together[i] = found;
    }
  });
  EXPECT_EQ(together, b.expert_of);
}

class FindExpert : public ::testing::TestWithParam<int> {};

TEST_P(FindExpert, OfEveryTile) {
  const int experts = GetParam();
  const auto size = static_cast<std::size_t>(experts);
  expect_found<std::uint32_t>(std::vector<int>(size, 1));
  expect_found<std::uint16_t>(std::vector<int>(size, 1));
  // Only the first expert has tiles, or only the last.
  for (const std::size_t only : {std::size_t{0}, size - 1}) {
    std::vector<int> tiles(size, 0);
    tiles[only] = 40;
    expect_found<std::uint32_t>(tiles);
  }
  // Mostly none, in long runs.
  std::mt19937 random(static_cast<std::uint32_t>(experts));
  for (const std::uint32_t among : {2u, 7u, 90u}) {
    std::vector<int> tiles(size);
    for (int& count : tiles) count = random() % among == 0 ? static_cast<int>(random() % 4) : 0;
    expect_found<std::uint32_t>(tiles);
    expect_found<std::uint16_t>(tiles);
  }
}
INSTANTIATE_TEST_SUITE_P(Experts, FindExpert,
                         ::testing::Values(1, 2, 31, 32, 33, 256, 511, 512, 513, 992, 1000, 1023,
                                           kMostFoundTogether));

// A rank looks among its own experts only: the first tile's number need not be 0.
TEST(FindExpert, AmongARanksOwn) {
  const Begins<std::uint32_t> b(std::vector<int>(1024, 2));
  EmulatedWarp::run([&](int lane) {
    for (std::uint32_t e = 600; e < 1024; ++e) {
      ASSERT_EQ(find_expert_together(b.begin.data() + 600, 424, 2 * e + 1,
                                     static_cast<std::uint32_t>(lane)),
                e - 600);
    }
  });
}

}  // namespace
}  // namespace switchyard::gpu
