// How rows are written, and what happens to those that a file has.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "model/errors.h"
#include "model/temporary_directory.h"
#include "results/chain_row.h"
#include "results/example_all_to_all_row.h"
#include "results/example_row.h"
#include "results/exchange_row.h"
#include "results/grouped_row.h"
#include "results/hosts_row.h"
#include "results/kept_rows.h"
#include "results/late_row.h"
#include "results/ramp_row.h"
#include "results/row.h"
#include "switchyard/error.h"

namespace switchyard::results {
namespace {

using test::parsed;
using test::read_file;
using test::TemporaryDirectory;
using ::testing::ElementsAre;

nlohmann::json rows_of(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_file(path));
}

std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

// Deeper than a parser's stack.
std::string deep_json() {
  return R"([{"x":)" + std::string(200'000, '[') + std::string(200'000, ']') + "}]";
}

TEST(ResultRows, HaveTheFieldsOfTheirFormat) {
  Row row = example_row(8, 10);
  nlohmann::ordered_json json = parsed(to_json(row));
  for (const char* field :
       {"suite",        "machine",      "commit",   "command", "model",   "hidden",
        "intermediate", "experts",      "top_k",    "dtype",   "ranks",   "tokens_per_rank",
        "beta",         "median_us",    "p10_us",   "p90_us",  "repeats", "touched_bytes",
        "flops",        "nvlink_bytes", "floor_us", "rival",   "rival_us"}) {
    EXPECT_TRUE(json.contains(field)) << field;
  }
  EXPECT_TRUE(json["rival"].is_null());
  EXPECT_TRUE(json["rival_us"].is_null());
  EXPECT_EQ(json["median_us"], 11);
  EXPECT_EQ(json["median_us_no_graph"], 20);
  EXPECT_EQ(json["dtype"], "bf16");
  EXPECT_EQ(json["repeats"], 3);
  row.rival = Rival{"torch 1", 100, 99, 101};
  json = parsed(to_json(row));
  EXPECT_TRUE(json["expert_load"].is_null());
  row.expert_load = {0.12345, 1.87655};
  json = parsed(to_json(row));
  EXPECT_EQ(json["expert_load"], nlohmann::json({0.123, 1.877}));
  EXPECT_EQ(json["rival"], "torch 1");
  EXPECT_EQ(json["rival_us"], 100);
}

TEST(ResultRows, MergeReplacesTheSamePointOnly) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  Row first = example_row(8, 10);
  first.rival = Rival{"torch 1", 100, 99, 101};
  merge_rows(path, std::vector{first, example_row(32, 20)}, false);
  Row skewed = example_row(8, 30);
  skewed.beta = 0.5;
  Row given = example_row(8, 40);
  given.routing = "given";
  merge_rows(path, std::vector{example_row(8, 9), skewed, given}, true);

  nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0]["median_us"], 10);
  EXPECT_EQ(rows[0]["rival_us"], 100);  // kept
  EXPECT_EQ(rows[1]["median_us"], 21);
  EXPECT_EQ(rows[2]["beta"], 0.5);
  EXPECT_TRUE(rows[2]["rival_us"].is_null());
  EXPECT_EQ(rows[3]["routing"], "given");

  merge_rows(path, std::vector{example_row(8, 8)}, false);
  rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_TRUE(rows[0]["rival_us"].is_null());
}

TEST(ResultRows, MergeKeepsTypesApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  // As rows were before they told what they were computed in.
  nlohmann::ordered_json old = parsed(to_json(example_row(8, 10)));
  old.erase("compute");
  test::write_file(path, nlohmann::ordered_json::array({old}).dump());
  Row fp8 = example_row(8, 20);
  fp8.dtype = "fp8";
  fp8.compute = "fp8";
  Row expanded = fp8;
  expanded.compute = "bf16";
  merge_rows(path, std::vector{example_row(8, 9), fp8, expanded}, false);

  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["median_us"], 10);
  EXPECT_EQ(rows[0]["compute"], "bf16");
  EXPECT_EQ(rows[1]["dtype"], "fp8");
  EXPECT_EQ(rows[1]["compute"], "fp8");
  EXPECT_EQ(rows[2]["dtype"], "fp8");
  EXPECT_EQ(rows[2]["compute"], "bf16");
}

