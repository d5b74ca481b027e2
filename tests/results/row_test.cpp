// The files of rows that are accepted, and how everything else is refused.
#include "results/row.h"

#include <gmock/gmock.h>

#include "base/parsed.h"
#include "model/errors.h"
#include "model/temporary_directory.h"
#include "results/published.h"
#include "results/rows_of_tests.h"

namespace switchyard::results {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

Row parsed(const json& row) {
  return parse_rows<Row>(json::array({row}).dump(), "rows.json").at(0);
}

TEST(ResultRows, AreReadWhole) {
  const Row row = parsed(good_row());
  EXPECT_EQ(row.suite, "one_gpu_bf16");
  EXPECT_EQ(row.machine, "NVIDIA H200, 132 SMs, CUDA 13.0");
  EXPECT_EQ(row.commit, "11782be");
  EXPECT_EQ(row.command, "switchyard bench --suite one_gpu_bf16");
  EXPECT_EQ(row.date, "");
  EXPECT_EQ(row.model, "olmoe");
  EXPECT_EQ(row.hidden, 2048);
  EXPECT_EQ(row.intermediate, 1024);
  EXPECT_EQ(row.experts, 64);
  EXPECT_EQ(row.top_k, 8);
  EXPECT_EQ(row.ranks, 1);
  EXPECT_EQ(row.tokens_per_rank, 512);
  EXPECT_EQ(row.beta, 0.5);
  EXPECT_EQ(row.beta_reached, 0.51);
  EXPECT_EQ(row.median_us, 120);
  EXPECT_EQ(row.p10_us, 110.5);
  EXPECT_EQ(row.p90_us, 130.25);
  EXPECT_EQ(row.repeats, 20);
  EXPECT_EQ(row.touched_bytes, 100663296);
  EXPECT_EQ(row.flops, 51539607552);
  EXPECT_EQ(row.time_over_floor(), 2);
  ASSERT_TRUE(row.rival.has_value());
  EXPECT_EQ(row.rival->name, "torch 2.11.0 compiled");
  EXPECT_EQ(row.rival->p10_us, 230);
  EXPECT_EQ(row.rival->p90_us, std::nullopt);
  EXPECT_EQ(row.speed_up(), 2);
  EXPECT_THAT(row.expert_load, ElementsAre(0, 0.5, 2.5));
}

// Rows of the suite thesis say that the gate is in the time, which must be true.
TEST(ResultRows, TheGateIsAsTheRoutingSays) {
  EXPECT_FALSE(parsed(good_row()).gate.has_value());
  const Row row = parsed(good_row_with("gate", true));
  EXPECT_EQ(row.gate, true);
  EXPECT_EQ(test::parsed(to_json(row))["gate"], true);
  json given = good_row_with("routing", "given");
  given["gate"] = true;
  EXPECT_THROW(parsed(given), Error);
}

// Rows of four-bit weights name the two types again, as their suites' readers expect.
TEST(ResultRows, FourBitRowsNameTheirTypesAgain) {
  EXPECT_EQ(parsed(good_row()).weights, "");
  json four = good_row_with("dtype", "mxfp4");
  four["compute"] = "fp8";
  four["weights"] = "mxfp4";
  four["tokens_in"] = "fp8";
  const Row row = parsed(four);
  EXPECT_EQ(row.weights, "mxfp4");
  EXPECT_EQ(row.tokens_in, "fp8");
  EXPECT_EQ(test::parsed(to_json(row))["weights"], "mxfp4");
  for (const char* field : {"weights", "tokens_in"}) {
    json other = four;
    other[field] = "bf16";
    EXPECT_ERROR(parse_rows<Row>(json::array({other}).dump(), "a.json"), kInvalidFile, field);
  }
}

TEST(ResultRows, OlderAndFloorlessRowsLackFields) {
  json row = good_row();
  for (const char* field : {"compute", "routing", "beta_reached", "expert_load"}) row.erase(field);
  for (const char* field : {"floor_us", "rival", "rival_us"}) row[field] = nullptr;
  const Row old = parsed(row);
  EXPECT_EQ(old.compute, "bf16");
  EXPECT_EQ(old.routing, "gate");
  EXPECT_EQ(old.beta_reached, std::nullopt);
  EXPECT_EQ(old.time_over_floor(), std::nullopt);
  EXPECT_EQ(old.speed_up(), std::nullopt);
  EXPECT_THAT(old.expert_load, IsEmpty());
  EXPECT_EQ(parsed(good_row_with("date", "2026-11-20")).date, "2026-11-20");
}

TEST(ResultRows, WhatIsNoListOfRowsIsRefused) {
  const auto refused = [](const std::string& text, std::initializer_list<const char*> parts) {
    EXPECT_ERROR(parse_rows<Row>(text, "a.json"), kInvalidFile, "a.json");
    test::expect_error([&] { parse_rows<Row>(text, "a.json"); }, ErrorCode::kInvalidFile, parts);
  };
  refused("", {"not JSON", "switchyard bench --json"});
  refused("[{\"suite\": ", {"not JSON"});
  refused("[1e999]", {"not JSON"});
  refused(std::string(1'000'000, '[') + std::string(1'000'000, ']'), {"nests too deep at byte 64"});
  refused("{}", {"is not a list of rows, but {}", "switchyard bench --json"});
  refused("3", {"is not a list of rows, but 3", "switchyard bench --json"});
  refused("[]", {"empty list", "switchyard bench --json"});
  refused("[3]", {"row 1: is not an object, but 3"});
  refused(R"({"traceEvents": []})", {"is a trace", "--trace"});
  refused(R"([{"ph": "X", "name": "gate"}])", {"is a trace", "--trace"});
  refused(R"({"context": {}, "benchmarks": []})", {"Google Benchmark"});
}

TEST(ResultRows, EveryFieldIsRequired) {
  for (const char* field :
       {"suite",  "machine",         "commit",        "command",   "model",
        "hidden", "intermediate",    "experts",       "top_k",     "dtype",
        "ranks",  "tokens_per_rank", "beta",          "median_us", "p10_us",
        "p90_us", "repeats",         "touched_bytes", "flops",     "nvlink_bytes"}) {
    json row = good_row();
    row.erase(field);
    const std::string named = std::string("row 2: has no '") + field + "'";
    const std::string text = json::array({good_row(), row}).dump();
    EXPECT_ERROR(parse_rows<Row>(text, "a.json"), kInvalidFile, "a.json", named.c_str(),
                 "switchyard bench");
  }
}

TEST(ResultRows, EveryFieldHasItsDomain) {
  const std::vector<std::pair<const char*, json>> cases = {
      {"suite", ""},
      {"machine", 3},
      {"model", nullptr},
      {"hidden", 0},
      {"hidden", 1.5},
      {"experts", "64"},
      {"ranks", -1},
      {"tokens_per_rank", 0},
      {"beta", 1.5},
      {"beta", "1"},
      {"median_us", 0},
      {"median_us", -3},
      {"p10_us", nullptr},
      {"p10_us", 120.5},
      {"p90_us", 119.5},
      {"repeats", 0},
      {"touched_bytes", -1},
      {"flops", 1e300},
      {"floor_us", 0},
      {"floor_us", "60"},
      {"rival", nullptr},
      {"rival_us", nullptr},
      {"rival_p10_us", false},
      {"beta_reached", 2},
      {"routing", ""},
      {"expert_load", 1},
      {"expert_load", json::array()},
      {"date", 20261120},
      {"expert_load", {1, 0}},
      {"expert_load", json::array({-1, 2})},
      {"compute", 8},
      {"expert_load", json(std::vector<int>(65, 1))}};
  for (const auto& [field, value] : cases) {
    const std::string named = std::string("row 1: '") + field + "' is ";
    const std::string text = json::array({good_row_with(field, value)}).dump();
    SCOPED_TRACE(text);
    EXPECT_ERROR(parse_rows<Row>(text, "a.json"), kInvalidFile, "a.json", named.c_str(),
                 "switchyard bench");
  }
}

TEST(ResultRows, OfAllFilesInOrder) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path paths[] = {directory / "a.json", directory / "b.json"};
  test::write_file(paths[0], json::array({good_row(), good_row_with("tokens_per_rank", 8)}).dump());
  test::write_file(paths[1], json::array({good_row_with("tokens_per_rank", 1)}).dump());
  const std::vector<Row> rows = read_rows(paths);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1].tokens_per_rank, 8);
  EXPECT_EQ(rows[2].tokens_per_rank, 1);
}

