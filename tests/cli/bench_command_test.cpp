// `switchyard bench`, as far as it goes without a GPU: what it measures, what it compares with, and
// what it keeps.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "base/whole_file.h"
#include "cli/bench_rows.h"
#include "cli/bench_skew.h"
#include "cli/bench_suite.h"
#include "cli/bench_torch.h"
#include "cli/command.h"
#include "gpu/device.h"
#include "model/generate.h"
#include "reference/reference.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

constexpr double kSkewTolerance = 0.02;

nlohmann::json rows_of(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_file(path));
}

TEST(BenchSuite, GridsOfTheirIssue) {
  const BenchPlan bf16 = bench_suite("one_gpu_bf16");
  ASSERT_EQ(bf16.layers.size(), 4u);
  EXPECT_THAT(bf16.tokens, ElementsAre(1, 8, 32, 128, 512, 2048, 8192));
  EXPECT_THAT(bf16.betas, ElementsAre(1, 0.5));
  const LayerSpec& deepseek = bf16.layers[3].spec;
  EXPECT_EQ(bf16.layers[3].model, kDeepseekRank);
  EXPECT_EQ(deepseek.hidden, 7168);
  EXPECT_EQ(deepseek.intermediate, 2048);
  EXPECT_EQ(deepseek.num_experts, 32);
  EXPECT_EQ(deepseek.top_k, 8);
  EXPECT_EQ(deepseek.shared_intermediate, 0);
  EXPECT_EQ(deepseek.routing.num_groups, 1);

  const BenchPlan thesis = bench_suite("one_gpu_thesis");
  std::vector<int> experts;
  for (const BenchLayer& layer : thesis.layers) {
    experts.push_back(layer.spec.num_experts);
    EXPECT_EQ(layer.spec.hidden, 1024);
    EXPECT_EQ(layer.spec.intermediate, 4096);
    EXPECT_FALSE(layer.spec.activation.gated);
    EXPECT_TRUE(layer.spec.expert_bias);
  }
  EXPECT_THAT(experts, ElementsAre(16, 32, 64, 128));

  for (const std::string& name : bench_suite_names()) {
    const BenchPlan plan = bench_suite(name);
    EXPECT_EQ(plan.suite, name);
    for (const BenchLayer& layer : plan.layers) {
      EXPECT_NO_THROW(validate(layer.spec));
      if (plan.over_ranks) continue;
      EXPECT_EQ(torch_refusal(layer.spec, plan.compute), "") << layer.model;
    }
  }
}

std::vector<std::string> models_of(const BenchPlan& plan) {
  std::vector<std::string> models;
  for (const BenchLayer& layer : plan.layers) models.push_back(layer.model);
  return models;
}

TEST(BenchSuite, Fp8IsTheGridOfBf16) {
  const BenchPlan bf16 = bench_suite("one_gpu_bf16");
  const BenchPlan fp8 = bench_suite("one_gpu_fp8");
  EXPECT_EQ(bf16.dtype, DType::kBF16);
  EXPECT_EQ(bf16.compute, DType::kBF16);
  EXPECT_EQ(fp8.dtype, DType::kF8E4M3);
  EXPECT_EQ(fp8.compute, DType::kF8E4M3);
  EXPECT_EQ(models_of(fp8), models_of(bf16));
  EXPECT_EQ(fp8.tokens, bf16.tokens);
  EXPECT_EQ(fp8.betas, bf16.betas);
}

TEST(BenchSuite, MoreOfFp8) {
  const BenchPlan plan = bench_suite("one_gpu_fp8_more");
  EXPECT_EQ(plan.dtype, DType::kF8E4M3);
  EXPECT_EQ(plan.compute, DType::kF8E4M3);
  EXPECT_THAT(models_of(plan),
              ElementsAre("mixtral-8x22b", "phi-3.5-moe", "jamba-1.5-mini", "dbrx"));
  EXPECT_THAT(plan.tokens, ElementsAre(1, 32, 512, 8192));
  EXPECT_THAT(plan.betas, ElementsAre(1));
}

