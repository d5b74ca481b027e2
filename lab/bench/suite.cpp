#include "bench/suite.h"

#include <fmt/core.h>

#include <utility>

#include "base/join.h"
#include "base/printable.h"
#include "models/model_table.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

LayerSpec first_moe_layer(std::string_view model, const ConfigOverrides& overrides) {
  const ModelEntry& entry = find_model(model);
  const ModelConfig config =
      parse_config(rewrite_config(entry.config_json, overrides, DType::kBF16), entry.name);
  // The last layer stands for all: a model's layers differ only in that the first ones may route by
  // hash.
  return *config.layers.at(static_cast<std::size_t>(config.moe_layers().back()));
}

// Removes the limit to groups, which stand for groups of ranks, and the shared expert, which every
// rank has for itself.
BenchLayer routed_alone(std::string_view name, std::string_view model,
                        const ConfigOverrides& overrides) {
  BenchLayer layer{std::string(name), first_moe_layer(model, overrides)};
  layer.spec.routing.num_groups = 1;
  layer.spec.routing.top_k_groups = 1;
  layer.spec.shared_intermediate = 0;
  layer.spec.shared_sigmoid_gate = false;
  return layer;
}

BenchLayer deepseek_rank(ConfigOverrides overrides) {
  if (overrides.num_experts == 0) overrides.num_experts = 32;
  return routed_alone(kDeepseekRank, "deepseek-v3", overrides);
}

BenchLayer layer_named(std::string_view name, const ConfigOverrides& overrides) {
  if (name == kDeepseekRank) return deepseek_rank(overrides);
  for (const RoutedAlone& known : kRoutedAlone) {
    if (name == known.name) return routed_alone(name, known.model, overrides);
  }
  return {std::string(name), first_moe_layer(name, overrides)};
}

BenchPlan plan_in(std::vector<BenchTypes> types) {
  BenchPlan plan{.dtype = types.front().weights, .compute = types.front().compute};
  plan.types = std::move(types);
  return plan;
}

// Suites compute in the type of the weights, unless that has four bits.
BenchPlan plan_in(DType dtype) { return plan_in({{dtype, dtype}}); }

BenchPlan one_gpu(DType dtype) {
  BenchPlan plan = plan_in(dtype);
  for (const std::string_view model : {std::string_view("olmoe"), std::string_view("qwen3-30b"),
                                       std::string_view("mixtral-8x7b"), kDeepseekRank}) {
    plan.layers.push_back(bench_layer(model));
  }
  plan.tokens = {1, 8, 32, 128, 512, 2048, 8192};
  plan.betas = {1, 0.5};
  return plan;
}

// Models with few, large experts. The token counts are the ends and the middle of one_gpu()'s
// range.
BenchPlan one_gpu_fp8_more() {
  BenchPlan plan = plan_in(DType::kF8E4M3);
  for (const char* model : {"mixtral-8x22b", "phi-3.5-moe", "jamba-1.5-mini", "dbrx"}) {
    plan.layers.push_back(bench_layer(model));
  }
  plan.tokens = {1, 32, 512, 8192};
  plan.betas = {1};
  return plan;
}

// The layer and the ranges of the FlashDMoE thesis, section 6.
BenchPlan thesis() {
  BenchPlan plan = plan_in(DType::kBF16);
  for (const int experts : {16, 32, 64, 128}) {
    plan.layers.push_back(bench_layer("thesis", {.num_experts = experts}));
  }
  plan.tokens = {1024, 2048, 4096, 8192};
  plan.betas = {1};
  return plan;
}

BenchPlan one_gpu_thesis() {
  BenchPlan plan = thesis();
  plan.tokens.push_back(16384);
  return plan;
}

// The same as the thesis measured it, with the gate in the time. Outputs of timed passes are
// checked, which its figures do not say.
BenchPlan thesis_with_gate() {
  BenchPlan plan = thesis();
  plan.checked_with_gate = true;
  return plan;
}

// The rivals over several ranks are kernels that take the routing as given, so the gate is not
// timed here either.
BenchPlan over_ranks(BenchPlan plan) {
  plan.over_ranks = true;
  plan.given_routing = true;
  return plan;
}

