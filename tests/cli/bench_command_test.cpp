// `switchyard bench`, as far as it goes without a GPU: what it measures, what it compares with, and
// what it keeps.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "base/join.h"
#include "bench/suite.h"
#include "cli/command.h"
#include "gpu/device.h"
#include "machine/gpu_facts.h"

namespace switchyard::cli {
namespace {

nlohmann::json rows_of(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_file(path));
}

// Deeper than a parser's stack.
std::string deep_json() {
  return R"([{"x":)" + std::string(200'000, '[') + std::string(200'000, ']') + "}]";
}

// Each test has a place for rows.
class Bench : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;
  const std::string path = (directory_ / "rows.json").string();
};

// Measures on the processor, where there need be no GPU.
const Arguments kBench = join(
    {"bench", "--backend", "cpu", "--tokens", "1,64", "--balancedness", "1,0.8", "--repeat", "3"},
    kTiny);

TEST_F(Bench, MeasuresVerifiesAndKeepsRows) {
  const Completed done =
      run_well(join(kBench, {"--verify", "--json", path, "--commit", "abc1234"}));
  EXPECT_THAT(done.out, HasSubstr("olmoe"));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["suite"], "custom");
    EXPECT_EQ(row["commit"], "abc1234");
    EXPECT_EQ(row["experts"], 16);
    EXPECT_EQ(row["repeats"], 3);
    EXPECT_EQ(row["times_us"].size(), 3u);
    EXPECT_GT(row["median_us"], 0);
    EXPECT_TRUE(row["floor_us"].is_null());  // of another machine
    EXPECT_LE(row["error"], row["error_bound"]);
    EXPECT_THAT(row["command"].get<std::string>(), StartsWith("switchyard bench --backend cpu"));
    EXPECT_THAT(row["command"].get<std::string>(), Not(HasSubstr("--commit")));
    EXPECT_THAT(row["command"].get<std::string>(), Not(HasSubstr(path)));
    EXPECT_EQ(row["flops"], row["tokens_per_rank"].get<int>() * 8 * 2 * 3 * 64 * 32);
  }
  EXPECT_NEAR(rows[1]["beta_reached"], 1, 0.02);
  EXPECT_NEAR(rows[3]["beta_reached"], 0.8, 0.02);
  EXPECT_LT(rows[3]["touched_bytes"], rows[1]["touched_bytes"]);
}

TEST_F(Bench, GivenRoutingIsAPointOfItsOwn) {
  run_well(join(kBench, {"--json", path}));
  run_well(join(kBench, {"--json", path, "--given-routing", "--verify"}));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 8u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i]["beta_reached"], rows[i + 4]["beta_reached"]);
    EXPECT_EQ(rows[i + 4]["routing"], "given");
  }
}

TEST_F(Bench, WritesTheRoutingForRivals) {
  const Arguments routed =
      join({"bench", "--backend", "cpu", "--tokens", "1,64", "--repeat", "3"}, kTiny);
  const std::filesystem::path folder = directory_ / "routing";
  std::filesystem::create_directory(folder);
  run_well(join(routed, {"--given-routing", "--routing-to", folder}));
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++files;
    std::ifstream file(entry.path(), std::ios::binary);
    std::array<std::int32_t, 8> ids{};
    int tokens = 0;
    for (; file.read(reinterpret_cast<char*>(ids.data()), sizeof ids); ++tokens) {
      EXPECT_THAT(ids, ::testing::Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(16))));
      EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), ids.size());
    }
    EXPECT_EQ(entry.path().filename(), "olmoe-bf16-1x" + std::to_string(tokens) + ".i32");
  }
  EXPECT_EQ(files, 2);
}

TEST_F(Bench, Fp8WeightsInBf16Arithmetic) {
  const Arguments fp8 = {"--dtype", "fp8", "--compute", "bf16"};
  const Completed done = run_well(join(join(kBench, fp8), {"--verify", "--json", path}));
  EXPECT_THAT(done.out, HasSubstr("weights in fp8, arithmetic in bf16"));
  // Gate, up and down of an expert, each with one scale: no dimension is beyond 128.
  constexpr int kExpertBytes = 3 * (64 * 32 + 4);
  for (const nlohmann::json& row : rows_of(path)) {
    EXPECT_EQ(row["dtype"], "fp8");
    EXPECT_EQ(row["compute"], "bf16");
    EXPECT_EQ(row["touched_bytes"], row["experts_hit"].get<int>() * kExpertBytes);
    EXPECT_LE(row["error"], row["error_bound"]);
  }
}

TEST_F(Bench, Fp8Arithmetic) {
  run_well(join(kBench, {"--dtype", "fp8", "--verify", "--json", path}));
  for (const nlohmann::json& row : rows_of(path)) {
    EXPECT_EQ(row["dtype"], "fp8");
    EXPECT_EQ(row["compute"], "fp8");
    EXPECT_GT(row["error"], 0);
    EXPECT_LE(row["error"], row["error_bound"]);
  }
}

