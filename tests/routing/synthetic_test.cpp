#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

std::vector<std::int64_t> histogram(const SyntheticRouting& routing, int num_experts) {
  std::vector<std::int64_t> counts(num_experts, 0);
  for (std::int32_t id : routing.ids) ++counts.at(id);
  return counts;
}

double measured_beta(const SyntheticRouting& routing, int num_experts) {
  return balancedness(histogram(routing, num_experts));
}

TEST(Balancedness, HandComputed) {
  const auto beta = [](std::vector<std::int64_t> counts) { return balancedness(counts); };
  EXPECT_DOUBLE_EQ(beta({5, 5, 5, 5}), 1);
  EXPECT_DOUBLE_EQ(beta({20, 0, 0, 0}), 0);
  EXPECT_DOUBLE_EQ(beta({7, 7, 0, 0}), 0.5);  // ln 2 / ln 4
  // -(3/4 ln 3/4 + 1/4 ln 1/4) / ln 4
  EXPECT_NEAR(beta({6, 2, 0, 0}), 0.4056390622, 1e-9);
  EXPECT_EQ(beta({0, 0, 0}), 1);
  EXPECT_EQ(beta({12}), 1);
  EXPECT_EQ(beta({}), 1);
}

TEST(Balancedness, Lowest) {
  EXPECT_DOUBLE_EQ(lowest_balancedness(64, 8), 0.5);
  EXPECT_DOUBLE_EQ(lowest_balancedness(64, 1), 0);
  EXPECT_DOUBLE_EQ(lowest_balancedness(64, 64), 1);
  EXPECT_DOUBLE_EQ(lowest_balancedness(1, 1), 1);
}

struct Size {
  int num_tokens, num_experts, top_k;
};

class Synthetic : public ::testing::TestWithParam<Size> {};

TEST_P(Synthetic, ReachesTheTargetWithDistinctExperts) {
  const auto [num_tokens, num_experts, top_k] = GetParam();
  const double lowest = lowest_balancedness(num_experts, top_k);
  for (int tenth = 10; tenth >= 1; --tenth) {
    const double target = tenth / 10.0;
    for (std::uint64_t seed : {1u, 99u}) {
      const SyntheticRouting routing =
          synthetic_routing(num_tokens, num_experts, top_k, target, seed);
      ASSERT_EQ(routing.ids.size(), static_cast<std::size_t>(num_tokens) * top_k);
      ASSERT_EQ(routing.weights.size(), routing.ids.size());
      for (int t = 0; t < num_tokens; ++t) {
        const auto begin = routing.ids.begin() + static_cast<std::ptrdiff_t>(t) * top_k;
        std::set<std::int32_t> distinct(begin, begin + top_k);
        ASSERT_EQ(distinct.size(), static_cast<std::size_t>(top_k));
        ASSERT_GE(*distinct.begin(), 0);
        ASSERT_LT(*distinct.rbegin(), num_experts);
      }
      for (float weight : routing.weights) {
        ASSERT_GE(weight, 0.5f / static_cast<float>(top_k));
        ASSERT_LE(weight, 1.5f / static_cast<float>(top_k));
      }
      EXPECT_NEAR(measured_beta(routing, num_experts), std::max(target, lowest), 0.02)
          << "target " << target;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Synthetic,
                         ::testing::Values(Size{4096, 64, 8}, Size{4096, 8, 2}, Size{2048, 60, 4},
                                           Size{8192, 256, 8}, Size{8192, 384, 8},
                                           Size{4096, 16, 1}, Size{512, 128, 8}, Size{1024, 16, 16},
                                           Size{16384, 512, 10}),
                         [](const ::testing::TestParamInfo<Size>& param_info) {
                           return "T" + std::to_string(param_info.param.num_tokens) + "_E" +
                                  std::to_string(param_info.param.num_experts) + "_K" +
                                  std::to_string(param_info.param.top_k);
                         });

TEST(SyntheticRouting, LimitSendsEveryTokenToTheSameExperts) {
  const SyntheticRouting routing = synthetic_routing(100, 64, 8, 0.0, 5);
  const std::set<std::int32_t> first(routing.ids.begin(), routing.ids.begin() + 8);
  EXPECT_EQ(std::set<std::int32_t>(routing.ids.begin(), routing.ids.end()), first);
  EXPECT_EQ(first.size(), 8u);
  EXPECT_NEAR(measured_beta(routing, 64), lowest_balancedness(64, 8), 1e-12);
}

TEST(SyntheticRouting, IsAFunctionOfItsArguments) {
  const SyntheticRouting a = synthetic_routing(300, 64, 8, 0.8, 42);
  const SyntheticRouting b = synthetic_routing(300, 64, 8, 0.8, 42);
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.weights, b.weights);
  EXPECT_NE(a.ids, synthetic_routing(300, 64, 8, 0.8, 43).ids);

  // Recorded once: another platform, compiler or version must draw the same.
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a over the ids
  for (std::int32_t id : a.ids) hash = (hash ^ static_cast<std::uint64_t>(id)) * 1099511628211u;
  EXPECT_EQ(hash, 5003390468367496616u);
}

TEST(SyntheticRouting, PopularExpertsDependOnTheSeed) {
  std::set<std::ptrdiff_t> most_popular;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto counts = histogram(synthetic_routing(500, 64, 1, 0.5, seed), 64);
    most_popular.insert(std::max_element(counts.begin(), counts.end()) - counts.begin());
  }
  EXPECT_GT(most_popular.size(), 10u);
}

TEST(SyntheticRouting, SmallestCases) {
  EXPECT_TRUE(synthetic_routing(0, 8, 2, 0.5, 1).ids.empty());
  EXPECT_EQ(synthetic_routing(3, 1, 1, 1.0, 1).ids, (std::vector<std::int32_t>{0, 0, 0}));
  EXPECT_EQ(synthetic_routing(1, 64, 8, 0.9, 1).ids.size(), 8u);
}

TEST(SyntheticRouting, RejectsWhatCannotBeDrawn) {
  EXPECT_THROW(synthetic_routing(-1, 8, 2, 0.5, 1), Error);
  EXPECT_THROW(synthetic_routing(4, 8, 9, 0.5, 1), Error);
  EXPECT_THROW(synthetic_routing(4, 8, 0, 0.5, 1), Error);
  EXPECT_THROW(synthetic_routing(4, 8, 2, std::nan(""), 1), Error);
  EXPECT_THROW(synthetic_routing(4, 8, 2, 1.5, 1), Error);
}

}  // namespace
}  // namespace switchyard
