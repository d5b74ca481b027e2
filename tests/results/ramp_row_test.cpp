// Rows of the choice of configurations: written, read strictly, merged by their points.
#include "results/ramp_row.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "model/temporary_directory.h"
#include "results/refused_rows.h"

namespace switchyard::results {
namespace {

using test::TemporaryDirectory;

RampRow row_at(std::int64_t tokens, double chosen_us) {
  return {.machine = "NVIDIA H200, 132 SMs",
          .commit = "abc",
          .command = "switchyard tune",
          .kernel = "grouped_fp8",
          .model = "ramp-olmoe",
          .experts = 64,
          .tokens_per_rank = tokens,
          .beta = 0.5,
          .beta_reached = 0.51,
          .generator = "distinct",
          .form = "full",
          .exhaustive_us = 50.5,
          .chosen_us = chosen_us,
          .predicted_us = 52,
          .static_us = 61.25,
          .best = "rows=16",
          .chosen = "rows=32",
          .held_out = true};
}

RegionRow region(const char* prediction, bool predicted, double ratio) {
  return {.machine = "NVIDIA H200",
          .commit = "abc",
          .command = "switchyard tune",
          .kernel = "grouped_fp8",
          .model = "ramp-olmoe",
          .generator = "distinct",
          .prediction = prediction,
          .predicted = predicted,
          .measured_ratio = ratio,
          .points = 7};
}

TEST(RampRow, HasTheFieldsThatReadersKnow) {
  const auto json = test::parsed(to_json(row_at(32, 51)));
  for (const char* field :
       {"suite", "kernel", "model", "experts", "tokens_per_rank", "beta", "generator",
        "exhaustive_us", "chosen_us", "static_us", "rule_us", "held_out"}) {
    EXPECT_TRUE(json.contains(field)) << field;
  }
  EXPECT_EQ(json["rule_us"], nullptr);
  EXPECT_EQ(json["held_out"], true);
  const RampRow read =
      parse_rows<RampRow>(nlohmann::ordered_json::array({json}).dump(), "rows.json").at(0);
  EXPECT_EQ(test::parsed(to_json(read)), json);
  const auto region_json = test::parsed(to_json(region("split_k", true, 1.2345)));
  for (const char* field : {"model", "prediction", "predicted", "measured_ratio"}) {
    EXPECT_TRUE(region_json.contains(field)) << field;
  }
  EXPECT_EQ(region_json["measured_ratio"], 1.2345);
  const RegionRow read_region =
      parse_rows<RegionRow>(nlohmann::ordered_json::array({region_json}).dump(), "r.json").at(0);
  EXPECT_EQ(test::parsed(to_json(read_region)), region_json);
}

TEST(RampRow, IsReadStrictly) {
  const RampRow good = row_at(32, 51);
  expect_refused(good, "'held_out' is \"no\", not true or false",
                 [](auto& j) { j["held_out"] = "no"; });
  expect_refused(good, "no 'kernel'", [](auto& j) { j.erase("kernel"); });
  expect_refused(good, "chosen_us", [](auto& j) { j["chosen_us"] = 0; });
  expect_refused(good, "beta", [](auto& j) { j["beta"] = 2; });
}

TEST(RampRow, MergesByPoint) {
  const TemporaryDirectory directory;
  const auto ramp = directory / "ramp.json", regions = directory / "regions.json";
  merge_rows(ramp, std::vector{row_at(32, 51), row_at(64, 52)});
  RampRow repeated = row_at(32, 70);
  repeated.generator = "repeated";
  merge_rows(ramp, std::vector{row_at(32, 55), repeated});
  const std::vector<RampRow> rows = parse_rows<RampRow>(test::read_file(ramp), "ramp.json");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].chosen_us, 55);
  EXPECT_EQ(rows[1].chosen_us, 52);
  EXPECT_EQ(rows[2].chosen_us, 70);
  merge_rows(regions, std::vector{region("split_k", true, 1.1), region("split_k", false, 0.9)});
  merge_rows(regions, std::vector{region("split_k", true, 1.2), region("group_m", false, 1)});
  const std::vector<RegionRow> found = parse_rows<RegionRow>(test::read_file(regions), "r.json");
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].measured_ratio, 1.2);
  EXPECT_THROW(require_mergeable<RampRow>(regions), Error);
  EXPECT_THROW(require_mergeable<RegionRow>(ramp), Error);
}

}  // namespace
}  // namespace switchyard::results