TEST_F(Bench, FourBitWeights) {
  // Gate, up and down of an expert: half a byte for each element, and one or two for each group.
  constexpr int kElements = 3 * 64 * 32, kGroups = kElements / 32;
  const auto expect_rows = [&](const Arguments& options, const char* weights, const char* tokens_in,
                               int expert_bytes) {
    const std::string file = path + weights + tokens_in;
    const Completed done = run_well(join(join(kBench, options), {"--verify", "--json", file}));
    EXPECT_THAT(done.out, HasSubstr(std::string("weights in ") + weights));
    for (const nlohmann::json& row : rows_of(file)) {
      EXPECT_EQ(row["dtype"], weights);
      EXPECT_EQ(row["weights"], weights);
      EXPECT_EQ(row["compute"], tokens_in);
      EXPECT_EQ(row["tokens_in"], tokens_in);
      EXPECT_TRUE(row["rival_us"].is_null());
      EXPECT_EQ(row["touched_bytes"], row["experts_hit"].get<int>() * expert_bytes);
      EXPECT_LE(row["error"], row["error_bound"]);
    }
  };
  expect_rows({"--dtype", "mxfp4"}, "mxfp4", "bf16", kElements / 2 + kGroups);
  expect_rows({"--dtype", "mxfp4", "--compute", "fp8"}, "mxfp4", "fp8", kElements / 2 + kGroups);
  expect_rows({"--dtype", "int4"}, "int4", "bf16", kElements / 2 + 2 * kGroups);
}

TEST_F(Bench, ARivalThatFailsLeavesTheRows) {
  const Completed done =
      run_switchyard(join(kBench, {"--json", path, "--against", "torch", "--torch-script",
                                   SWITCHYARD_COMMAND, "--python", "/bin/false"}));
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.err, HasSubstr("the rival: "));
  EXPECT_THAT(done.err, HasSubstr("no time of the rival at 4 of 4 points"));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  for (const nlohmann::json& row : rows) {
    for (const char* field : {"rival", "rival_us", "rival_p10_us", "rival_p90_us"}) {
      EXPECT_TRUE(row[field].is_null()) << field;
    }
  }
}

void expect_refused(const Arguments& arguments, const std::vector<std::string>& parts,
                    const std::string& code = "invalid_argument") {
  expect_error(join({"bench"}, arguments), 2, code, parts);
}

TEST_F(Bench, RefusesWhatMakesNoSense) {
  expect_refused({}, {"--suite", "--model"});
  expect_refused({"--suite", "two_gpus"}, {"'two_gpus'", "one_gpu_bf16"});
  expect_refused({"--suite", "one_gpu_bf16", "--tokens", "7"}, {"has 7", "8192"});
  expect_refused({"--suite", "one_gpu_bf16", "--model", "dbrx"}, {"dbrx", "olmoe"});
  expect_refused({"--suite", "one_gpu_bf16", "--experts", "4"}, {"a suite is what it is"});
  expect_refused({"--suite", "one_gpu_bf16", "--dtype", "fp8"},
                 {"--dtype is fp8", "one_gpu_bf16 is measured in bf16"});
  expect_refused({"--suite", "one_gpu_fp8", "--dtype", "bf16"},
                 {"--dtype is bf16", "one_gpu_fp8 is measured in fp8"});
  expect_refused({"--suite", "one_gpu_fp8_more", "--compute", "bf16"},
                 {"--compute is bf16", "one_gpu_fp8_more is measured in fp8"});
  expect_refused({"--model", "olmoe", "--dtype", "int8"}, {"--dtype is 'int8'", "fp8"});
  expect_refused({"--model", "olmoe", "--compute", "f16"}, {"--compute is 'f16'", "fp8"});
  expect_refused({"--model", "olmoe", "--compute", "fp8"},
                 {"they are bf16", "--dtype fp8", "--compute bf16"});
  expect_refused({"--model", "olmoe", "--dtype", "f32", "--against", "torch"},
                 {"--dtype is f32", "bf16 or fp8"});
  expect_refused({"--model", "nonesuch"}, {"nonesuch"});
  expect_refused({"--model", "olmoe,"}, {"'olmoe,'", "single commas"});
  expect_refused({"--model", "olmoe", "--tokens", "8,x"}, {"--tokens is '8,x'"});
  expect_refused({"--model", "olmoe", "--tokens", "0"}, {"--tokens is '0'"});
  expect_refused({"--model", "olmoe", "--balancedness", "2"}, {"--balancedness is '2'"});
  expect_refused({"--model", "olmoe", "--repeat", "0"}, {"--repeat is '0'"});
  expect_refused({"--model", "olmoe", "--graph", "--no-graph"}, {"--graph", "--no-graph"});
  expect_refused({"--model", "olmoe", "--against", "tea"}, {"'tea'", "torch"});
  expect_refused({"--model", "olmoe", "--against", "torch", "--torch-script", "/none"}, {"/none"});
  expect_refused({"--model", "olmoe", "--against", "torch", "--given-routing"},
                 {"--given-routing", "--against"});
  expect_refused({"--model", "olmoe", "--torch-limit", "0"}, {"--torch-limit is '0'"});
  expect_refused({"--model", "olmoe", "--given-routing", "--gated"},
                 {"--given-routing", "--gated"});
  expect_refused({"--model", "olmoe", "--json", "/no/such/place.json"}, {"/no/such"});
  expect_refused({"--model", "olmoe", "--routing-to", "/tmp"}, {"--routing-to", "--given-routing"});
  expect_refused({"--model", "olmoe", "--given-routing", "--routing-to", "/no/such"},
                 {"--routing-to is '/no/such'", "no folder"});
  expect_refused({"--suite", "astero", "--dtype", "f32"},
                 {"--dtype is f32", "astero is measured in fp8, bf16"});
  expect_refused({"--suite", "astero", "--dtype", "fp8", "--compute", "bf16"},
                 {"--compute is bf16", "astero is measured in"});
  expect_refused({"--suite", "astero", "--against", "torch", "--torch-script", SWITCHYARD_COMMAND},
                 {"deepseek-v3", "shared expert"});
}