TEST(BenchSuite, OverRanksAreTheRoutedExpertsAlone) {
  const BenchPlan fp8 = bench_suite("ep_fp8");
  const BenchPlan bf16 = bench_suite("ep_bf16");
  EXPECT_EQ(fp8.compute, DType::kF8E4M3);
  EXPECT_EQ(bf16.compute, DType::kBF16);
  EXPECT_EQ(models_of(fp8), models_of(bf16));
  using Shape = std::array<int, 4>;  // hidden, intermediate, experts, top_k
  const std::map<std::string, Shape> shapes = {{"v4-flash-routed", {4096, 2048, 256, 6}},
                                               {"v4-pro-routed", {7168, 3072, 384, 6}},
                                               {"v3-routed", {7168, 2048, 256, 8}},
                                               {"glm-5-routed", {6144, 2048, 256, 8}}};
  for (const BenchPlan& plan : {fp8, bf16}) {
    EXPECT_TRUE(plan.over_ranks);
    EXPECT_TRUE(plan.given_routing);
    EXPECT_EQ(plan.layers.size(), shapes.size());
    EXPECT_THAT(plan.tokens, ElementsAre(1, 8, 64, 256, 512, 1024, 2048, 4096, 8192));
    EXPECT_THAT(plan.betas, ElementsAre(1));
    for (const auto& [model, spec] : plan.layers) {
      EXPECT_EQ((Shape{spec.hidden, spec.intermediate, spec.num_experts, spec.top_k}),
                shapes.at(model));
      EXPECT_EQ(spec.shared_intermediate, 0) << model;
      EXPECT_EQ(spec.routing.num_groups, 1) << model;
      EXPECT_EQ(spec.routing.method, RoutingMethod::kTopK) << model;
      EXPECT_TRUE(spec.activation.gated) << model;
    }
  }

  const BenchPlan thesis = bench_suite("ep_thesis");
  EXPECT_TRUE(thesis.over_ranks);
  EXPECT_THAT(thesis.tokens, ElementsAre(1024, 2048, 4096, 8192));
  EXPECT_EQ(thesis.layers.size(), 4u);
  EXPECT_FALSE(bench_suite("one_gpu_thesis").over_ranks);
  EXPECT_FALSE(bench_suite("one_gpu_thesis").given_routing);
}

TEST(BenchSuite, RivalsArithmetic) {
  const LayerSpec olmoe = bench_layer("olmoe").spec;
  EXPECT_THAT(torch_refusal(olmoe, DType::kF32), HasSubstr("f32"));
  const LayerSpec odd = bench_layer("olmoe", ConfigOverrides{.intermediate = 24}).spec;
  EXPECT_EQ(torch_refusal(odd, DType::kBF16), "");
  EXPECT_THAT(torch_refusal(odd, DType::kF8E4M3), HasSubstr("multiples of 16"));
}

// The geometry of a layer's routing; the experts themselves do not matter here.
LayerSpec routing_of(const BenchLayer& layer) {
  LayerSpec spec = layer.spec;
  spec.hidden = 512;
  spec.intermediate = 16;
  return spec;
}

TEST(BenchSkew, GateReachesTheBalancednessAskedFor) {
  for (const BenchLayer& layer : bench_suite("one_gpu_bf16").layers) {
    const LayerSpec spec = routing_of(layer);
    MoeWeights weights = generate_weights(spec, DType::kBF16, 1);
    const SkewedGate gate(spec, weights, 1024, DType::kBF16, 1);
    const double lowest = lowest_balancedness(spec.num_experts, spec.top_k);
    for (const double beta : {0.9, 0.7, 0.5}) {
      const double reached = balancedness(gate.histogram(1024, gate.skew_for(1024, beta)));
      EXPECT_NEAR(reached, std::max(beta, lowest), kSkewTolerance) << layer.model;
    }
    EXPECT_EQ(gate.skew_for(1024, 1), 0) << layer.model;
    EXPECT_GT(balancedness(gate.histogram(1024, 0)), 0.98) << layer.model;
  }
}

TEST(BenchSkew, FewTokensAreAsBalancedAsTheyCanBe) {
  const BenchLayer layer = bench_layer("qwen3-30b");
  const LayerSpec spec = routing_of(layer);
  MoeWeights weights = generate_weights(spec, DType::kBF16, 1);
  const SkewedGate gate(spec, weights, 64, DType::kBF16, 1);
  // One token chooses top_k experts, whatever is asked for.
  EXPECT_EQ(gate.skew_for(1, 0.5), 0);
  const std::vector<std::int64_t> one = gate.histogram(1, 0);
  EXPECT_EQ(std::accumulate(one.begin(), one.end(), std::int64_t{0}), spec.top_k);
  EXPECT_NEAR(balancedness(gate.histogram(8, gate.skew_for(8, 0.5))), 0.5, 0.05);
}