TEST(ResultRows, APointIsThereOnce) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path paths[] = {directory / "a.json", directory / "b.json"};
  test::write_file(paths[0], json::array({good_row()}).dump());
  test::write_file(paths[1],
                   json::array({good_row_with("beta", 1), good_row_with("median_us", 121)}).dump());
  EXPECT_ERROR(read_rows(paths), kInvalidFile, "b.json row 2", "a.json row 1", "olmoe",
               "512 tokens", "only one");
}

TEST(ResultRows, WhatOthersPublish) {
  const json good = {{"rival", "another"}, {"source", "a paper"},
                     {"model", "olmoe"},   {"experts", 64},
                     {"ranks", 8},         {"time_us", {{"64", 30}, {"8", 20.5}}}};
  const std::vector<Published> all = parse_published(json::array({good}).dump(), "p.json");
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].compute, "");
  EXPECT_THAT(all[0].time_us, ElementsAre(Pair(8, 20.5), Pair(64, 30)));

  const auto with = [&](const char* field, const json& value) {
    json series = good;
    series[field] = value;
    return json::array({series}).dump();
  };
  EXPECT_EQ(parse_published(with("compute", "fp8"), "p.json")[0].compute, "fp8");
  for (const json& wrong : {json(7), json::object(), json{{"8", 0}}, json{{"0", 5}},
                            json{{"8 tokens", 5}}, json{{"8", "5"}}, json{{"", 5}}}) {
    EXPECT_ERROR(parse_published(with("time_us", wrong), "p.json"), kInvalidFile, "p.json row 1",
                 "'time_us'", "tokens per rank");
  }
  for (const char* field : {"rival", "source", "model", "experts", "ranks", "time_us"}) {
    json series = good;
    series.erase(field);
    EXPECT_ERROR(parse_published(json::array({series}).dump(), "p.json"), kInvalidFile, "row 1",
                 field);
  }
  for (const char* text : {"{}", "[]", "7", "[", ""}) {
    EXPECT_ERROR(parse_published(text, "p.json"), kInvalidFile, "p.json", "results/published.json");
  }
}

TEST(ResultRows, FilesThatAreNotThere) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path absent[] = {directory / "none.json"};
  EXPECT_ERROR(read_rows(absent), kInvalidFile, "none.json", "check its name");
  const std::filesystem::path folder[] = {directory.path()};
  EXPECT_ERROR(read_rows(folder), kInvalidFile, "is a directory");
}

}  // namespace
}  // namespace switchyard::results