TEST_F(Bench, FourBitSuiteMeasuresEachModelInItsTypes) {
  const Arguments suite = {"bench", "--suite", "four_bit", "--backend", "cpu", "--quick"};
  const Completed done = run_well(join(suite, {"--repeat", "1", "--json", path}));
  EXPECT_THAT(done.out, HasSubstr("--quick on the processor: gpt-oss-20b, tokens 8, in mxfp4"));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["suite"], "four_bit");
  EXPECT_EQ(rows[0]["routing"], "given");
  EXPECT_EQ(rows[0]["weights"], "mxfp4");
  EXPECT_EQ(rows[0]["tokens_in"], "bf16");
  expect_refused({"--suite", "four_bit", "--dtype", "fp8"},
                 {"--dtype is fp8", "four_bit is measured in mxfp4, int4"});
  expect_refused({"--suite", "four_bit", "--dtype", "int4", "--compute", "fp8"},
                 {"--compute is fp8", "four_bit is measured in bf16"});
  expect_refused({"--suite", "four_bit", "--dtype", "int4", "--model", "kimi-k3"},
                 {"kimi-k3", "it has kimi-k2-routed"});
  expect_refused({"--suite", "ep_four_bit", "--backend", "cpu"},
                 {"over ranks", "--model gpt-oss-20b --experts 16 --dtype mxfp4"});
  expect_refused({"--model", "olmoe", "--dtype", "int4", "--compute", "fp8"},
                 {"they are int4", "fp8 or mxfp4"});
}

TEST_F(Bench, GroupedMeasuresChecksAndKeepsRows) {
  const Arguments grouped = {"bench", "grouped", "--backend", "cpu", "--experts", "8", "--n", "96",
                             "--k",   "160",     "--repeat",  "3",   "--json",    path};
  const Completed done = run_well(join(grouped, {"--rows", "1,6", "--commit", "abc1234"}));
  EXPECT_THAT(done.out, HasSubstr("GroupedGemm alone, weights and rows in bf16"));
  nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["suite"], "grouped");
    EXPECT_EQ(row["implementation"], "switchyard");
    EXPECT_EQ(row["commit"], "abc1234");
    EXPECT_EQ(row["activation"], "none");
    EXPECT_EQ(row["rows"], 8 * row["rows_per_expert"].get<int>());
    EXPECT_EQ(row["experts_hit"], 8);
    EXPECT_EQ(row["times_us"].size(), 3u);
    EXPECT_EQ(row["touched_bytes"], 8 * 96 * 160 * 2);
    EXPECT_EQ(row["flops"], row["rows"].get<int>() * 2 * 96 * 160);
    EXPECT_GT(row["error"], 0);
    EXPECT_LE(row["error"], row["error_bound"]);
    EXPECT_TRUE(row["floor_us"].is_null());
    EXPECT_THAT(row["command"].get<std::string>(), Not(HasSubstr(path)));
  }

  // Points of their own: another type, an activation, rows that a router deals.
  for (const char* dtype : {"fp8", "f32", "f16", "mxfp4", "int4"}) {
    run_well(join(grouped, {"--rows", "6", "--dtype", dtype}));
  }
  run_well(join(grouped, {"--rows", "6", "--swiglu", "--balancedness", "1,0.6"}));
  rows = rows_of(path);
  ASSERT_EQ(rows.size(), 9u);
  EXPECT_EQ(rows[2]["dtype"], "fp8");
  EXPECT_EQ(rows[2]["touched_bytes"], 8 * (96 * 160 + 2 * 4));
  EXPECT_EQ(rows[5]["dtype"], "mxfp4");
  EXPECT_EQ(rows[5]["compute"], "bf16");
  EXPECT_EQ(rows[5]["touched_bytes"], 8 * 96 * (160 / 2 + 160 / 32));
  EXPECT_EQ(rows[6]["dtype"], "int4");
  EXPECT_EQ(rows[6]["touched_bytes"], 8 * 96 * (160 / 2 + 160 / 32 * 2));
  EXPECT_EQ(rows[8]["activation"], "swiglu");
  EXPECT_EQ(rows[8]["beta"], 0.6);
  EXPECT_LT(rows[8]["beta_reached"], rows[7]["beta_reached"]);
  for (const nlohmann::json& row : rows) EXPECT_LE(row["error"], row["error_bound"]);

  // Sums of few products, in which the rounding of INT4 to bf16 shows.
  for (const char* dtype : {"mxfp4", "int4"}) {
    run_well({"bench", "grouped", "--backend", "cpu", "--experts", "4", "--n", "64", "--k", "64",
              "--repeat", "1", "--rows", "1", "--swiglu", "--dtype", dtype});
  }

  // Rows of layers are another file's.
  expect_refused(join({"--backend", "cpu", "--json", path}, kTiny), {"grouped GEMM"},
                 "invalid_file");
}