// What the layer's own arithmetic makes of the activations and the router, not only the
// histogram's.
TEST(BenchSkew, HistogramIsThatOfTheRealGate) {
  const LayerSpec spec = routing_of(bench_layer("olmoe"));
  MoeWeights weights = generate_weights(spec, DType::kBF16, 3);
  SkewedGate gate(spec, weights, 256, DType::kBF16, 3);
  const float skew = gate.skew_for(256, 0.8);
  const MatrixView x = gate.activations(256, skew);
  const std::vector<double> logits = reference::router_logits(spec, weights, x);
  const reference::Routing routing = reference::route(spec, logits, {}, {});
  std::vector<std::int64_t> counts(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : routing.ids) ++counts[static_cast<std::size_t>(id)];
  EXPECT_NEAR(balancedness(counts), 0.8, kSkewTolerance);
  const std::vector<std::int64_t> told = gate.histogram(256, skew);
  std::int64_t different = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) different += std::abs(counts[e] - told[e]);
  EXPECT_LE(different, 4);  // near ties
}

TEST(BenchSkew, ActivationsBeyondTheDrawnAreRefused) {
  const LayerSpec spec = routing_of(bench_layer("olmoe"));
  MoeWeights weights = generate_weights(spec, DType::kBF16, 3);
  SkewedGate gate(spec, weights, 4, DType::kBF16, 3);
  EXPECT_THROW(gate.activations(5, 0), Error);
}

