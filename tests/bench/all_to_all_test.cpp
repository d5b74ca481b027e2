// The suite all_to_all: its rows, its floor, its trace, and what it says of wrong results.
#include "bench/all_to_all.h"

#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/floor.h"
#include "model/errors.h"

namespace switchyard::bench {
namespace {

using all_to_all::CallRecords;
using all_to_all::Record;
using all_to_all::Stage;
using results::AllToAllRow;
using ::testing::ElementsAre;

class Recorder : public AllToAllObserver {
 public:
  void measuring(std::uint64_t, std::uint64_t) override {}
  void checked(std::size_t cases) override { num_checked += cases; }
  void measured(const AllToAllRow& row) override { rows.push_back(row); }
  void keep(const std::vector<AllToAllRow>& kept) override { num_kept += kept.size(); }
  void failed(const std::string& what, const std::string& problem) override {
    failures.push_back(what + ": " + problem);
  }

  std::size_t num_checked = 0, num_kept = 0;
  std::vector<AllToAllRow> rows;
  std::vector<std::string> failures;
};

AllToAllOptions small_options() {
  AllToAllOptions options;
  options.ranks = 2;
  options.tests = {{8, 2, 24, 5, 1}};
  options.benchmarks = {{8, 2, 64, 6, 2}, {16, 3, 40, 40, 3}};
  options.repeat = 3;
  options.commit = "abc";
  options.command = "a test";
  return options;
}

TEST(AllToAllSuite, MeasuresEveryRungOfEveryCase) {
  Recorder recorder;
  AllToAllSession session(small_options(), recorder);
  const std::vector<AllToAllRow> rows = session.run();
  EXPECT_THAT(recorder.failures, ElementsAre());
  EXPECT_EQ(recorder.num_checked, 1u);
  EXPECT_EQ(recorder.num_kept, 14u);
  ASSERT_EQ(rows.size(), 14u);  // seven rungs of two cases
  EXPECT_EQ(recorder.rows.size(), 14u);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const AllToAllRow& row = rows[i];
    SCOPED_TRACE(point_of(row));
    EXPECT_EQ(row.rung, all_to_all::ladder()[i % 7].name);
    EXPECT_EQ(row.experts, i < 7 ? 8 : 16);
    EXPECT_EQ(row.times_us.size(), 3u);
    EXPECT_EQ(row.repeats, 3);
    EXPECT_EQ(row.rank_us.size(), 2u);
    EXPECT_FALSE(row.floor_us.has_value());  // on a CPU
    EXPECT_GE(row.median_us, std::max(row.rank_us[0], row.rank_us[1]));
    EXPECT_GT(row.nvlink_bytes, 0);
    const bool fused = all_to_all::ladder()[i % 7].features.fused;
    for (const Stage stage : all_to_all::kStages) {
      const std::vector<double>& times = row.stage_us[static_cast<std::size_t>(stage)];
      EXPECT_EQ(times.size(), stage == Stage::kExperts && fused ? 0u : 2u) << to_string(stage);
    }
    EXPECT_GE(*row.receive_imbalance, 1);
  }
  // A row of 40 halves goes there and back.
  const auto busiest = static_cast<double>(all_to_all::traffic_of({16, 3, 40, 40, 3}, 2).busiest());
  EXPECT_EQ(rows[7].nvlink_bytes, busiest * 40 * 2 * 2);
  const std::vector<RungMean> means = rung_means(rows);
  ASSERT_EQ(means.size(), 7u);
  EXPECT_EQ(means[3].rung, "fused");
  EXPECT_EQ(means[3].cases, 2u);
  EXPECT_NEAR(means[3].mean_us, std::sqrt(rows[3].median_us * rows[10].median_us), 1e-9);
}

TEST(AllToAllSuite, RefusesRanksThatDoNotDivideTheExperts) {
  AllToAllOptions options = small_options();
  options.ranks = 3;
  Recorder recorder;
  EXPECT_ERROR(AllToAllSession(options, recorder), kInvalidArgument,
               "3 ranks do not divide 8 experts");
}

CallRecords records_of(const std::vector<std::uint32_t>& rows, int warps) {
  CallRecords records;
  all_to_all::StageRecords& receive = records[static_cast<std::size_t>(Stage::kDispatchReceive)];
  receive.blocks = static_cast<int>(rows.size()) / warps;
  receive.warps = warps;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    receive.of_worker.push_back({1'000'000 + 100 * i, 1'002'000 + 100 * i, 50, rows[i], 1});
  }
  return records;
}

TEST(AllToAllSuite, ImbalanceIsThatOfBlocks) {
  EXPECT_EQ(receive_imbalance(records_of({2, 2, 2, 2}, 2)), 1);
  EXPECT_EQ(receive_imbalance(records_of({4, 0, 2, 2}, 2)), 1);  // warps of a block share
  EXPECT_EQ(receive_imbalance(records_of({4, 2, 1, 1}, 2)), 1.5);
  EXPECT_EQ(receive_imbalance(records_of({4, 0, 2, 2}, 1)), 2);
  EXPECT_EQ(receive_imbalance(records_of({0, 0}, 1)), 0);
}

TEST(AllToAllSuite, TraceHasASliceForEachBlock) {
  std::ostringstream text;
  write_all_to_all_trace(
      text, {{"fused", {records_of({3, 1, 0, 5}, 2)}}, {"tuned", {records_of({1}, 1)}}});
  const nlohmann::json events = nlohmann::json::parse(text.str())["traceEvents"];
  std::vector<nlohmann::json> slices;
  std::vector<std::string> names;
  for (const nlohmann::json& event : events) {
    if (event["ph"] == "X") slices.push_back(event);
    if (event["name"] == "process_name") names.push_back(event["args"]["name"]);
  }
  EXPECT_THAT(names, ElementsAre("fused, rank 0", "tuned, rank 0"));
  ASSERT_EQ(slices.size(), 3u);
  EXPECT_EQ(slices[0]["name"], "dispatch receive");
  EXPECT_EQ(slices[0]["args"]["rows"], 4);
  EXPECT_EQ(slices[0]["ts"], 0);
  EXPECT_EQ(slices[0]["dur"], 2.1);
  EXPECT_EQ(slices[1]["tid"], 1);
  EXPECT_EQ(slices[1]["ts"], 0.2);
  EXPECT_EQ(slices[1]["args"]["rows"], 5);
  EXPECT_EQ(slices[2]["pid"], 2);
}

TEST(AllToAllSuite, FloorIsOfLinksThatRanksHaveForThemselves) {
  EXPECT_NEAR(*links_floor_us(33e6, 8, 8), 2 * 1.37 + 100, 1e-9);
  EXPECT_FALSE(links_floor_us(33e6, 8, 4).has_value());
  EXPECT_FALSE(links_floor_us(33e6, 2, 0).has_value());
  EXPECT_FALSE(links_floor_us(0, 1, 1).has_value());
}

}  // namespace
}  // namespace switchyard::bench