TEST_F(Bench, GroupedRefusesWhatMakesNoSense) {
  const Arguments suite = {"grouped", "--backend", "cpu"};
  for (const Arguments& option :
       {Arguments{"--model", "olmoe"}, Arguments{"--tokens", "8"}, Arguments{"--hidden", "64"},
        Arguments{"--top-k", "2"}, Arguments{"--compute", "bf16"}, Arguments{"--ranks", "2"},
        Arguments{"--given-routing"}, Arguments{"--traced"}, Arguments{"--against", "torch"}}) {
    expect_refused(join(suite, option), {"bench grouped has no option '" + option[0] + "'"});
  }
  expect_refused(join(suite, {"--verify"}), {"--verify"});
  expect_refused(join(suite, {"--cold"}), {"--cold is for --backend cuda"});
  expect_refused(join(suite, {"--n", "64"}), {"--experts, --n and --k", "only 1"});
  expect_refused(join(suite, {"--experts", "2", "--n", "64", "--k", "80", "--dtype", "mxfp4"}),
                 {"--k is 80", "32 columns"});
  expect_refused(join(suite, {"--n", "64", "--k", "64"}), {"only 2 of them are"});
  expect_refused(join(suite, {"--experts", "2", "--n", "63", "--k", "64", "--swiglu"}),
                 {"--n is 63", "even"});
  expect_refused(join(suite, {"--rows", "3"}), {"has 3", "2048"});
  expect_refused(join(suite, {"--rows", "1", "--swiglu"}), {"--swiglu leaves no point"});
  expect_refused({"--model", "olmoe", "--rows", "4"},
                 {"bench layers has no option '--rows'; it is an option of bench grouped"});
  if (gpu::device_count() == 0) {
    expect_refused({"grouped"}, {"bench grouped needs a GPU"}, "unsupported");
  }
}

TEST_F(Bench, ExchangeMeasuresChecksAndKeepsRows) {
  const Arguments exchange = {"bench",    "exchange",  "--backend", "cpu",     "--hidden",
                              "200",      "--experts", "12",        "--top-k", "3",
                              "--repeat", "3",         "--json",    path};
  const Completed done =
      run_well(join(exchange, {"--tokens", "1,9", "--ranks", "3", "--commit", "abc1234"}));
  EXPECT_THAT(done.out, HasSubstr("Exchange alone over 3 ranks"));
  nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 8u);  // two stages, two sizes, two types
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const nlohmann::json& row = rows[i];
    EXPECT_EQ(row["suite"], "exchange");
    EXPECT_EQ(row["stage"], i % 2 == 0 ? "dispatch" : "combine");
    EXPECT_EQ(row["dtype"], i < 4 ? "bf16" : "fp8");
    EXPECT_EQ(row["hidden"], 200);
    EXPECT_EQ(row["experts"], 12);
    EXPECT_EQ(row["top_k"], 3);
    EXPECT_EQ(row["ranks"], 3);
    EXPECT_EQ(row["tokens_per_rank"], i % 4 < 2 ? 1 : 9);
    EXPECT_EQ(row["commit"], "abc1234");
    EXPECT_EQ(row["times_us"].size(), 3u);
    EXPECT_GT(row["median_us"], 0);
    EXPECT_GT(row["nvlink_bytes"], 0);
    EXPECT_TRUE(row["floor_us"].is_null());
  }
  // A row of fp8 has half the bytes, and a scale per 128 columns; entries of rows come on top.
  EXPECT_LT(rows[6]["nvlink_bytes"], rows[2]["nvlink_bytes"]);

  // One rank sends nothing; the same point replaces its rows.
  run_well(join(exchange, {"--tokens", "9", "--ranks", "1", "--dtype", "bf16", "--pre-sum"}));
  rows = rows_of(path);
  ASSERT_EQ(rows.size(), 10u);
  EXPECT_EQ(rows[9]["nvlink_bytes"], 0);
  EXPECT_EQ(rows[9]["pre_sum"], true);
  run_well(join(exchange, {"--tokens", "1,9", "--ranks", "3"}));
  EXPECT_EQ(rows_of(path).size(), 10u);

  expect_refused(join({"--backend", "cpu", "--json", path}, kTiny), {"exchange"}, "invalid_file");
}

