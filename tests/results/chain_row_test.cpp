// Rows of the suite chain: written, read strictly, merged by their points.
#include "results/chain_row.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "base/read_file.h"
#include "model/temporary_directory.h"
#include "results/kept_rows.h"
#include "results/refused_rows.h"

namespace switchyard::results {
namespace {

ChainRow example_row() {
  return {.suite = "chain",
          .machine = "NVIDIA H200, 132 SMs, CUDA 13.0",
          .commit = "0123abc",
          .command = "switchyard bench chain",
          .model = "olmoe",
          .hidden = 2048,
          .intermediate = 1024,
          .experts = 64,
          .top_k = 8,
          .dtype = "bf16",
          .compute = "bf16",
          .tokens = 8,
          .layers = 48,
          .early_launch = true,
          .median_us = 30,
          .p10_us = 29,
          .p90_us = 31.5,
          .repeats = 3,
          .captures = 1,
          .rotation_copies = 4,
          .error = 0.001,
          .error_bound = 0.002,
          .times_us = {29, 30, 31.5}};
}

TEST(ChainRow, ComesBackAsItWas) {
  const std::string text = to_json(example_row()).dump();
  const auto json = test::parsed(to_json(example_row()));
  EXPECT_EQ(json["early_launch"], true);
  EXPECT_EQ(json["times_us"].size(), 3u);
  const std::vector<ChainRow> rows = parse_rows<ChainRow>("[" + text + "]", "chain.json");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(to_json(rows[0]).dump(), text);
}

TEST(ChainRow, RefusesOthersAndSaysWhich) {
  const ChainRow good = example_row();
  expect_refused(good, "has no 'layers'", [](auto& j) { j.erase("layers"); });
  expect_refused(good, "'early_launch'", [](auto& j) { j["early_launch"] = "yes"; });
  expect_refused(good, "'p90_us'", [](auto& j) { j["p90_us"] = 1; });
  expect_refused(good, "'captures'", [](auto& j) { j["captures"] = 0; });
}

// A chain with early launches does not replace the one without.
TEST(ChainRow, MergesByPoint) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "chain.json";
  ChainRow early = example_row(), apart = example_row();
  apart.early_launch = false;
  merge_rows(file, std::vector{apart, early});
  early.median_us = 29.5;
  merge_rows(file, std::vector{early});
  const std::vector<ChainRow> rows = parse_rows<ChainRow>(read_text(file, 1 << 20), "chain.json");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].median_us, 30);
  EXPECT_EQ(rows[1].median_us, 29.5);
}

TEST(ChainRow, TheKeptFileIsReadWithoutLoss) { EXPECT_GE(expect_kept<ChainRow>("chain"), 20u); }

}  // namespace
}  // namespace switchyard::results