TEST(ResultRows, MergeKeepsRanksApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  Row two = example_row(8, 20);
  two.ranks = 2;
  two.nvlink_bytes = 4096;
  merge_rows(path, std::vector{example_row(8, 10), two}, false);
  two.median_us = two.p10_us = two.p90_us = 7;
  merge_rows(path, std::vector{two}, false);

  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["ranks"], 1);
  EXPECT_EQ(rows[0]["median_us"], 11);
  EXPECT_EQ(rows[1]["ranks"], 2);
  EXPECT_EQ(rows[1]["median_us"], 7);
  EXPECT_EQ(rows[1]["nvlink_bytes"], 4096);
}

TEST(ResultRows, MergeKeepsSizesApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  std::vector<Row> rows(4, example_row(8, 10));
  rows[1].hidden /= 2;
  rows[2].intermediate /= 2;
  rows[3].top_k /= 2;
  for (const Row& row : rows) merge_rows(path, std::vector{row}, false);
  EXPECT_EQ(rows_of(path).size(), 4u);
  merge_rows(path, rows, false);
  EXPECT_EQ(rows_of(path).size(), 4u);
}

TEST(ResultRows, MergesAtOnceLoseNothing) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  constexpr int kProcesses = 4, kMerges = 25;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    try {
      for (int i = 0; i < kMerges; ++i) {
        merge_rows(path, std::vector{example_row(1 + p * kMerges + i, 10)}, false);
      }
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(rows_of(path).size(), std::size_t{kProcesses * kMerges});
  EXPECT_THAT(names_in(directory.path()), ElementsAre("rows.json"));
}

TEST(ResultRows, TextThatIsNotUtf8IsKept) {
  const TemporaryDirectory directory;
  Row row = example_row(8, 10);
  row.commit = "a\xff";
  merge_rows(directory / "rows.json", std::vector{row}, false);
  EXPECT_EQ(rows_of(directory / "rows.json")[0]["commit"], "a\ufffd");
}

TEST(ResultRows, MergeRefusesOtherFiles) {
  const TemporaryDirectory directory;
  for (const std::string& text : {std::string("{}"), std::string("[1]"), std::string("not JSON"),
                                  std::string(), deep_json()}) {
    test::write_file(directory / "rows.json", text);
    EXPECT_THROW(merge_rows(directory / "rows.json", std::vector{example_row(8, 10)}, false), Error)
        << text;
    EXPECT_EQ(read_file(directory / "rows.json"), text);
  }
}

// A row that is none would be lost with the next merge, or make every report fail.
TEST(ResultRows, MergeRefusesRowsThatAreNone) {
  const TemporaryDirectory directory;
  nlohmann::ordered_json wrong = parsed(to_json(example_row(8, 10)));
  wrong["median_us"] = -1;
  const std::string text = nlohmann::ordered_json::array({wrong}).dump();
  test::write_file(directory / "rows.json", text);
  EXPECT_THROW(require_mergeable<Row>(directory / "rows.json"), Error);
  EXPECT_THROW(merge_rows(directory / "rows.json", std::vector{example_row(32, 10)}, false), Error);
  EXPECT_EQ(read_file(directory / "rows.json"), text);
}

// Fields of later versions, or a person's own notes.
TEST(ResultRows, MergeKeepsUnknownFieldsOfOtherPoints) {
  const TemporaryDirectory directory;
  nlohmann::ordered_json noted = parsed(to_json(example_row(8, 10)));
  noted["note"] = "fan at full speed";
  test::write_file(directory / "rows.json", nlohmann::ordered_json::array({noted}).dump());
  merge_rows(directory / "rows.json", std::vector{example_row(32, 10)}, false);
  const nlohmann::json rows = rows_of(directory / "rows.json");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["note"], "fan at full speed");
}

TEST(ResultRows, AnEmptyListCanBeMergedInto) {
  const TemporaryDirectory directory;
  test::write_file(directory / "rows.json", "[]");
  merge_rows(directory / "rows.json", std::vector{example_row(8, 10)}, false);
  EXPECT_EQ(rows_of(directory / "rows.json").size(), 1u);
}

// Readers find what writers wrote: no field has a second owner.
TEST(ResultRows, AreReadAsTheyWereWritten) {
  Row row = example_row(8, 10);
  row.date = "2026-11-20";
  row.rival = Rival{"torch 1", 100, 99, 101};
  row.beta_reached = 0.5125;
  row.experts_hit = 12;
  row.expert_load = {0, 0.5, 2.5};
  row.rotation_copies = 2;
  row.rotation_passes = 8;
  row.graph_nodes = 1;
  row.error = 0.001;
  row.error_bound = 0.004;
  const nlohmann::ordered_json json = parsed(to_json(row));
  const Row again =
      parse_rows<Row>(nlohmann::ordered_json::array({json}).dump(), "rows.json").at(0);
  EXPECT_EQ(parsed(to_json(again)), json);
  EXPECT_EQ(point_of(again), point_of(row));
  EXPECT_EQ(json.size(), 39u);  // every field of Row, its rival as four
}