// In namespaces as hosts, where they may be made.
TEST_F(Bench, HostsMeasuresChecksAndKeepsRows) {
  const Arguments bench = {
      "launch", "-n",        "2",        "--namespaces", "2",        "--",     SWITCHYARD_COMMAND,
      "bench",  "hosts",     "--tokens", "1,40",         "--repeat", "3",      "--hidden",
      "96",     "--experts", "12",       "--top-k",      "3",        "--json", path};
  const Completed done = run_switchyard(bench);
  if (done.exit_code == 2 && done.err.find("unsupported") != std::string::npos) {
    GTEST_SKIP() << done.err;
  }
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("2 ranks on 2 hosts, libfabric"));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 8u);  // a flag, a stream, and three stages of two sizes
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["suite"], "hosts");
    EXPECT_EQ(row["engine"], "cpu");
    EXPECT_EQ(row["hosts"], 2);
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["wrong"], 0);
    EXPECT_GT(row["median_us"], 0);
    EXPECT_GT(row["link_bytes"], 0);
  }
  EXPECT_EQ(rows[0]["stage"], "flag");
  EXPECT_EQ(rows[1]["stage"], "stream");
  EXPECT_GT(rows[1]["link_bytes"], 32e6);
  EXPECT_EQ(rows[5]["stage"], "dispatch");
  EXPECT_EQ(rows[5]["tokens_per_rank"], 40);
  // Half of the 3 choices of 40 tokens are elsewhere: most tokens cross once, 1.5 rows each return.
  EXPECT_GT(rows[5]["link_bytes"], 25 * 96 * 2);
  EXPECT_LT(rows[5]["link_bytes"], 40 * (96 * 2 + 64) + 2000);
  EXPECT_GT(rows[6]["link_bytes"], rows[5]["link_bytes"]);
  EXPECT_EQ(rows[7]["stage"], "combine_summed");
  // One row for each token that crossed.
  EXPECT_LT(rows[7]["link_bytes"], rows[6]["link_bytes"]);
  EXPECT_LT(rows[7]["link_bytes"], 40 * (96 * 2 + 64) + 2000);
  // The model: a flag's way, and the bytes at the stream's rate.
  const double rate = rows[1]["link_bytes"].get<double>() / rows[1]["median_us"].get<double>();
  EXPECT_NEAR(rows[6]["model_us"].get<double>(),
              rows[0]["median_us"].get<double>() / 2 + rows[6]["link_bytes"].get<double>() / rate,
              0.1);

  run_well(bench);
  EXPECT_EQ(rows_of(path).size(), 8u);
  expect_refused(join({"--backend", "cpu", "--json", path}, kTiny), {"hosts"}, "invalid_file");
}

TEST_F(Bench, HostsRefusesWhatMakesNoSense) {
  const Arguments suite = {"hosts"};
  for (const Arguments& option :
       {Arguments{"--model", "olmoe"}, Arguments{"--ranks", "2"}, Arguments{"--dtype", "bf16"},
        Arguments{"--pre-sum"}, Arguments{"--verify"}}) {
    expect_refused(join(suite, option), {"bench hosts has no option '" + option[0] + "'"});
  }
  expect_refused(join(suite, {"--experts", "4"}), {"top-8 of 4 experts"});
  expect_refused(suite, {"all ranks are on this one", "launch --namespaces"});
}

TEST_F(Bench, ExchangeRefusesWhatMakesNoSense) {
  const Arguments suite = {"exchange"};
  for (const Arguments& option :
       {Arguments{"--model", "olmoe"}, Arguments{"--rows", "8"}, Arguments{"--n", "64"},
        Arguments{"--balancedness", "1"}, Arguments{"--compute", "bf16"}, Arguments{"--cold"},
        Arguments{"--given-routing"}, Arguments{"--verify"}, Arguments{"--against", "torch"}}) {
    expect_refused(join(suite, option), {"bench exchange has no option '" + option[0] + "'"});
  }
  if (gpu::device_count() == 0) {
    expect_refused(join(suite, {"--backend", "cuda"}), {"--backend cpu"}, "unsupported");
  }
  expect_refused(join(suite, {"--dtype", "f16"}), {"--dtype is f16"});
  expect_refused(join(suite, {"--experts", "4"}), {"top-8 of 4 experts"});
  expect_refused({"--model", "olmoe", "--pre-sum"}, {"--pre-sum", "bench exchange"});
}

