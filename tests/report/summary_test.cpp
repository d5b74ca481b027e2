// Geometric means, worst points, and what is listed once.
#include "report/summary.h"

#include <gmock/gmock.h>

namespace switchyard::report {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

Row row_of(const std::string& suite, std::int64_t tokens, double median_us) {
  Row row;
  row.suite = suite;
  row.machine = "GPU";
  row.commit = "abc";
  row.command = "bench";
  row.model = "olmoe";
  row.tokens_per_rank = tokens;
  row.median_us = median_us;
  return row;
}

TEST(ReportSummary, GeometricMeansAndWorstPoints) {
  std::vector<Row> rows = {row_of("a", 1, 20), row_of("a", 2, 80), row_of("a", 3, 30)};
  rows[0].floor_us = 20;
  rows[1].floor_us = 20;  // times over floor 1, 4; the third has none
  rows[1].rival = results::Rival{.name = "torch", .median_us = 160};
  rows[2].rival = results::Rival{.name = "torch", .median_us = 15};  // speed-ups 2, 1/2
  const std::vector<Suite> suites = suites_of(rows);
  ASSERT_EQ(suites.size(), 1u);
  ASSERT_TRUE(suites[0].time_over_floor.has_value());
  EXPECT_EQ(suites[0].time_over_floor->points, 2u);
  EXPECT_THAT(suites[0].time_over_floor->mean, DoubleNear(2, 1e-12));
  EXPECT_EQ(suites[0].time_over_floor->worst, 4);
  EXPECT_EQ(suites[0].time_over_floor->at, &rows[1]);
  ASSERT_TRUE(suites[0].speed_up.has_value());
  EXPECT_THAT(suites[0].speed_up->mean, DoubleNear(1, 1e-12));
  EXPECT_EQ(suites[0].speed_up->worst, 0.5);
  EXPECT_EQ(suites[0].speed_up->at, &rows[2]);
  EXPECT_THAT(suites[0].rivals, ElementsAre("torch"));
}

TEST(ReportSummary, SuitesInOrderOfAppearance) {
  std::vector<Row> rows = {row_of("b", 1, 1), row_of("a", 1, 1), row_of("b", 2, 1)};
  rows[2].commit = "def";
  rows[2].date = "2026-11-20";
  const std::vector<Suite> suites = suites_of(rows);
  ASSERT_EQ(suites.size(), 2u);
  EXPECT_EQ(suites[0].name, "b");
  EXPECT_THAT(suites[0].rows, ElementsAre(&rows[0], &rows[2]));
  EXPECT_THAT(suites[0].machines, ElementsAre("GPU"));
  EXPECT_THAT(suites[0].commits, ElementsAre("abc", "def"));
  EXPECT_THAT(suites[0].dates, ElementsAre("2026-11-20"));
  EXPECT_EQ(suites[1].name, "a");
  EXPECT_FALSE(suites[1].time_over_floor.has_value());
  EXPECT_FALSE(suites[1].speed_up.has_value());
  EXPECT_THAT(suites[1].dates, IsEmpty());
}

TEST(ReportSummary, NoRowsNoSuites) { EXPECT_THAT(suites_of({}), IsEmpty()); }

}  // namespace
}  // namespace switchyard::report
