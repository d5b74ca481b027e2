// Rows of the suite all_to_all: written, read strictly, merged by their points.
#include "results/all_to_all_row.h"

#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "base/read_file.h"
#include "model/temporary_directory.h"
#include "results/example_all_to_all_row.h"
#include "switchyard/error.h"

namespace switchyard::results {
namespace {

using test::TemporaryDirectory;
using ::testing::HasSubstr;

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
  const auto message_of = [](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json json = test::parsed(to_json(example_all_to_all_row("fused", 120)));
    change(json);
    try {
      parse_rows<AllToAllRow>("[" + json.dump() + "]", "rows.json");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidFile);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message_of([](auto& json) { json.erase("rung"); }), HasSubstr("has no 'rung'"));
  EXPECT_THAT(message_of([](auto& json) { json["median_us"] = 0; }), HasSubstr("'median_us' is 0"));
  EXPECT_THAT(message_of([](auto& json) { json["p90_us"] = 1; }), HasSubstr("'p90_us'"));
  EXPECT_THAT(message_of([](auto& json) { json["rank_us"] = {1.5}; }),
              HasSubstr("a time of each of the 2 ranks"));
  EXPECT_THAT(message_of([](auto& json) {
                json["combine_send_us"] = {1.5, 2.5, 3.5};
              }),
              HasSubstr("'combine_send_us'"));
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