TEST(BenchRows, FloorIsTheLargerOfStreamingAndArithmetic) {
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    EXPECT_NEAR(floor_us({0, 0, 0}, compute, 1), 7, 1e-9);
    EXPECT_NEAR(floor_us({4'600'000'000, 0, 0}, compute, 1), 1007, 1e-6);
  }
  EXPECT_NEAR(floor_us({4'600'000, 750e9, 0}, DType::kBF16, 1), 1000, 1e-6);
  EXPECT_NEAR(floor_us({4'600'000, 1300e9, 0}, DType::kF8E4M3, 1), 1000, 1e-6);
}

TEST(BenchRows, FloorOfRanksHasNvlink) {
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    EXPECT_NEAR(floor_us({0, 0, 0}, compute, 2), 10, 1e-9);
    EXPECT_NEAR(floor_us({4'600'000'000, 0, 330'000'000}, compute, 2), 1010, 1e-6);
    EXPECT_NEAR(floor_us({4'600'000'000, 0, 660'000'000}, compute, 2), 2000, 1e-6);
  }
  EXPECT_NEAR(floor_us({0, 1500e9, 330'000'000}, DType::kBF16, 8), 2000, 1e-6);
}

TEST(BenchRows, LoadIsThatOfTheMostLoadedRank) {
  // Ranks of three have 2, 3 and 3 of eight experts.
  const BenchLayer layer =
      bench_layer("mixtral-8x7b", ConfigOverrides{.hidden = 64, .intermediate = 32});
  const MoeWeights weights = generate_weights(layer.spec, DType::kBF16, 1);
  constexpr double kRowFlops = 2.0 * 3 * 64 * 32;
  constexpr std::uint64_t kExpertBytes = 2 * 3 * 64 * 32;
  const std::vector<std::int64_t> counts = {9, 0, 1, 1, 1, 5, 0, 0};
  const Load all = heaviest_load(layer.spec, weights, counts, 17, 1);
  EXPECT_EQ(all.flops, 17 * kRowFlops);
  EXPECT_EQ(all.touched_bytes, 5 * kExpertBytes);
  EXPECT_EQ(all.nvlink_bytes, 0u);
  // The first has the most rows, the second the most experts that were hit.
  const Load shared_out = heaviest_load(layer.spec, weights, counts, 6, 3);
  EXPECT_EQ(shared_out.flops, 9 * kRowFlops);
  EXPECT_EQ(shared_out.touched_bytes, 3 * kExpertBytes);

  // Every rank has the shared expert and its own tokens there.
  LayerSpec with_shared = layer.spec;
  with_shared.shared_intermediate = 64;
  const MoeWeights more = generate_weights(with_shared, DType::kBF16, 1);
  const Load load = heaviest_load(with_shared, more, counts, 6, 3);
  EXPECT_EQ(load.flops, (9 + 2 * 6) * kRowFlops);
  EXPECT_EQ(load.touched_bytes, (3 + 2) * kExpertBytes);
}

TEST(BenchRows, Percentiles) {
  EXPECT_EQ(percentile({3}, 0.9), 3);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0.5), 3);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0.9), 5);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0), 1);
  EXPECT_THROW(percentile({}, 0.5), Error);
}

TEST(BenchRows, LoadQuantilesAreOfTheMean) {
  EXPECT_THAT(load_quantiles({6, 0, 2}), ElementsAre(0, 0.75, 2.25));
  EXPECT_THAT(load_quantiles({5}), ElementsAre(1));
  EXPECT_TRUE(load_quantiles({0, 0}).empty());
  std::vector<std::int64_t> counts(256);
  std::iota(counts.rbegin(), counts.rend(), 0);
  const std::vector<double> quantiles = load_quantiles(counts);
  ASSERT_EQ(quantiles.size(), 64u);
  EXPECT_TRUE(std::is_sorted(quantiles.begin(), quantiles.end()));
  EXPECT_EQ(quantiles.front(), 0);
  EXPECT_EQ(quantiles.back(), 255 / 127.5);
}

BenchRow example_row(std::int64_t tokens, double microseconds) {
  BenchRow row;
  row.suite = "one_gpu_bf16";
  row.machine = "a machine";
  row.commit = "abc1234";
  row.command = "switchyard bench";
  row.layer = bench_layer("olmoe");
  row.tokens_per_rank = tokens;
  row.graph_us = {microseconds, microseconds + 1, microseconds + 2};
  row.no_graph_us = {microseconds + 10};
  row.load = {1000, 2000, 0};
  row.floor_us = 8;
  return row;
}

TEST(BenchRows, HaveTheFieldsOfTheirFormat) {
  BenchRow row = example_row(8, 10);
  nlohmann::ordered_json json = to_json(row);
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
  row.rival = Rival{"torch 1", 100, 99, 101, 8};
  json = to_json(row);
  EXPECT_TRUE(json["expert_load"].is_null());
  row.expert_load = {0.12345, 1.87655};
  json = to_json(row);
  EXPECT_EQ(json["expert_load"], nlohmann::json({0.123, 1.877}));
  EXPECT_EQ(json["rival"], "torch 1");
  EXPECT_EQ(json["rival_us"], 100);
}

TEST(BenchRows, MergeReplacesTheSamePointOnly) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  BenchRow first = example_row(8, 10);
  first.rival = Rival{"torch 1", 100, 99, 101, 8};
  merge_rows(path, std::vector{first, example_row(32, 20)}, false);
  BenchRow skewed = example_row(8, 30);
  skewed.beta = 0.5;
  BenchRow given = example_row(8, 40);
  given.given_routing = true;
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

TEST(BenchRows, MergeKeepsTypesApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  // As rows were before they told what they were computed in.
  nlohmann::ordered_json old = to_json(example_row(8, 10));
  old.erase("compute");
  test::write_file(path, nlohmann::ordered_json::array({old}).dump());
  BenchRow fp8 = example_row(8, 20);
  fp8.dtype = DType::kF8E4M3;
  fp8.compute = DType::kF8E4M3;
  BenchRow expanded = fp8;
  expanded.compute = DType::kBF16;
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

TEST(BenchRows, MergeKeepsRanksApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  BenchRow two = example_row(8, 20);
  two.ranks = 2;
  two.load.nvlink_bytes = 4096;
  merge_rows(path, std::vector{example_row(8, 10), two}, false);
  two.graph_us = {7};
  merge_rows(path, std::vector{two}, false);

  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["ranks"], 1);
  EXPECT_EQ(rows[0]["median_us"], 11);
  EXPECT_EQ(rows[1]["ranks"], 2);
  EXPECT_EQ(rows[1]["median_us"], 7);
  EXPECT_EQ(rows[1]["nvlink_bytes"], 4096);
}

TEST(BenchRows, MergeKeepsSizesApart) {
  const TemporaryDirectory directory;
  const auto path = directory / "rows.json";
  std::vector<BenchRow> rows(4, example_row(8, 10));
  rows[1].layer.spec.hidden /= 2;
  rows[2].layer.spec.intermediate /= 2;
  rows[3].layer.spec.top_k /= 2;
  for (const BenchRow& row : rows) merge_rows(path, std::vector{row}, false);
  EXPECT_EQ(rows_of(path).size(), 4u);
  merge_rows(path, rows, false);
  EXPECT_EQ(rows_of(path).size(), 4u);
}

TEST(BenchRows, MergesAtOnceLoseNothing) {
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

TEST(BenchRows, MergeWritesWhereALinkLeads) {
  const TemporaryDirectory directory;
  std::filesystem::create_symlink("rows.json", directory / "link");
  for (const int tokens : {8, 32}) {
    merge_rows(directory / "link", std::vector{example_row(tokens, 10)}, false);
  }
  EXPECT_TRUE(std::filesystem::is_symlink(directory / "link"));
  EXPECT_EQ(rows_of(directory / "rows.json").size(), 2u);
}

TEST(BenchRows, WritingThatFailsLeavesTheOldFile) {
  const TemporaryDirectory directory;
  const auto path = directory / "page";
  test::write_file(path, "old");
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{16, 16};
    ::setrlimit(RLIMIT_FSIZE, &small);
    try {
      write_whole(path, std::string(1000, 'x'));
    } catch (const Error& error) {
      ::_exit(error.code() == ErrorCode::kSystem ? 7 : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_THAT(names_in(directory.path()), ElementsAre("page"));
}

TEST(BenchRows, TextThatIsNotUtf8IsKept) {
  const TemporaryDirectory directory;
  BenchRow row = example_row(8, 10);
  row.commit = "a\xff";
  merge_rows(directory / "rows.json", std::vector{row}, false);
  EXPECT_EQ(rows_of(directory / "rows.json")[0]["commit"], "a\ufffd");
}

// Deeper than a parser's stack.
std::string deep_json() {
  return R"([{"x":)" + std::string(200'000, '[') + std::string(200'000, ']') + "}]";
}

TEST(BenchRows, MergeRefusesOtherFiles) {
  const TemporaryDirectory directory;
  for (const std::string& text : {std::string("{}"), std::string("[1]"), std::string("not JSON"),
                                  std::string(), deep_json()}) {
    test::write_file(directory / "rows.json", text);
    EXPECT_THROW(merge_rows(directory / "rows.json", std::vector{example_row(8, 10)}, false), Error)
        << text;
    EXPECT_EQ(read_file(directory / "rows.json"), text);
  }
}

TEST(BenchRows, TextFitsAndSumsUp) {
  std::vector<BenchRow> rows = {example_row(8, 9), example_row(8192, 31)};
  rows[0].rival = Rival{"torch 1", 9.5, 9, 10, 8};
  rows[1].rival = Rival{"torch 1", 100, 99, 101, 8};
  EXPECT_LE(row_heading().size(), 100u);
  for (const BenchRow& row : rows) {
    EXPECT_LE(row_text(row).size(), 100u);
    EXPECT_EQ(row_text(row).size(), row_heading().size());
  }
  const std::vector<std::string> summary = summary_text(rows);
  // (10 / 8 * 32 / 8) ^ (1 / 2)
  EXPECT_THAT(summary[0], HasSubstr("geometric mean 2.236 over 2 points"));
  EXPECT_THAT(summary[1], HasSubstr("worst: 4.000 (olmoe, 64 experts, 8192 tokens"));
  EXPECT_THAT(summary[2], HasSubstr("slower than the rival: 1 of 2 points"));
  EXPECT_THAT(summary[3], HasSubstr("8 tokens, beta"));
  for (BenchRow& row : rows) row.ranks = 64;
  EXPECT_LE(row_text(rows[1]).size(), 100u);
  EXPECT_THAT(row_text(rows[1]), HasSubstr(" 64   8192 "));
  EXPECT_THAT(summary_text(rows)[1], HasSubstr("8192 tokens on each of 64 ranks, beta"));
}

// Measures on the processor, where there need be no GPU.
const Arguments kBench = join(
    {"bench", "--backend", "cpu", "--tokens", "1,64", "--balancedness", "1,0.8", "--repeat", "3"},
    kTiny);

TEST(Bench, MeasuresVerifiesAndKeepsRows) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  const Completed done =
      run_switchyard(join(kBench, {"--verify", "--json", path, "--commit", "abc1234"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
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

TEST(Bench, GivenRoutingIsAPointOfItsOwn) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  ASSERT_EQ(run_switchyard(join(kBench, {"--json", path})).exit_code, 0);
  const Completed done =
      run_switchyard(join(kBench, {"--json", path, "--given-routing", "--verify"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 8u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i]["beta_reached"], rows[i + 4]["beta_reached"]);
    EXPECT_EQ(rows[i + 4]["routing"], "given");
  }
}

TEST(Bench, Fp8WeightsInBf16Arithmetic) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  const Arguments fp8 = {"--dtype", "fp8", "--compute", "bf16"};
  const Completed done = run_switchyard(join(join(kBench, fp8), {"--verify", "--json", path}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
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

TEST(Bench, Fp8Arithmetic) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  const Completed done =
      run_switchyard(join(kBench, {"--dtype", "fp8", "--verify", "--json", path}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  for (const nlohmann::json& row : rows_of(path)) {
    EXPECT_EQ(row["dtype"], "fp8");
    EXPECT_EQ(row["compute"], "fp8");
    EXPECT_GT(row["error"], 0);
    EXPECT_LE(row["error"], row["error_bound"]);
  }
}

TEST(Bench, ARivalThatFailsLeavesTheRows) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  const Completed done =
      run_switchyard(join(kBench, {"--json", path, "--against", "torch", "--torch-script", __FILE__,
                                   "--python", "/bin/false"}));
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.err, HasSubstr("the rival: "));
  EXPECT_THAT(done.err, HasSubstr("4 of 4 points have no time of the rival"));
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 4u);
  for (const nlohmann::json& row : rows) {
    for (const char* field : {"rival", "rival_us", "rival_p10_us", "rival_p90_us"}) {
      EXPECT_TRUE(row[field].is_null()) << field;
    }
  }
}

void expect_refused(const Arguments& arguments, const std::string& code,
                    const std::vector<std::string>& parts) {
  SCOPED_TRACE(::testing::PrintToString(arguments));
  const Completed done = run_switchyard(join({"bench"}, arguments));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, StartsWith("switchyard: error (" + code + "): "));
  for (const std::string& part : parts) EXPECT_THAT(done.err, HasSubstr(part));
}

TEST(Bench, RefusesWhatMakesNoSense) {
  const std::string invalid = "invalid_argument";
  expect_refused({}, invalid, {"--suite", "--model"});
  expect_refused({"--suite", "two_gpus"}, invalid, {"'two_gpus'", "one_gpu_bf16"});
  expect_refused({"--suite", "one_gpu_bf16", "--tokens", "7"}, invalid, {"has 7", "8192"});
  expect_refused({"--suite", "one_gpu_bf16", "--model", "dbrx"}, invalid, {"dbrx", "olmoe"});
  expect_refused({"--suite", "one_gpu_bf16", "--experts", "4"}, invalid, {"a suite is what it is"});
  expect_refused({"--suite", "one_gpu_bf16", "--dtype", "fp8"}, invalid,
                 {"--dtype is fp8", "one_gpu_bf16 is measured in bf16"});
  expect_refused({"--suite", "one_gpu_fp8", "--dtype", "bf16"}, invalid,
                 {"--dtype is bf16", "one_gpu_fp8 is measured in fp8"});
  expect_refused({"--suite", "one_gpu_fp8_more", "--compute", "bf16"}, invalid,
                 {"--compute is bf16", "one_gpu_fp8_more is measured in fp8"});
  expect_refused({"--model", "olmoe", "--dtype", "int8"}, invalid, {"--dtype is 'int8'", "fp8"});
  expect_refused({"--model", "olmoe", "--compute", "f16"}, invalid, {"--compute is 'f16'", "fp8"});
  expect_refused({"--model", "olmoe", "--compute", "fp8"}, invalid,
                 {"they are bf16", "--dtype fp8", "--compute bf16"});
  expect_refused({"--model", "olmoe", "--dtype", "f32", "--against", "torch"}, invalid,
                 {"--dtype is f32", "bf16 or fp8"});
  expect_refused({"--model", "nonesuch"}, invalid, {"nonesuch"});
  expect_refused({"--model", "olmoe,"}, invalid, {"'olmoe,'", "single commas"});
  expect_refused({"--model", "olmoe", "--tokens", "8,x"}, invalid, {"--tokens is '8,x'"});
  expect_refused({"--model", "olmoe", "--tokens", "0"}, invalid, {"--tokens is '0'"});
  expect_refused({"--model", "olmoe", "--balancedness", "2"}, invalid, {"--balancedness is '2'"});
  expect_refused({"--model", "olmoe", "--repeat", "0"}, invalid, {"--repeat is '0'"});
  expect_refused({"--model", "olmoe", "--graph", "--no-graph"}, invalid, {"--graph", "--no-graph"});
  expect_refused({"--model", "olmoe", "--against", "tea"}, invalid, {"'tea'", "torch"});
  expect_refused({"--model", "olmoe", "--against", "torch", "--torch-script", "/none"}, invalid,
                 {"/none"});
  expect_refused({"--model", "olmoe", "--against", "torch", "--given-routing"}, invalid,
                 {"--given-routing", "--against"});
  expect_refused({"--model", "olmoe", "--torch-limit", "0"}, invalid, {"--torch-limit is '0'"});
  expect_refused({"--model", "olmoe", "--given-routing", "--gated"}, invalid,
                 {"--given-routing", "--gated"});
  expect_refused({"--model", "olmoe", "--json", "/no/such/place.json"}, invalid, {"/no/such"});
}

TEST(Bench, RefusesOptionsThatWouldDoNothing) {
  const std::string invalid = "invalid_argument";
  for (const Arguments& option : {Arguments{"--graph"}, Arguments{"--cold"}, Arguments{"--traced"},
                                  Arguments{"--reserved-sms", "2"}, Arguments{"--uncooperative"}}) {
    expect_refused(join({"--model", "olmoe", "--backend", "cpu"}, option), invalid,
                   {option[0] + " is for --backend cuda; leave it out"});
    if (gpu::device_count() > 0) continue;
    expect_refused(join({"--model", "olmoe"}, option), invalid, {option[0], "on the cpu"});
  }
  expect_refused({"--model", "olmoe", "--gated"}, invalid, {"--gated", "ep_*"});
  expect_refused({"--model", "olmoe", "--keep-rival"}, invalid, {"--keep-rival requires --json"});
  expect_refused({"--model", "olmoe", "--torch-limit", "9"}, invalid,
                 {"--torch-limit requires --against"});
  expect_refused({"--model", "olmoe", "--torch-variants", "ordered"}, invalid,
                 {"--torch-variants requires --against"});
}

// Nothing is printed before: not even the heading.
TEST(Bench, RefusesFilesOfRowsBeforeItMeasures) {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::string& name, const std::string& code,
                           const std::string& part) {
    expect_refused(join({"--backend", "cpu", "--json", (directory / name).string()}, kTiny), code,
                   {name, part});
  };
  test::write_file(directory / "truncated", R"([{"suite": "custom")");
  test::write_file(directory / "binary", std::string("\0\xff\x7f", 3));
  test::write_file(directory / "object", "{}");
  test::write_file(directory / "empty", "");
  test::write_file(directory / "deep", deep_json());
  for (const char* name : {"truncated", "binary", "empty"}) {
    refused(name, "invalid_file", "is not JSON");
  }
  refused("object", "invalid_file", "is not a JSON array");
  refused("deep", "invalid_file", "nests too deep at byte");

  std::filesystem::create_directory(directory / "directory");
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  refused("directory", "invalid_argument", "is a directory");
  refused("fifo", "invalid_argument", "is a pipe, a socket or a device");
  refused(std::string(250, 'n'), "invalid_argument", "no file can be made there");
  std::filesystem::permissions(directory / "directory", std::filesystem::perms::owner_read);
  if (::geteuid() != 0) {
    refused("directory/rows.json", "invalid_argument", "no file can be made there");
  }
  EXPECT_THAT(
      names_in(directory.path()),
      UnorderedElementsAre("truncated", "binary", "object", "empty", "deep", "directory", "fifo"));
}

TEST(Bench, RivalRefusesLayersThatItCannotCompute) {
  expect_refused({"--model", "deepseek-v3", "--against", "torch", "--torch-script", __FILE__},
                 "invalid_argument", {"deepseek-v3", "shared expert"});
}

TEST(Bench, RefusesRanksThatMakeNoSense) {
  const std::string invalid = "invalid_argument";
  expect_refused({"--model", "olmoe", "--ranks", "0"}, invalid, {"--ranks is '0'", "1 to 64"});
  expect_refused({"--model", "olmoe", "--ranks", "2", "--backend", "cpu"}, invalid,
                 {"--ranks is 2", "one rank", "--backend cuda"});
  expect_refused({"--suite", "one_gpu_bf16", "--ranks", "2"}, invalid,
                 {"--ranks is 2", "one_gpu_bf16 is measured on one rank"});
  expect_refused({"--suite", "ep_fp8", "--ranks", "1"}, invalid,
                 {"--ranks is 1", "ep_fp8 is measured over 2 or more"});
  expect_refused({"--suite", "ep_bf16", "--backend", "cpu"}, invalid,
                 {"ep_bf16 is measured over ranks", "--backend is cpu"});
  expect_refused({"--suite", "ep_thesis", "--tokens", "8"}, invalid, {"has 8", "1024"});
  expect_refused({"--suite", "ep_thesis", "--against", "torch"}, invalid,
                 {"--against", "ep_thesis"});
  expect_refused(
      {"--model", "olmoe", "--ranks", "2", "--against", "torch", "--torch-script", __FILE__},
      invalid, {"--ranks is 2", "--against"});
}

TEST(Bench, SuitesOverRanksNeedTwoGpus) {
  if (gpu::device_count() > 1) GTEST_SKIP() << "there are GPUs enough";
  expect_refused({"--suite", "ep_fp8"}, "unsupported",
                 {"--suite ep_fp8 needs 2 or more GPUs", "switchyard doctor", "--ranks"});
}

TEST(Bench, MeasuresOverRanks) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  const TemporaryDirectory directory;
  const std::string path = (directory / "rows.json").string();
  // As many as most machines have GPUs, or twice as many on one.
  const Completed done =
      run_switchyard(join({"bench", "--ranks", "2", "--tokens", "1,64", "--repeat", "3", "--verify",
                           "--json", path, "--given-routing"},
                          kTiny));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const nlohmann::json rows = rows_of(path);
  ASSERT_EQ(rows.size(), 2u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["routing"], "given");
    EXPECT_GT(row["nvlink_bytes"], 0);
    EXPECT_EQ(row["floor_us"].is_null(), gpu::device_count() < 2);
    EXPECT_LE(row["error"], row["error_bound"]);
  }
  EXPECT_LT(rows[1]["flops"], 2 * 64 * 8 * 2 * 3 * 64 * 32);
  EXPECT_GE(rows[1]["flops"], 64 * 8 * 2 * 3 * 64 * 32);
}

TEST(Bench, NeedsAGpuForSuites) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  expect_refused({"--suite", "one_gpu_bf16"}, "unsupported",
                 {"--suite one_gpu_bf16 needs a GPU", "--backend cpu"});
  expect_refused({"--suite", "one_gpu_fp8", "--dtype", "fp8", "--compute", "fp8"}, "unsupported",
                 {"--suite one_gpu_fp8 needs a GPU"});
  expect_refused({"--model", "olmoe", "--backend", "cuda"}, "unsupported",
                 {"--backend cuda needs a GPU"});
  expect_refused({"--model", "olmoe", "--ranks", "2"}, "unsupported", {"--ranks 2 needs a GPU"});
  expect_refused({"--suite", "ep_fp8", "--ranks", "2"}, "unsupported", {"--ranks 2 needs a GPU"});
}

TEST(Bench, HelpFits) {
  const Completed help = run_switchyard({"bench", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, HasSubstr("--against"));
  std::istringstream lines(help.out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

// The job that Python gets, without Python.
TEST(BenchTorch, JobDescribesThePoints) {
  const BenchLayer layer =
      bench_layer("mixtral-8x7b", ConfigOverrides{.hidden = 64, .intermediate = 32});
  MoeWeights weights = generate_weights(layer.spec, DType::kBF16, 1);
  SkewedGate gate(layer.spec, weights, 4, DType::kBF16, 1);
  std::string x_path;
  {
    TorchJob job;
    EXPECT_TRUE(job.empty());
    job.add_layer(layer, weights, gate.activations(4, 0), DType::kBF16);
    job.add_point(5, 4, 0.5, 1.5f, 20, {2, 8});
    const auto json = job.to_json();
    const auto& about = json["layers"][0];
    EXPECT_EQ(about["experts"], 8);
    EXPECT_EQ(about["renormalize"], true);
    EXPECT_EQ(about["activation"], "silu");
    EXPECT_EQ(about["compute"], "bf16");
    EXPECT_EQ(about["score"], "softmax");
    x_path = about["activations"];
    EXPECT_EQ(read_file(x_path).size(), 4u * 64 * 2);
    const std::string router = read_file(about["router"].get<std::string>());
    ASSERT_EQ(router.size(), 8u * 64 * 2);
    EXPECT_EQ(std::memcmp(router.data(), weights.router.data, router.size()), 0);
    EXPECT_EQ(json["points"][0]["tag"], 5);
    EXPECT_EQ(json["points"][0]["skew"], 1.5);
  }
  EXPECT_FALSE(std::filesystem::exists(x_path));
}

// The router and the activations stay bf16 beside FP8 experts.
TEST(BenchTorch, JobOfAnFp8Layer) {
  const BenchLayer layer =
      bench_layer("phi-3.5-moe", ConfigOverrides{.hidden = 64, .intermediate = 32});
  MoeWeights weights = generate_weights(layer.spec, DType::kF8E4M3, 1);
  SkewedGate gate(layer.spec, weights, 4, DType::kBF16, 1);
  TorchJob job;
  job.add_layer(layer, weights, gate.activations(4, 0), DType::kF8E4M3);
  const auto json = job.to_json();
  const auto& about = json["layers"][0];
  EXPECT_EQ(about["compute"], "fp8");
  EXPECT_EQ(about["score"], "sparse_mixer");
  EXPECT_NEAR(about["jitter"].get<double>(), 0.01, 1e-6);
  EXPECT_EQ(read_file(about["router"].get<std::string>()).size(), 16u * 64 * 2);
}

}  // namespace
}  // namespace switchyard::cli
