// Histograms of both generators: their sums, their balancedness, and what each cannot reach.
#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "switchyard/routing.h"
#include "switchyard/tuner.h"

namespace switchyard::tuner {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;

using Counts = std::vector<std::int64_t>;

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

TEST(Histogram, EveryTokenChoosesTopKTimes) {
  for (const Generator generator : {Generator::kDistinct, Generator::kRepeated}) {
    for (const int tokens : {0, 1, 7, 512}) {
      const Counts counts = draw_counts(generator, tokens, 64, 8, 0.5, 1);
      EXPECT_EQ(counts.size(), 64u);
      EXPECT_EQ(sum(counts), tokens * 8) << to_string(generator);
      EXPECT_THAT(counts, Each(Ge(0)));
    }
  }
}

TEST(Histogram, ReachesTheBalancednessAskedFor) {
  struct Case {
    int experts, top_k;
  };
  for (const Case& c : {Case{64, 8}, Case{128, 8}, Case{256, 8}, Case{16, 4}}) {
    for (const double beta : {0.2, 0.35, 0.5, 0.65, 0.8, 0.9}) {
      const Counts repeated = draw_counts(Generator::kRepeated, 512, c.experts, c.top_k, beta, 3);
      EXPECT_NEAR(balancedness(repeated), beta, 0.02) << c.experts << " experts, beta " << beta;
      const double least = lowest_balancedness(c.experts, c.top_k);
      const Counts distinct = draw_counts(Generator::kDistinct, 512, c.experts, c.top_k, beta, 3);
      EXPECT_NEAR(balancedness(distinct), std::max(beta, least), 0.02)
          << c.experts << " experts, beta " << beta;
    }
  }
}

// RaMP's beta of 0.2 is one that no router reaches: eight distinct experts of 64 are half of ln 64.
TEST(Histogram, DistinctExpertsHaveALeastBalancedness) {
  const Counts distinct = draw_counts(Generator::kDistinct, 256, 64, 8, 0.2, 0);
  EXPECT_DOUBLE_EQ(balancedness(distinct), 0.5);
  EXPECT_EQ(std::count(distinct.begin(), distinct.end(), 256), 8);
  const Counts repeated = draw_counts(Generator::kRepeated, 256, 64, 8, 0.2, 0);
  EXPECT_LT(balancedness(repeated), 0.25);
  EXPECT_GT(*std::max_element(repeated.begin(), repeated.end()), 256);
}

TEST(Histogram, DistinctExpertsHaveNoMoreThanOneRowPerToken) {
  for (const double beta : {0.0, 0.5, 1.0}) {
    EXPECT_THAT(draw_counts(Generator::kDistinct, 100, 32, 4, beta, 9),
                Each(AllOf(Ge(0), Le(100))));
  }
}

TEST(Histogram, IsAFunctionOfItsArguments) {
  for (const Generator generator : {Generator::kDistinct, Generator::kRepeated}) {
    const Counts counts = draw_counts(generator, 64, 32, 4, 0.7, 11);
    EXPECT_EQ(draw_counts(generator, 64, 32, 4, 0.7, 11), counts);
    EXPECT_NE(draw_counts(generator, 64, 32, 4, 0.7, 12), counts);
  }
  // Pinned: files name seeds, so a seed must mean the same histogram for ever.
  EXPECT_THAT(draw_counts(Generator::kDistinct, 8, 4, 2, 0.9, 1), ElementsAre(7, 1, 4, 4));
  EXPECT_THAT(draw_counts(Generator::kRepeated, 9, 4, 2, 0.6, 1), ElementsAre(6, 1, 11, 0));
}

TEST(Histogram, FewDrawsAreAsBalancedAsTheyCanBe) {
  const Counts counts = draw_counts(Generator::kRepeated, 1, 256, 8, 1, 0);
  EXPECT_EQ(sum(counts), 8);
  EXPECT_LE(balancedness(counts), lowest_balancedness(256, 8) + 1e-12);
}

TEST(Histogram, RefusesWhatMakesNoSense) {
  EXPECT_THROW(draw_counts(Generator::kRepeated, 1, 4, 5, 1, 0), Error);
  EXPECT_THROW(draw_counts(Generator::kRepeated, 1, 4, 0, 1, 0), Error);
  EXPECT_THROW(draw_counts(Generator::kDistinct, -1, 4, 2, 1, 0), Error);
  EXPECT_THROW(draw_counts(Generator::kDistinct, 4, 4, 2, 1.5, 0), Error);
}

TEST(Histogram, GeneratorsHaveNames) {
  EXPECT_EQ(generator_named("distinct"), Generator::kDistinct);
  EXPECT_EQ(generator_named("repeated"), Generator::kRepeated);
  try {
    generator_named("zipf");
    FAIL() << "zipf is taken for a generator";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("'zipf'"));
    EXPECT_THAT(error.what(), HasSubstr("distinct, repeated"));
  }
}

}  // namespace
}  // namespace switchyard::tuner