TEST_F(Bench, AllToAllChecksMeasuresAndTraces) {
  const std::string trace = (directory_ / "trace.json").string();
  const Arguments suite = {"bench", "all_to_all", "--backend", "cpu",    "--quick", "--repeat",
                           "2",     "--ranks",    "4",         "--json", path};
  const Completed done =
      run_well(join(suite, {"--rung", "host,flattened", "--trace", trace, "--commit", "abc1234"}));
  EXPECT_THAT(done.out, HasSubstr("3 test cases: right on all rungs"));
  EXPECT_THAT(done.out, HasSubstr("geometric mean of 3 cases"));
  std::istringstream lines(done.out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 6u);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const nlohmann::json& row = rows[i];
    EXPECT_EQ(row["suite"], "all_to_all");
    EXPECT_EQ(row["rung"], i % 2 == 0 ? "host" : "flattened");
    EXPECT_EQ(row["ranks"], 4);
    EXPECT_EQ(row["commit"], "abc1234");
    EXPECT_EQ(row["times_us"].size(), 2u);
    EXPECT_EQ(row["rank_us"].size(), 4u);
    EXPECT_EQ(row["dispatch_receive_us"].size(), 4u);
    EXPECT_EQ(row.contains("experts_us"), i % 2 == 0);
    EXPECT_TRUE(row["floor_us"].is_null());
  }
  std::size_t slices = 0;
  const nlohmann::json traced = nlohmann::json::parse(read_file(trace));
  for (const nlohmann::json& event : traced["traceEvents"]) slices += event["ph"] == "X";
  EXPECT_EQ(slices, 2u * 4 * 4 * 2);  // rungs, ranks, stages, blocks

  expect_refused(join({"--backend", "cpu", "--json", path}, kTiny), {"all_to_all"}, "invalid_file");
}

TEST_F(Bench, AllToAllRefusesWhatMakesNoSense) {
  const Arguments suite = {"all_to_all"};
  for (const Arguments& option :
       {Arguments{"--model", "olmoe"}, Arguments{"--tokens", "8"}, Arguments{"--hidden", "64"},
        Arguments{"--dtype", "fp8"}, Arguments{"--cold"}, Arguments{"--pre-sum"},
        Arguments{"--against", "torch"}}) {
    expect_refused(join(suite, option), {"bench all_to_all has no option '" + option[0] + "'"});
  }
  expect_refused(join(suite, {"--rung", "fast"}), {"'fast' is no rung", "flag_per_token"});
  expect_refused(join(suite, {"--ranks", "3"}), {"3 ranks do not divide 8 experts"});
  if (gpu::device_count() == 0) {
    expect_refused(join(suite, {"--backend", "cuda"}), {"--backend cpu"}, "unsupported");
  }
  expect_refused({"--model", "olmoe", "--rung", "host"}, {"bench all_to_all"});
}

TEST_F(Bench, RefusesOptionsThatWouldDoNothing) {
  for (const Arguments& option : {Arguments{"--graph"}, Arguments{"--cold"}, Arguments{"--traced"},
                                  Arguments{"--reserved-sms", "2"}, Arguments{"--uncooperative"},
                                  Arguments{"--machine-facts", "facts.json"}}) {
    expect_refused(join({"--model", "olmoe", "--backend", "cpu"}, option),
                   {switchyard::join(option, " ") + " is for --backend cuda; leave it out"});
    if (gpu::device_count() > 0) continue;
    expect_refused(join({"--model", "olmoe"}, option), {option[0], "on the cpu"});
  }
  expect_refused({"--model", "olmoe", "--gated"}, {"--gated", "ep_*"});
  expect_refused({"--model", "olmoe", "--keep-rival"}, {"--keep-rival requires --json"});
  expect_refused({"--model", "olmoe", "--torch-limit", "9"}, {"--torch-limit requires --against"});
  expect_refused({"--model", "olmoe", "--torch-variants", "ordered"},
                 {"--torch-variants requires --against"});
}