BenchPlan ep(DType dtype) {
  BenchPlan plan = over_ranks(plan_in(dtype));
  for (const char* model : {"v4-flash-routed", "v4-pro-routed", "v3-routed", "glm-5-routed"}) {
    plan.layers.push_back(bench_layer(model));
  }
  plan.tokens = {1, 8, 64, 256, 512, 1024, 2048, 4096, 8192};
  plan.betas = {1};
  return plan;
}

// AsteroMoE's end-to-end benchmark: DeepSeek-V3's whole layer on one GPU, shared expert and groups
// included. All 256 experts are there: 22.5 GB in bf16, and there are two copies of them.
BenchPlan astero() {
  BenchPlan plan = plan_in({{DType::kF8E4M3, DType::kF8E4M3}, {DType::kBF16, DType::kBF16}});
  plan.layers.push_back(bench_layer("deepseek-v3"));
  for (std::int64_t tokens = 1; tokens <= 32768; tokens *= 2) plan.tokens.push_back(tokens);
  plan.betas = {1};
  return plan;
}

// Models whose experts are published in four bits, on one GPU: whole, or with the experts that one
// of four ranks (V4-Pro), of eight (Kimi-K2) or of sixteen (Kimi-K3) has. MXFP4 is multiplied with
// tokens in bf16 and in FP8, INT4 with tokens in bf16. The rivals are kernels that take the routing
// as given.
BenchPlan four_bit() {
  constexpr DType kMxfp4 = DType::kF4E2M1, kInt4 = DType::kU4;
  BenchPlan plan =
      plan_in({{kMxfp4, DType::kBF16}, {kMxfp4, DType::kF8E4M3}, {kInt4, DType::kBF16}});
  const auto add = [&plan](const char* model, DType weights, int num_experts = 0) {
    plan.layers.push_back(bench_layer(model, {.num_experts = num_experts}));
    plan.layers.back().weights = weights;
  };
  add("gpt-oss-20b", kMxfp4);
  add("gpt-oss-120b", kMxfp4);
  add("v4-flash-routed", kMxfp4);
  add("v4-pro-routed", kMxfp4, 96);
  add("kimi-k3", kMxfp4, 56);
  add("kimi-k2-routed", kInt4, 48);
  plan.given_routing = true;
  plan.tokens = {1, 8, 64, 256, 1024, 2048, 8192};
  plan.betas = {1};
  return plan;
}

struct Suite {
  const char* name;
  BenchPlan (*plan)();
};
constexpr Suite kSuites[] = {
    {"one_gpu_bf16", [] { return one_gpu(DType::kBF16); }},
    {"one_gpu_thesis", one_gpu_thesis},
    {"one_gpu_fp8", [] { return one_gpu(DType::kF8E4M3); }},
    {"one_gpu_fp8_more", one_gpu_fp8_more},
    {"astero", astero},
    {"four_bit", four_bit},
    {"ep_fp8", [] { return ep(DType::kF8E4M3); }},
    {"ep_bf16", [] { return ep(DType::kBF16); }},
    {"ep_four_bit", [] { return over_ranks(four_bit()); }},
    {"ep_thesis", [] { return over_ranks(thesis()); }},
    {"thesis", thesis_with_gate},
};

}  // namespace

BenchLayer bench_layer(std::string_view model, const ConfigOverrides& overrides) {
  BenchLayer layer = layer_named(model, overrides);
  if (layer.spec.routing.method == RoutingMethod::kHash) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} routes by token id, so its activations cannot be given a "
                            "balancedness; choose another model",
                            model));
  }
  return layer;
}

const std::vector<std::string>& bench_suite_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Suite& suite : kSuites) all.emplace_back(suite.name);
    return all;
  }();
  return names;
}

BenchPlan bench_suite(std::string_view name) {
  for (const Suite& suite : kSuites) {
    if (name != suite.name) continue;
    BenchPlan plan = suite.plan();
    plan.suite = name;
    return plan;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--suite is '{}'; the suites of layers are {}, and 'switchyard bench "
                          "--help' lists others",
                          printable(name), join(bench_suite_names(), ", ")));
}

}  // namespace switchyard::bench