GroupedRow grouped_row(const std::string& implementation, double median_us) {
  GroupedRow row;
  row.suite = "grouped";
  row.machine = "a machine";
  row.commit = "abc1234";
  row.command = "switchyard bench --suite grouped";
  row.implementation = implementation;
  row.experts = 32;
  row.n = 4096;
  row.k = 7168;
  row.rows_per_expert = 4;
  row.dtype = row.compute = "bf16";
  row.rows = 128;
  row.median_us = median_us;
  row.p10_us = median_us - 1;
  row.p90_us = median_us + 1;
  row.repeats = 3;
  row.touched_bytes = 1000;
  row.flops = 2000;
  row.times_us = {median_us - 1, median_us, median_us + 1};
  return row;
}

TEST(GroupedRows, MergeByPointAndImplementation) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  GroupedRow drawn = grouped_row("switchyard", 30);
  drawn.beta = 0.9;
  GroupedRow gated = grouped_row("switchyard", 40);
  gated.activation = "swiglu";
  merge_rows(path, std::vector{grouped_row("switchyard", 10), grouped_row("torch", 20), drawn});
  merge_rows(path, std::vector{grouped_row("switchyard", 9), gated});
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0]["median_us"], 9);
  EXPECT_EQ(rows[1]["implementation"], "torch");
  EXPECT_EQ(rows[1]["median_us"], 20);
  EXPECT_EQ(rows[2]["beta"], 0.9);
  EXPECT_EQ(rows[3]["activation"], "swiglu");
}

TEST(GroupedRows, AreReadAsTheyWereWritten) {
  GroupedRow row = grouped_row("switchyard", 10);
  row.beta = 0.9;
  row.beta_reached = 0.8987;
  row.experts_hit = 31;
  row.floor_us = 9.5;
  row.median_us_no_graph = 12;
  row.rotation_copies = 2;
  row.rotation_passes = 8;
  row.error = 0.001;
  row.error_bound = 0.004;
  row.times_us_no_graph = {12, 12, 12};
  const nlohmann::ordered_json json = parsed(to_json(row));
  const GroupedRow again =
      parse_rows<GroupedRow>(nlohmann::ordered_json::array({json}).dump(), "rows.json").at(0);
  EXPECT_EQ(parsed(to_json(again)), json);
  EXPECT_EQ(point_of(again), point_of(row));
  EXPECT_EQ(json.size(), 30u);  // every field of GroupedRow
  EXPECT_DOUBLE_EQ(*again.share_of_roof(), 0.95);
}

TEST(GroupedRows, AndRowsOfLayersAreNotTakenForEachOther) {
  const TemporaryDirectory directory;
  merge_rows(directory / "grouped.json", std::vector{grouped_row("switchyard", 10)});
  merge_rows(directory / "layers.json", std::vector{example_row(8, 10)}, false);
  EXPECT_THROW(require_mergeable<Row>(directory / "grouped.json"), Error);
  EXPECT_THROW(require_mergeable<GroupedRow>(directory / "layers.json"), Error);
  EXPECT_NO_THROW(require_mergeable<GroupedRow>(directory / "grouped.json"));
  GroupedRow wrong = grouped_row("switchyard", 10);
  wrong.p10_us = 11;
  const std::string text = nlohmann::ordered_json::array({parsed(to_json(wrong))}).dump();
  EXPECT_THROW(parse_rows<GroupedRow>(text, "rows.json"), Error);
}

// The files of this repository, which were written by earlier versions.
TEST(ResultRows, KeptFilesAreReadWithoutLoss) {
  std::size_t num_rows = 0;
  for (const char* name : {"one_gpu_bf16", "one_gpu_fp8", "one_gpu_fp8_more", "one_gpu_thesis",
                           "ep_bf16", "ep_fp8", "ep_thesis", "ep_skewed", "thesis", "products",
                           "products_cold", "scaling", "beside_published", "four_bit"}) {
    num_rows += expect_kept<Row>(name);
  }
  EXPECT_GT(num_rows, 300u);
}

