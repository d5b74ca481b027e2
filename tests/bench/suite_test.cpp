// The points of every suite.
#include "bench/suite.h"

#include <gmock/gmock.h>

#include <array>
#include <map>

#include "bench/torch.h"

namespace switchyard::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
      // The rival has the gate, and no experts of four bits.
      if (plan.given_routing || layer.spec.shared_intermediate > 0) continue;
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

// The whole layer, in both types, over every power of two.
TEST(BenchSuite, Astero) {
  const BenchPlan plan = bench_suite("astero");
  EXPECT_THAT(plan.types, ElementsAre(BenchTypes{DType::kF8E4M3, DType::kF8E4M3},
                                      BenchTypes{DType::kBF16, DType::kBF16}));
  EXPECT_EQ(plan.dtype, DType::kF8E4M3);
  EXPECT_EQ(plan.compute, DType::kF8E4M3);
  EXPECT_FALSE(plan.over_ranks);
  EXPECT_FALSE(plan.given_routing);
  ASSERT_EQ(plan.layers.size(), 1u);
  const LayerSpec& spec = plan.layers[0].spec;
  EXPECT_EQ(spec.hidden, 7168);
  EXPECT_EQ(spec.intermediate, 2048);
  EXPECT_EQ(spec.num_experts, 256);
  EXPECT_EQ(spec.top_k, 8);
  EXPECT_EQ(spec.shared_intermediate, 2048);
  EXPECT_THAT(plan.betas, ElementsAre(1));
  ASSERT_EQ(plan.tokens.size(), 16u);
  for (std::size_t i = 0; i < plan.tokens.size(); ++i) EXPECT_EQ(plan.tokens[i], 1 << i);
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
    for (const auto& [model, spec, weights] : plan.layers) {
      EXPECT_FALSE(weights.has_value());
      EXPECT_EQ((Shape{spec.hidden, spec.intermediate, spec.num_experts, spec.top_k}),
                shapes.at(model));
      EXPECT_EQ(spec.shared_intermediate, 0) << model;
      EXPECT_EQ(spec.routing.num_groups, 1) << model;
      EXPECT_EQ(spec.routing.method, RoutingMethod::kTopK) << model;
      EXPECT_TRUE(spec.activation.gated) << model;
    }
  }

  const BenchPlan gated = bench_suite("thesis");
  EXPECT_TRUE(gated.checked_with_gate);
  EXPECT_FALSE(gated.over_ranks);
  EXPECT_FALSE(gated.given_routing);
  ASSERT_EQ(gated.layers.size(), 4u);
  EXPECT_EQ(gated.layers[0].spec.hidden, 1024);
  EXPECT_EQ(gated.layers[0].spec.intermediate, 4096);
  EXPECT_EQ(gated.layers[0].spec.top_k, 2);
  EXPECT_EQ(gated.layers[0].spec.activation.kind, ActivationKind::kGelu);
  EXPECT_TRUE(gated.layers[0].spec.expert_bias);
  EXPECT_THAT(gated.tokens, ElementsAre(1024, 2048, 4096, 8192));
  const BenchPlan thesis = bench_suite("ep_thesis");
  EXPECT_TRUE(thesis.over_ranks);
  EXPECT_THAT(thesis.tokens, ElementsAre(1024, 2048, 4096, 8192));
  EXPECT_EQ(thesis.layers.size(), 4u);
  EXPECT_FALSE(bench_suite("one_gpu_thesis").over_ranks);
  EXPECT_FALSE(bench_suite("one_gpu_thesis").given_routing);
}

TEST(BenchSuite, FourBitIsTheGridOfItsIssue) {
  constexpr DType kMxfp4 = DType::kF4E2M1, kInt4 = DType::kU4;
  using Shape = std::array<int, 4>;  // hidden, intermediate, experts, top_k
  const std::map<std::string, Shape> shapes = {
      {"gpt-oss-20b", {2880, 2880, 32, 4}},      {"gpt-oss-120b", {2880, 2880, 128, 4}},
      {"v4-flash-routed", {4096, 2048, 256, 6}}, {"v4-pro-routed", {7168, 3072, 96, 6}},
      {"kimi-k3", {3584, 3072, 56, 16}},         {"kimi-k2-routed", {7168, 2048, 48, 8}}};
  for (const char* name : {"four_bit", "ep_four_bit"}) {
    const BenchPlan plan = bench_suite(name);
    EXPECT_EQ(plan.over_ranks, plan.suite == "ep_four_bit");
    EXPECT_TRUE(plan.given_routing);
    EXPECT_EQ(plan.dtype, kMxfp4);
    EXPECT_EQ(plan.compute, DType::kBF16);
    EXPECT_THAT(plan.types,
                ElementsAre(BenchTypes{kMxfp4, DType::kBF16}, BenchTypes{kMxfp4, DType::kF8E4M3},
                            BenchTypes{kInt4, DType::kBF16}));
    EXPECT_THAT(plan.tokens, ElementsAre(1, 8, 64, 256, 1024, 2048, 8192));
    EXPECT_THAT(plan.betas, ElementsAre(1));
    ASSERT_EQ(plan.layers.size(), shapes.size());
    for (const BenchLayer& layer : plan.layers) {
      const LayerSpec& spec = layer.spec;
      EXPECT_EQ((Shape{spec.hidden, spec.intermediate, spec.num_experts, spec.top_k}),
                shapes.at(layer.model));
      EXPECT_EQ(spec.shared_intermediate, 0) << layer.model;
      EXPECT_EQ(layer.has(kInt4), layer.model == "kimi-k2-routed");
      EXPECT_EQ(layer.has(kMxfp4), layer.model != "kimi-k2-routed");
    }
  }
}

TEST(BenchSuite, RivalsArithmetic) {
  const LayerSpec olmoe = bench_layer("olmoe").spec;
  EXPECT_THAT(torch_refusal(olmoe, DType::kF32), HasSubstr("f32"));
  const LayerSpec odd = bench_layer("olmoe", ConfigOverrides{.intermediate = 24}).spec;
  EXPECT_EQ(torch_refusal(odd, DType::kBF16), "");
  EXPECT_THAT(torch_refusal(odd, DType::kF8E4M3), HasSubstr("multiples of 16"));
}

}  // namespace
}  // namespace switchyard::bench