// Nothing is printed before: not even the heading.
TEST_F(Bench, RefusesFilesOfRowsBeforeItMeasures) {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::string& name, const std::string& code,
                           const std::string& part) {
    expect_refused(join({"--backend", "cpu", "--json", (directory / name).string()}, kTiny),
                   {name, part}, code);
  };
  test::write_file(directory / "truncated", R"([{"suite": "custom")");
  test::write_file(directory / "binary", std::string("\0\xff\x7f", 3));
  test::write_file(directory / "object", "{}");
  test::write_file(directory / "empty", "");
  test::write_file(directory / "deep", deep_json());
  test::write_file(directory / "row", R"([{"suite": "custom", "machine": "m", "commit": 3}])");
  for (const char* name : {"truncated", "binary", "empty"}) {
    refused(name, "invalid_file", "is not JSON");
  }
  refused("object", "invalid_file", "is not a list of rows, but {}");
  refused("deep", "invalid_file", "nests too deep at byte");
  refused("row", "invalid_file", "row 1: 'commit' is 3");

  std::filesystem::create_directory(directory / "directory");
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  refused("directory", "invalid_argument", "is a directory");
  refused("fifo", "invalid_argument", "is a pipe, a socket or a device");
  refused(std::string(250, 'n'), "invalid_argument", "no file can be made there");
  std::filesystem::permissions(directory / "directory", std::filesystem::perms::owner_read);
  if (::geteuid() != 0) {
    refused("directory/rows.json", "invalid_argument", "no file can be made there");
  }
  EXPECT_THAT(names_in(directory.path()),
              UnorderedElementsAre("truncated", "binary", "object", "empty", "deep", "row",
                                   "directory", "fifo"));
}

TEST_F(Bench, RivalRefusesLayersThatItCannotCompute) {
  expect_refused(
      {"--model", "deepseek-v3", "--against", "torch", "--torch-script", SWITCHYARD_COMMAND},
      {"deepseek-v3", "shared expert"});
}

TEST_F(Bench, RefusesRanksThatMakeNoSense) {
  expect_refused({"--model", "olmoe", "--ranks", "0"}, {"--ranks is '0'", "1 to 64"});
  expect_refused({"--model", "olmoe", "--ranks", "2", "--backend", "cpu"},
                 {"--ranks is 2", "one rank", "--backend cuda"});
  expect_refused({"--suite", "one_gpu_bf16", "--ranks", "2"},
                 {"--ranks is 2", "one_gpu_bf16 is measured on one rank"});
  expect_refused({"--suite", "ep_fp8", "--ranks", "1"},
                 {"--ranks is 1", "ep_fp8 is measured over 2 or more"});
  expect_refused({"--suite", "ep_bf16", "--backend", "cpu"},
                 {"ep_bf16 is measured over ranks", "--backend is cpu"});
  expect_refused({"--suite", "ep_thesis", "--tokens", "8"}, {"has 8", "1024"});
  expect_refused({"--suite", "thesis", "--given-routing", "--backend", "cpu"},
                 {"--given-routing", "thesis"});
  expect_refused({"--suite", "thesis", "--ranks", "2", "--backend", "cpu"},
                 {"--ranks is 2", "one rank"});
  expect_refused({"late", "--ranks", "1", "--backend", "cpu"}, {"--ranks is 1"});
  expect_refused({"late", "--verify"}, {"bench late has no option '--verify'"});
  expect_refused({"exchange", "--late", "50"},
                 {"bench exchange has no option '--late'", "bench late"});
  expect_refused({"--suite", "ep_thesis", "--against", "torch"}, {"--against", "ep_thesis"});
  expect_refused({"--model", "olmoe", "--ranks", "2", "--against", "torch", "--torch-script",
                  SWITCHYARD_COMMAND},
                 {"--ranks is 2", "--against"});
}

TEST_F(Bench, SuitesOverRanksNeedTwoGpus) {
  if (gpu::device_count() > 1) GTEST_SKIP() << "there are GPUs enough";
  expect_refused({"--suite", "ep_fp8"},
                 {"--suite ep_fp8 needs 2 or more GPUs", "switchyard doctor",
                  gpu::device_count() == 1 ? "--ranks" : "--backend cpu --model "},
                 "unsupported");
}

// A user without a GPU must be able to try what a suite does, or be told how before anything is
// timed.
TEST_F(Bench, EverySuiteCanBeTriedWithoutAGpu) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  std::vector<std::string> suites = bench::bench_suite_names();
  suites.emplace_back("grouped");
  for (const std::string& suite : suites) {
    SCOPED_TRACE(suite);
    const auto begin = std::chrono::steady_clock::now();
    const Completed refused = run_switchyard({"bench", "--suite", suite});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_EQ(refused.out, "");
    EXPECT_THAT(refused.err, HasSubstr("--backend cpu"));
    EXPECT_THAT(refused.err, HasSubstr("--quick"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

// The smallest of the suites' layers. What the refusals above tell to do, other tests and people
// do.
TEST_F(Bench, QuickSuitesOnTheProcessorTakeOnePoint) {
  const Completed done =
      run_well({"bench", "--suite", "one_gpu_thesis", "--backend", "cpu", "--quick"});
  EXPECT_THAT(done.out, HasSubstr("--quick on the processor: thesis, tokens 1024, in bf16"));
  const Completed all = run_well({"bench", "--suite", "one_gpu_thesis", "--backend", "cpu",
                                  "--quick", "--tokens", "1024,2048", "--repeat", "1"});
  EXPECT_EQ(std::count(all.out.begin(), all.out.end(), '\n'),
            std::count(done.out.begin(), done.out.end(), '\n') + 1);
}

TEST_F(Bench, MeasuresOverRanks) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  // As many as most machines have GPUs, or twice as many on one.
  run_well(join({"bench", "--ranks", "2", "--tokens", "1,64", "--repeat", "3", "--verify", "--json",
                 path, "--given-routing"},
                kTiny));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["routing"], "given");
    EXPECT_GT(row["nvlink_bytes"], 0);
    // Ranks that share a GPU have no floor, nor has a GPU whose roofs are not known.
    const bool has_floor =
        gpu::device_count() > 1 && machine::known_gpu_facts(gpu::device_info(0).name).has_value();
    EXPECT_EQ(!row["floor_us"].is_null(), has_floor);
    EXPECT_LE(row["error"], row["error_bound"]);
  }
  EXPECT_LT(rows[1]["flops"], 2 * 64 * 8 * 2 * 3 * 64 * 32);
  EXPECT_GE(rows[1]["flops"], 64 * 8 * 2 * 3 * 64 * 32);
}

