// Rows of the suite all_to_all: written, read strictly, merged by their points.
#include "results/all_to_all_row.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "base/read_file.h"
#include "model/temporary_directory.h"
#include "results/example_all_to_all_row.h"
#include "results/refused_rows.h"

namespace switchyard::results {
namespace {

using test::TemporaryDirectory;

TEST(AllToAllRow, HasTheFieldsThatReadersKnow) {
  const auto json = test::parsed(to_json(example_all_to_all_row("fused", 120)));
  for (const char* field : {"suite", "case", "rung", "ranks", "median_us", "floor_us", "machine",
                            "commit", "command", "rank_us", "dispatch_send_us", "times_us"}) {
    EXPECT_TRUE(json.contains(field)) << field;
  }
  EXPECT_FALSE(json.contains("experts_us"));  // fused
  EXPECT_EQ(json["dispatch_receive_us"].size(), 2u);
}

TEST(AllToAllRow, ComesBackAsItWas) {
  AllToAllRow row = example_all_to_all_row("fused", 120);
  const std::string text = "[" + to_json(row).dump() + "]";
  const std::vector<AllToAllRow> rows = parse_rows<AllToAllRow>(text, "rows.json");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(to_json(rows[0]).dump(), to_json(row).dump());
  row.floor_us.reset();
  row.gpus.reset();
  row.receive_imbalance.reset();
  const std::string bare = to_json(row).dump();
  EXPECT_EQ(to_json(parse_rows<AllToAllRow>("[" + bare + "]", "rows.json")[0]).dump(), bare);
}

TEST(AllToAllRow, RefusesOthersAndSaysWhich) {
  const AllToAllRow good = example_all_to_all_row("fused", 120);
  expect_refused(good, "has no 'rung'", [](auto& json) { json.erase("rung"); });
  expect_refused(good, "'median_us' is 0", [](auto& json) { json["median_us"] = 0; });
  expect_refused(good, "'p90_us'", [](auto& json) { json["p90_us"] = 1; });
  expect_refused(good, "a time of each of the 2 ranks",
                 [](auto& json) { json["rank_us"] = {1.5}; });
  const std::vector<double> three = {1.5, 2.5, 3.5};
  expect_refused(good, "'combine_send_us'", [&](auto& json) { json["combine_send_us"] = three; });
}

TEST(AllToAllRow, ReplacesTheRowOfItsPoint) {
  const TemporaryDirectory directory;
  const auto file = directory / "rows.json";
  merge_rows(file, std::vector{example_all_to_all_row("fused", 120),
                               example_all_to_all_row("epochs", 110)});
  AllToAllRow shared = example_all_to_all_row("fused", 300);
  shared.gpus = 1;
  merge_rows(file, std::vector{example_all_to_all_row("fused", 100), shared});
  const std::vector<AllToAllRow> rows =
      parse_rows<AllToAllRow>(read_text(file, kMostFileBytes), file.string());
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].median_us, 100);
  EXPECT_EQ(rows[1].rung, "epochs");
  EXPECT_EQ(rows[2].gpus, 1);
}

}  // namespace
}  // namespace switchyard::results
