// The routing of each model family that Switchyard serves, with its real expert counts.
#pragma once

#include <string>
#include <vector>

#include "support/specs.h"

namespace switchyard::test {

struct Family {
  std::string name;
  LayerSpec spec;
};

inline LayerSpec routing_layer(int num_experts, int top_k, const RoutingSpec& routing) {
  LayerSpec spec = testing::spec_of(64, 64, num_experts, top_k);
  spec.routing = routing;
  return spec;
}

inline std::vector<Family> families() {
  RoutingSpec softmax;
  const RoutingSpec softmax_renormalized{.renormalize = true};

  const RoutingSpec deepseek_v2{
      .num_groups = 8, .top_k_groups = 3, .group_score = GroupScore::kMax, .scale = 16.0f};

  const RoutingSpec glm{.score = ScoreFunction::kSigmoid,
                        .renormalize = true,
                        .renormalize_epsilon = 1e-20f,
                        .has_correction_bias = true,
                        .scale = 2.5f};
  RoutingSpec deepseek_v3 = glm;
  deepseek_v3.num_groups = 8;
  deepseek_v3.top_k_groups = 4;

  RoutingSpec deepseek_v4 = glm;
  deepseek_v4.score = ScoreFunction::kSqrtSoftplus;
  deepseek_v4.scale = 1.5f;
  RoutingSpec deepseek_v4_hash = deepseek_v4;
  deepseek_v4_hash.method = RoutingMethod::kHash;
  deepseek_v4_hash.has_correction_bias = false;

  const RoutingSpec llama4{.score = ScoreFunction::kSigmoid, .top_k_before_score = true};
  const RoutingSpec gpt_oss{.top_k_before_score = true};
  const RoutingSpec phi{.method = RoutingMethod::kSparseMixer};

  // Combinations that no listed family has, but the spec can say.
  RoutingSpec softmax_biased_groups = softmax;
  softmax_biased_groups.has_correction_bias = true;
  softmax_biased_groups.num_groups = 3;
  softmax_biased_groups.top_k_groups = 2;
  softmax_biased_groups.group_score = GroupScore::kMax;
  RoutingSpec logit_groups = gpt_oss;
  logit_groups.has_correction_bias = true;
  logit_groups.num_groups = 5;
  logit_groups.top_k_groups = 2;
  RoutingSpec softmax_epsilon = softmax_renormalized;
  softmax_epsilon.renormalize_epsilon = 0.125f;
  RoutingSpec softmax_hash = softmax;
  softmax_hash.method = RoutingMethod::kHash;

  return {
      {"OLMoE", routing_layer(64, 8, softmax)},
      {"Qwen1.5-MoE", routing_layer(60, 4, softmax)},
      {"Qwen3", routing_layer(128, 8, softmax_renormalized)},
      {"Qwen3.5", routing_layer(512, 10, softmax_renormalized)},
      {"Mixtral", routing_layer(8, 2, softmax_renormalized)},
      {"DeepSeek-V2", routing_layer(160, 6, deepseek_v2)},
      {"DeepSeek-V3", routing_layer(256, 8, deepseek_v3)},
      {"DeepSeek-V4", routing_layer(256, 6, deepseek_v4)},
      {"DeepSeek-V4 hash", routing_layer(256, 6, deepseek_v4_hash)},
      {"GLM-4.5", routing_layer(160, 8, glm)},
      {"Kimi-K2", routing_layer(384, 8, glm)},
      {"Llama-4", routing_layer(16, 1, llama4)},
      {"GPT-OSS", routing_layer(128, 4, gpt_oss)},
      {"DBRX", routing_layer(16, 4, softmax_renormalized)},
      {"Phi-3.5-MoE", routing_layer(16, 2, phi)},
      {"softmax, bias, groups by max", routing_layer(51, 7, softmax_biased_groups)},
      {"logits, bias, groups by sum", routing_layer(35, 3, logit_groups)},
      {"softmax, epsilon", routing_layer(33, 16, softmax_epsilon)},
      {"softmax, hash", routing_layer(24, 5, softmax_hash)},
      {"one expert", routing_layer(1, 1, softmax)},
      {"all experts", routing_layer(16, 16, softmax)},
      {"most experts", routing_layer(1024, 32, softmax)},
  };
}

}  // namespace switchyard::test