// Otherwise an H100's row would replace an H200's, under a title that names the H200.
TEST(ResultRows, CardsHaveRowsOfTheirOwn) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  Row h200 = example_row(8, 10), h100 = h200;
  h200.machine = "2 x NVIDIA H200, 132 SMs, CUDA 13.0";
  h100.machine = "2 x NVIDIA H100 80GB HBM3, 132 SMs, CUDA 13.0";
  merge_rows(path, std::vector{h200, h100});
  ASSERT_EQ(rows_of(path).size(), 2u);
  h200.machine = "2 x NVIDIA H200, 132 SMs, CUDA 13.1";
  h200.median_us = h200.p10_us = h200.p90_us = 7;
  merge_rows(path, std::vector{h200});
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["median_us"], 7);
  EXPECT_EQ(rows[0]["machine"], h200.machine);
  EXPECT_EQ(rows[1]["machine"], h100.machine);
  for (const auto& [machine, card] : {
           std::pair{"NVIDIA H200, 132 SMs, CUDA 13.0", "NVIDIA H200"},
           {"16 x NVIDIA H200", "NVIDIA H200"},
           {"AMD EPYC, 2 hardware threads", "AMD EPYC"},
           {"A x B, 2 SMs", "A x B"},
           {"", ""},
       }) {
    EXPECT_EQ(card_of(machine), card);
  }
}

template <typename RowType>
void expect_only_own(const std::vector<std::pair<std::string, std::string>>& all) {
  for (const auto& [kind, text] : all) {
    SCOPED_TRACE(kind + " read as " + RowType::kKind);
    if (kind == RowType::kKind) {
      EXPECT_EQ(parse_rows<RowType>(text, "a.json").size(), 1u);
    } else {
      EXPECT_ERROR(parse_rows<RowType>(text, "a.json"), kInvalidFile, "a.json", RowType::kKind);
    }
  }
}
template <typename... RowTypes>
void expect_only_own_of_each(const RowTypes&... rows) {
  const std::vector<std::pair<std::string, std::string>> all = {
      {RowTypes::kKind, "[" + to_json(rows).dump() + "]"}...};
  (expect_only_own<RowTypes>(all), ...);
}
template <typename RowType>
RowType named(RowType row) {
  row.machine = "m";
  row.commit = "c";
  row.command = "switchyard";
  return row;
}

TEST(ResultRows, KindsAreToldApart) {
  GroupedRow grouped = grouped_row("switchyard", 10);
  ExchangeRow exchange = named(ExchangeRow{.suite = "exchange", .stage = "combine"});
  exchange.dtype = "bf16";
  exchange.hidden = exchange.experts = exchange.top_k = exchange.ranks = exchange.repeats = 1;
  exchange.tokens_per_rank = 1;
  exchange.median_us = exchange.p10_us = exchange.p90_us = 1;
  HostsRow hosts = named(HostsRow{.suite = "hosts", .engine = "cpu"});
  hosts.stage = hosts.link = "flag";
  hosts.hosts = hosts.ranks = hosts.repeats = 1;
  hosts.median_us = hosts.p10_us = hosts.p90_us = 1;
  LateRow late = named(LateRow{.suite = "late", .engine = "cpu"});
  late.policy = "works";
  late.model = late.dtype = "x";
  late.ranks = late.tokens_per_rank = late.repeats = 1;
  late.prompt_us = late.median_us = late.p10_us = late.p90_us = 1;
  ChainRow chain = named(ChainRow{.suite = "chain"});
  chain.model = chain.dtype = chain.compute = "x";
  chain.hidden = chain.intermediate = chain.experts = chain.top_k = 1;
  chain.tokens = chain.layers = chain.repeats = chain.captures = 1;
  chain.median_us = chain.p10_us = chain.p90_us = 1;
  RampRow ramp = named(RampRow{});
  ramp.kernel = ramp.model = ramp.generator = ramp.form = ramp.best = ramp.chosen = "x";
  ramp.experts = ramp.tokens_per_rank = 1;
  ramp.exhaustive_us = ramp.chosen_us = ramp.predicted_us = 1;
  RegionRow region = named(RegionRow{});
  region.kernel = region.model = region.generator = region.prediction = "x";
  region.points = 1;
  expect_only_own_of_each(example_row(8, 10), grouped, exchange, hosts, late, chain, ramp, region,
                          example_all_to_all_row("fused", 120));
}

}  // namespace
}  // namespace switchyard::results