TEST_F(Bench, ChainsRefuseWhatMakesNoSense) {
  expect_refused({"chain", "--backend", "cpu"}, {"--backend is cpu", "launches on a GPU"});
  expect_refused({"chain", "--dtype", "fp8"}, {"--dtype is for the models of --model"});
  expect_refused({"chain", "--experts", "4"}, {"--experts is for the models of --model"});
  expect_refused({"chain", "--model", "no-such-model"}, {"no-such-model"});
  expect_refused({"chain", "--tokens", "0"}, {"--tokens"});
  expect_refused({"chain", "--ranks", "2"}, {"bench chain has no option '--ranks'"});
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  expect_refused({"chain"}, {"bench chain needs a GPU", "switchyard doctor"}, "unsupported");
}

// Few tokens, and as many as have the layer kernel: each with and without early launches.
TEST_F(Bench, MeasuresChains) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  run_well({"bench", "chain", "--model", "olmoe", "--experts", "16", "--tokens", "1,40",
            "--captures", "2", "--repeat", "3", "--json", path});
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["tokens"], i < 2 ? 1 : 40);
    EXPECT_EQ(rows[i]["early_launch"], i % 2 == 1);
    EXPECT_EQ(rows[i]["repeats"], 6);
    EXPECT_EQ(rows[i]["times_us"].size(), 6u);
    EXPECT_LE(rows[i]["error"], rows[i]["error_bound"]);
  }
}

TEST_F(Bench, NeedsAGpuForSuites) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  expect_refused({"--suite", "one_gpu_bf16"}, {"--suite one_gpu_bf16 needs a GPU", "--backend cpu"},
                 "unsupported");
  expect_refused({"--suite", "one_gpu_fp8", "--dtype", "fp8", "--compute", "fp8"},
                 {"--suite one_gpu_fp8 needs a GPU"}, "unsupported");
  expect_refused({"--model", "olmoe", "--backend", "cuda"}, {"--backend cuda needs a GPU"},
                 "unsupported");
  expect_refused({"--model", "olmoe", "--ranks", "2"}, {"--ranks 2 needs a GPU"}, "unsupported");
  expect_refused({"--suite", "ep_fp8", "--ranks", "2"}, {"--ranks 2 needs a GPU"}, "unsupported");
}

const char* const kSuites[] = {"layers",     "grouped", "exchange", "hosts",
                               "all_to_all", "chain",   "late"};

TEST_F(Bench, HelpFits) {
  EXPECT_THAT(run_switchyard({"bench", "layers", "--help"}).out, HasSubstr("--against"));
  for (const std::string suite : kSuites) {
    const Completed all = run_switchyard({"bench", "--help"});
    EXPECT_THAT(all.out, HasSubstr("\n  " + suite + " "));
    for (const Completed& help : {all, run_switchyard({"bench", suite, "--help"})}) {
      EXPECT_EQ(help.exit_code, 0);
      std::istringstream lines(help.out);
      for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
    }
  }
}

// Rows of older versions name a suite so, and people repeat their commands.
TEST_F(Bench, SuitesAsOptionsAreTheirCommands) {
  for (const std::string suite : kSuites) {
    const Completed expected = run_switchyard({"bench", suite, "--no-such-option"});
    EXPECT_THAT(expected.err, HasSubstr("bench " + suite + " has no option"));
    for (const Arguments& old : {Arguments{"bench", "--no-such-option", "--suite", suite},
                                 Arguments{"bench", "--suite=" + suite, "--no-such-option"}}) {
      EXPECT_EQ(run_switchyard(old).err, expected.err);
    }
  }
  EXPECT_THAT(run_switchyard({"bench", "nonsense"}).err,
              HasSubstr("unknown command 'bench nonsense'"));
}

}  // namespace
}  // namespace switchyard::cli
