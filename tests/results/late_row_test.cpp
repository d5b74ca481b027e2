// Rows of the suite late: written, read strictly, merged by their points.
#include "results/late_row.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "base/read_file.h"
#include "model/temporary_directory.h"
#include "results/kept_rows.h"
#include "results/refused_rows.h"

namespace switchyard::results {
namespace {

LateRow example_row() {
  return {.suite = "late",
          .machine = "AMD EPYC, 2 hardware threads",
          .commit = "0123abc",
          .command = "switchyard bench --suite late",
          .engine = "cpu",
          .policy = "works",
          .model = "olmoe",
          .dtype = "bf16",
          .ranks = 2,
          .tokens_per_rank = 8,
          .late_us = 2000,
          .prompt_us = 500,
          .median_us = 300,
          .p10_us = 250,
          .p90_us = 400,
          .repeats = 20,
          .own_share = 0.5,
          .early_share = 0.25};
}

TEST(LateRow, ComesBackAsItWas) {
  LateRow row = example_row();
  const auto json = test::parsed(to_json(row));
  for (const char* field : {"suite", "engine", "model", "ranks", "tokens_per_rank", "late_us",
                            "prompt_us", "after_start_us", "own_share"}) {
    EXPECT_TRUE(json.contains(field)) << field;
  }
  EXPECT_EQ(json["after_start_us"], 300);
  for (const bool jitter : {false, true}) {
    row.jitter = jitter;
    if (jitter) row.early_share.reset();
    const std::string text = to_json(row).dump();
    const std::vector<LateRow> rows = parse_rows<LateRow>("[" + text + "]", "late.json");
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(to_json(rows[0]).dump(), text);
  }
}

TEST(LateRow, RefusesOthersAndSaysWhich) {
  const LateRow good = example_row();
  expect_refused(good, "has no 'policy'", [](auto& j) { j.erase("policy"); });
  expect_refused(good, "'policy'", [](auto& j) { j["policy"] = "sleeps"; });
  expect_refused(good, "'engine'", [](auto& j) { j["engine"] = "tpu"; });
  expect_refused(good, "'own_share'", [](auto& j) { j["own_share"] = 1.5; });
  expect_refused(good, "'p90_us'", [](auto& j) { j["p90_us"] = 1; });
  expect_refused(good, "'late_us'", [](auto& j) { j["late_us"] = -1; });
}

TEST(LateRow, MergesByPoint) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "late.json";
  LateRow row = example_row(), other = example_row(), jitter = example_row();
  other.policy = "waits";
  jitter.jitter = true;
  merge_rows(file, std::vector{row, other, jitter});
  row.median_us = 310;
  merge_rows(file, std::vector{row});
  const std::vector<LateRow> rows = parse_rows<LateRow>(read_text(file, 1 << 20), "late.json");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].median_us, 310);
  EXPECT_EQ(rows[1].median_us, 300);
  EXPECT_NO_THROW(require_mergeable<LateRow>(file));
}

// The file of this repository.
TEST(LateRow, TheKeptFileIsReadWithoutLoss) { EXPECT_GE(expect_kept<LateRow>("late"), 56u); }

}  // namespace
}  // namespace switchyard::results
