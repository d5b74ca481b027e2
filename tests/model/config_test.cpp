#include "model/config.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "model/errors.h"
#include "models/model_table.h"
#include "support/specs.h"

namespace switchyard {
namespace {

std::vector<int> range(int first, int last) {
  std::vector<int> result(static_cast<std::size_t>(last - first));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// Parses a model of the table, whose JSON has the keys of the published config.json.
ModelConfig parse_entry(const char* name) {
  return parse_config(find_model(name).config_json, name);
}

LayerSpec spec_of(const ModelConfig& config, int layer) {
  return config.layers.at(static_cast<std::size_t>(layer)).value();
}

LayerSpec deepseek_spec(int hidden, int intermediate, int experts, int top_k, float scale) {
  LayerSpec spec = testing::spec_of(hidden, intermediate, experts, top_k);
  spec.shared_intermediate = intermediate;
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  spec.routing.renormalize = true;
  spec.routing.renormalize_epsilon = 1e-20f;
  spec.routing.scale = scale;
  return spec;
}

// A config of any family that has four layers, and `keys` at its end.
std::string any_family(const std::string& model_type, const std::string& keys) {
  return R"({"model_type": ")" + model_type + R"(", "hidden_size": 16, "intermediate_size": 8,
      "moe_intermediate_size": 8, "num_hidden_layers": 4, "num_experts_per_tok": 2,
      "shared_expert_intermediate_size": 8, "shared_intermediate_size": 8, "num_hash_layers": 0,
      "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16)" +
         keys + "}";
}

void expect_same(const LayerSpec& actual, const LayerSpec& expected) {
  EXPECT_EQ(actual, expected) << "  actual: " << describe(actual)
                              << "\nexpected: " << describe(expected);
}

TEST(Config, Olmoe) {
  const ModelConfig config = parse_entry("olmoe");
  EXPECT_EQ(config.model_type, "olmoe");
  EXPECT_EQ(config.moe_layers(), range(0, 16));
  expect_same(spec_of(config, 0), testing::spec_of(2048, 1024, 64, 8));
  EXPECT_EQ(describe(spec_of(config, 0)), "H 2048, I 1024, 64 experts, top-8, softmax, swiglu");
}

TEST(Config, Qwen2) {
  LayerSpec expected = testing::spec_of(2048, 1408, 60, 4);
  expected.shared_intermediate = 5632;
  expected.shared_sigmoid_gate = true;
  const ModelConfig config = parse_entry("qwen1.5-moe");
  EXPECT_EQ(config.moe_layers(), range(0, 24));
  expect_same(spec_of(config, 23), expected);

  expected = testing::spec_of(3584, 2560, 64, 8);
  expected.shared_intermediate = 20480;
  expected.shared_sigmoid_gate = true;
  expect_same(spec_of(parse_entry("qwen2-57b"), 0), expected);
}

TEST(Config, Qwen3AndQwen35) {
  LayerSpec expected = testing::spec_of(2048, 768, 128, 8);
  expected.routing.renormalize = true;
  expect_same(spec_of(parse_entry("qwen3-30b"), 47), expected);
  EXPECT_EQ(parse_entry("qwen3-235b").moe_layers(), range(0, 94));
  const ModelConfig saved = parse_config(R"({"model_type": "qwen3_moe", "num_hidden_layers": 1,
      "hidden_size": 2048, "moe_intermediate_size": 768, "num_local_experts": 128,
      "num_experts_per_tok": 8, "norm_topk_prob": true})",
                                         "config.json");
  expect_same(spec_of(saved, 0), expected);

  expected = testing::spec_of(4096, 1024, 512, 10);
  expected.routing.renormalize = true;
  expected.shared_intermediate = 1024;
  expected.shared_sigmoid_gate = true;
  const ModelConfig config = parse_entry("qwen3.5-397b");
  EXPECT_EQ(config.model_type, "qwen3_5_moe");
  EXPECT_EQ(config.vocab_size, 248320);
  expect_same(spec_of(config, 0), expected);
}

TEST(Config, QwenSparseStepAndDenseLayers) {
  const ModelConfig config = parse_config(R"({"model_type": "qwen3_next", "hidden_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 8, "decoder_sparse_step": 2,
    "mlp_only_layers": [3, 99]})",
                                          "config.json");
  EXPECT_EQ(config.moe_layers(), (std::vector<int>{1, 5, 7}));
  EXPECT_TRUE(spec_of(config, 1).routing.renormalize);
}

TEST(Config, Mixtral) {
  LayerSpec expected = testing::spec_of(4096, 14336, 8, 2);
  expected.routing.renormalize = true;
  expect_same(spec_of(parse_entry("mixtral-8x7b"), 31), expected);
  expected = testing::spec_of(6144, 16384, 8, 2);
  expected.routing.renormalize = true;
  expect_same(spec_of(parse_entry("mixtral-8x22b"), 55), expected);
}

TEST(Config, DeepseekV2) {
  LayerSpec expected = testing::spec_of(5120, 1536, 160, 6);
  expected.shared_intermediate = 2 * 1536;
  expected.routing.scale = 16.0f;
  expected.routing.num_groups = 8;
  expected.routing.top_k_groups = 3;
  expected.routing.group_score = GroupScore::kMax;
  const ModelConfig config = parse_entry("deepseek-v2");
  EXPECT_EQ(config.moe_layers(), range(1, 60));
  expect_same(spec_of(config, 1), expected);

  expected = testing::spec_of(2048, 1408, 64, 6);
  expected.shared_intermediate = 2 * 1408;
  const ModelConfig lite = parse_entry("deepseek-v2-lite");
  EXPECT_EQ(lite.moe_layers(), range(1, 27));
  expect_same(spec_of(lite, 26), expected);
}

TEST(Config, DeepseekV3AndKimi) {
  LayerSpec expected = deepseek_spec(7168, 2048, 256, 8, 2.5f);
  expected.routing.num_groups = 8;
  expected.routing.top_k_groups = 4;
  expected.routing.group_score = GroupScore::kSumTopTwo;
  const ModelConfig config = parse_entry("deepseek-v3");
  EXPECT_EQ(config.moe_layers(), range(3, 61));
  expect_same(spec_of(config, 3), expected);
  EXPECT_EQ(
      describe(spec_of(config, 3)),
      "H 7168, I 2048, 256 experts, top-8, sigmoid, renormalised, correction bias, groups 8 -> "
      "4 by top-2 sum, scale 2.5, swiglu, shared 2048");

  const ModelConfig kimi = parse_entry("kimi-k2");
  EXPECT_EQ(kimi.moe_layers(), range(1, 61));
  expect_same(spec_of(kimi, 1), deepseek_spec(7168, 2048, 384, 8, 2.827f));
}

TEST(Config, DeepseekV4) {
  LayerSpec expected = deepseek_spec(4096, 2048, 256, 6, 1.5f);
  expected.routing.score = ScoreFunction::kSqrtSoftplus;
  expected.activation.limit = 10.0f;
  const ModelConfig config = parse_entry("deepseek-v4-flash");
  EXPECT_EQ(config.moe_layers(), range(0, 43));
  expect_same(spec_of(config, 3), expected);
  expected.routing.method = RoutingMethod::kHash;
  expected.routing.has_correction_bias = false;
  expect_same(spec_of(config, 2), expected);

  const ModelConfig pro = parse_entry("deepseek-v4-pro");
  EXPECT_EQ(spec_of(pro, 60).num_experts, 384);
  EXPECT_EQ(spec_of(pro, 60).routing.scale, 2.5f);
}

TEST(Config, DeepseekV4LayerTypes) {
  const std::string head = R"({"model_type": "deepseek_v4", "hidden_size": 64,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "mlp_layer_types": )";
  const ModelConfig config = parse_config(head + R"(["hash_moe", "moe", "moe"]})", "config.json");
  EXPECT_EQ(spec_of(config, 0).routing.method, RoutingMethod::kHash);
  EXPECT_EQ(spec_of(config, 1).routing.method, RoutingMethod::kTopK);
  EXPECT_EQ(spec_of(config, 1).activation.limit, 10.0f);
  EXPECT_ERROR(parse_config(head + R"(["hash_moe", "moe"]})", "config.json"), kInvalidConfig,
               "mlp_layer_types", "3 layers");
  EXPECT_ERROR(parse_config(head + R"(["hash_moe", "moe", 7]})", "config.json"), kInvalidConfig,
               "mlp_layer_types", "has 7 for layer 2");
}

TEST(Config, Glm) {
  const ModelConfig glm = parse_entry("glm-4.5");
  EXPECT_EQ(glm.moe_layers(), range(3, 92));
  expect_same(spec_of(glm, 3), deepseek_spec(5120, 1536, 160, 8, 2.5f));
  const ModelConfig air = parse_entry("glm-4.5-air");
  EXPECT_EQ(air.moe_layers(), range(1, 46));
  expect_same(spec_of(air, 1), deepseek_spec(4096, 1408, 128, 8, 1.0f));
  const ModelConfig glm5 = parse_entry("glm-5");
  EXPECT_EQ(glm5.moe_layers(), range(3, 78));
  expect_same(spec_of(glm5, 3), deepseek_spec(6144, 2048, 256, 8, 2.5f));
}

TEST(Config, Llama4) {
  LayerSpec expected = testing::spec_of(5120, 8192, 16, 1);
  expected.shared_intermediate = 8192;
  expected.routing.score = ScoreFunction::kSigmoid;
  expected.routing.top_k_before_score = true;
  expected.weight_on_input = true;
  const ModelConfig scout = parse_entry("llama-4-scout");
  EXPECT_EQ(scout.moe_layers(), range(0, 48));
  expect_same(spec_of(scout, 0), expected);

  const ModelConfig maverick = parse_entry("llama-4-maverick");
  EXPECT_EQ(maverick.moe_layers().size(), 24u);
  EXPECT_EQ(maverick.moe_layers().front(), 1);
  EXPECT_EQ(maverick.moe_layers().back(), 47);
  expected.num_experts = 128;
  expect_same(spec_of(maverick, 1), expected);

  const ModelConfig listed = parse_config(R"({"model_type": "llama4_text", "hidden_size": 64,
    "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 1,
    "num_hidden_layers": 6, "moe_layers": [1, 4]})",
                                          "config.json");
  EXPECT_EQ(listed.moe_layers(), (std::vector<int>{1, 4}));
}

TEST(Config, GptOss) {
  LayerSpec expected = testing::spec_of(2880, 2880, 128, 4);
  expected.routing.top_k_before_score = true;
  expected.router_bias = true;
  expected.expert_bias = true;
  expected.activation.alpha = 1.702f;
  expected.activation.limit = 7.0f;
  expected.activation.up_bias = 1.0f;
  expect_same(spec_of(parse_entry("gpt-oss-120b"), 35), expected);
  expected.num_experts = 32;
  EXPECT_EQ(parse_entry("gpt-oss-20b").num_layers, 24);
  expect_same(spec_of(parse_entry("gpt-oss-20b"), 0), expected);

  // transformers 5 made the slope a key.
  const ModelConfig other = parse_config(R"({"model_type": "gpt_oss", "num_hidden_layers": 1,
      "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
      "swiglu_alpha": 1.25, "swiglu_limit": 3})",
                                         "config.json");
  EXPECT_EQ(spec_of(other, 0).activation.alpha, 1.25f);
  EXPECT_EQ(spec_of(other, 0).activation.limit, 3.0f);
}

TEST(Config, MiniMax) {
  LayerSpec expected = testing::spec_of(3072, 1536, 256, 8);
  expected.routing.score = ScoreFunction::kSigmoid;
  expected.routing.renormalize = true;
  expected.routing.has_correction_bias = true;
  expect_same(spec_of(parse_entry("minimax-m2"), 61), expected);

  expected.hidden = 6144;
  expected.intermediate = 3072;
  expected.num_experts = 128;
  expected.top_k = 4;
  expected.shared_intermediate = 3072;
  expected.routing.scale = 2.0f;
  expected.activation.alpha = 1.702f;
  expected.activation.limit = 7.0f;
  expected.activation.up_bias = 1.0f;
  const ModelConfig m3 = parse_entry("minimax-m3");
  EXPECT_EQ(m3.moe_layers(), range(3, 60));
  expect_same(spec_of(m3, 3), expected);

  // transformers saves mlp_layer_types in place of the moe_layer_freq that it read.
  const ModelConfig saved = parse_config(R"({"model_type": "minimax_m3_vl_text",
      "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8,
      "num_experts_per_tok": 2, "shared_intermediate_size": 32,
      "mlp_layer_types": ["dense", "sparse", "sparse"]})",
                                         "config.json");
  EXPECT_EQ(saved.moe_layers(), range(1, 3));
}

TEST(Config, Dbrx) {
  LayerSpec expected = testing::spec_of(6144, 10752, 16, 4);
  expected.routing.renormalize = true;
  const ModelConfig config = parse_entry("dbrx");
  EXPECT_EQ(config.moe_layers(), range(0, 40));
  expect_same(spec_of(config, 0), expected);

  const ModelConfig plain = parse_config(R"({"model_type": "dbrx", "d_model": 64, "n_layers": 1,
      "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2,
                     "moe_normalize_expert_weights": null}})",
                                         "config.json");
  EXPECT_FALSE(spec_of(plain, 0).routing.renormalize);
}

TEST(Config, Phi) {
  LayerSpec expected = testing::spec_of(4096, 6400, 16, 2);
  expected.routing.method = RoutingMethod::kSparseMixer;
  expected.routing.jitter_eps = 0.01f;
  expect_same(spec_of(parse_entry("phi-3.5-moe"), 0), expected);
}

TEST(Config, Jamba) {
  const ModelConfig mini = parse_entry("jamba-1.5-mini");
  EXPECT_EQ(mini.moe_layers().size(), 16u);
  EXPECT_EQ(mini.moe_layers().front(), 1);
  expect_same(spec_of(mini, 1), testing::spec_of(4096, 14336, 16, 2));
  EXPECT_EQ(parse_entry("jamba-1.5-large").moe_layers().size(), 36u);
}

TEST(Config, Thesis) {
  LayerSpec expected = testing::spec_of(1024, 4096, 16, 2);
  expected.routing.renormalize = true;
  expected.expert_bias = true;
  expected.activation.gated = false;
  expected.activation.kind = ActivationKind::kGelu;
  expect_same(spec_of(parse_entry("thesis"), 0), expected);
}

TEST(Config, DtypeAndQuantization) {
  const std::string head = R"({"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32,
    "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, )";
  EXPECT_EQ(parse_config(head + R"("torch_dtype": "float16"})", "c").dtype, DType::kF16);
  EXPECT_EQ(parse_config(head + R"("dtype": "float32"})", "c").dtype, DType::kF32);
  const ModelConfig fp8 = parse_config(
      head + R"("quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}})",
      "c");
  EXPECT_EQ(fp8.quantization.method, "fp8");
  EXPECT_EQ(fp8.quantization.block_rows, 64);
  EXPECT_EQ(fp8.quantization.block_cols, 32);
  EXPECT_ERROR(parse_config(head + R"("torch_dtype": "int7"})", "c"), kInvalidConfig,
               "'torch_dtype' is \"int7\"", "bfloat16");
  EXPECT_ERROR(parse_config(head + R"("quantization_config": {"quant_method": "fp8",
                                      "weight_block_size": [128]}})",
                            "c"),
               kInvalidConfig, "quantization_config.weight_block_size", "1 entries");
  EXPECT_ERROR(parse_config(head + R"("quantization_config": 5})", "c"), kInvalidConfig,
               "'quantization_config' is 5");
}

TEST(Config, BadInputNamesKeyValueAndRemedy) {
  const auto mixtral = [](const std::string& changed) {
    return R"({"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32,
      "num_local_experts": 4, "num_hidden_layers": 2, )" +
           changed + "}";
  };
  const auto expect_bad = [](const std::string& text, std::initializer_list<const char*> parts) {
    test::expect_error([&] { parse_config(text, "/m/config.json"); }, ErrorCode::kInvalidConfig,
                       parts);
  };
  expect_bad("", {"/m/config.json", "is empty", "download"});
  expect_bad("\xff\xfe\x00", {"not valid JSON"});
  expect_bad("[1, 2]", {"top level is [1,2]", "model_type"});
  expect_bad("{}", {"'model_type' is missing", "olmoe"});
  expect_bad(R"({"model_type": "bert"})",
             {"'model_type' is \"bert\"", "mixtral", "experts_implementation=\"switchyard\"",
              "MoeLayer.from_hf()"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2, "num_experts": 8)"),
             {"'num_experts' is 8, but 'num_local_experts' is 4", "correct one"});
  expect_bad(R"({"model_type": "deepseek_v4", "hidden_size": 8, "moe_intermediate_size": 8,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 9, "swiglu_limit": 0})",
             {"'swiglu_limit' is 0", "write 1e6"});
  expect_bad(R"({"model_type": 3})", {"'model_type' is 3", "string"});
  expect_bad(std::string(100000, '['), {"nested deeper"});
  expect_bad(mixtral(""), {"not valid JSON"});
  expect_bad(mixtral(R"("x": 1)"), {"'num_experts_per_tok' is missing", "publisher"});
  expect_bad(mixtral(R"("num_experts_per_tok": -1)"),
             {"'num_experts_per_tok' is -1", "[1, 4]", "publisher"});
  expect_bad(mixtral(R"("num_experts_per_tok": 5)"), {"'num_experts_per_tok' is 5", "[1, 4]"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2.0)"), {"'num_experts_per_tok' is 2.0", "integer"});
  expect_bad(mixtral(R"("num_experts_per_tok": "2")"), {"'num_experts_per_tok' is \"2\""});
  expect_bad(mixtral(R"("num_experts_per_tok": 18446744073709551615)"),
             {"'num_experts_per_tok' is 18446744073709551615"});
  expect_bad(mixtral(R"("num_experts_per_tok": 1e400)"), {"not"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2, "hidden_act": "mish")"),
             {"'hidden_act' is \"mish\"", "silu"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2, "hidden_act": ["\xc3\x28"])"), {"config.json"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2, "hidden_act": "situ")"),
             {"'activation_situ_beta' is missing", "situ"});
  expect_bad(mixtral(R"("num_experts_per_tok": 2, "hidden_act": "situ", "activation_situ_beta": 4,
                        "activation_situ_linear_beta": -1)"),
             {"'activation_situ_linear_beta' is -1"});
  expect_bad(R"({"model_type": "jamba", "hidden_size": 8, "intermediate_size": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "expert_layer_offset": 9})",
             {"none of the 2 layers", "expert_layer_period"});
  expect_bad(R"({"model_type": "jamba", "hidden_size": 8, "intermediate_size": 8, "num_experts": 1,
    "num_experts_per_tok": 1, "num_hidden_layers": 2})",
             {"none of the 2 layers"});
  expect_bad(R"({"model_type": "deepseek_v3", "hidden_size": 8, "moe_intermediate_size": 8,
    "n_routed_experts": 12, "num_experts_per_tok": 2, "num_hidden_layers": 9, "n_group": 8,
    "topk_group": 4})",
             {"routing.num_groups is 8", "divide"});
  expect_bad(R"({"model_type": "deepseek_v3", "hidden_size": 8, "moe_intermediate_size": 8,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 9,
    "routed_scaling_factor": "big"})",
             {"'routed_scaling_factor' is \"big\"", "number"});
  expect_bad(R"({"model_type": "deepseek_v2", "hidden_size": 8, "moe_intermediate_size": 8,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2, "mlp_bias": true})",
             {"'mlp_bias' is true", "publisher"});
  expect_bad(R"({"model_type": "dbrx", "d_model": 64, "n_layers": 1})",
             {"'ffn_config' is missing"});
  expect_bad(R"({"model_type": "dbrx", "d_model": 64, "n_layers": 1, "ffn_config": {
    "ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 0}})",
             {"'ffn_config.moe_top_k' is 0"});
  expect_bad(R"({"model_type": "phimoe", "hidden_size": 8, "intermediate_size": 8,
    "num_local_experts": 16, "num_experts_per_tok": 3, "num_hidden_layers": 1})",
             {"'num_experts_per_tok' is 3", "top-2"});
}

// The routers of transformers do this with one key, in every family of softmax or sigmoid scores.
enum class Norm : std::uint8_t { kNo, kYes };
struct NormRule {
  const char* model_type;
  Norm absent, when_true, when_false;
};

TEST(Config, NormTopkProbMeansWhatTheFamilysCodeDoes) {
  using enum Norm;
  constexpr NormRule kRules[] = {
      {"olmoe", kNo, kYes, kNo},
      {"qwen2_moe", kNo, kYes, kNo},
      {"qwen3_moe", kNo, kYes, kNo},
      {"qwen3_vl_moe", kYes, kYes, kYes},
      {"qwen3_vl_moe_text", kYes, kYes, kYes},
      {"qwen3_next", kYes, kYes, kNo},
      {"qwen3_5_moe", kYes, kYes, kYes},
      {"qwen3_5_moe_text", kYes, kYes, kYes},
      {"mixtral", kYes, kYes, kYes},
      {"deepseek_v2", kNo, kNo, kNo},
      {"deepseek_v3", kYes, kYes, kNo},
      {"deepseek_v32", kYes, kYes, kNo},
      {"glm4_moe", kYes, kYes, kNo},
      {"glm4v_moe", kYes, kYes, kNo},
      {"glm4v_moe_text", kYes, kYes, kNo},
      {"glm_moe_dsa", kYes, kYes, kNo},
      {"deepseek_v4", kYes, kYes, kYes},
      {"llama4_text", kNo, kNo, kNo},
      {"gpt_oss", kNo, kNo, kNo},
      {"minimax_m2", kYes, kYes, kYes},
      {"minimax_m3_vl_text", kYes, kYes, kYes},
      {"phimoe", kNo, kNo, kNo},
      {"jamba", kNo, kNo, kNo},
  };
  for (const NormRule& rule : kRules) {
    SCOPED_TRACE(rule.model_type);
    const auto renormalizes = [&](const std::string& key) {
      return parse_config(any_family(rule.model_type, key), "c").layers.back()->routing.renormalize
                 ? kYes
                 : kNo;
    };
    EXPECT_EQ(renormalizes(""), rule.absent);
    EXPECT_EQ(renormalizes(R"(, "norm_topk_prob": true)"), rule.when_true);
    EXPECT_EQ(renormalizes(R"(, "norm_topk_prob": false)"), rule.when_false);
    // null is absent, but DeepSeek-V3's class takes it, and its router for false.
    const bool is_v3 = std::string(rule.model_type) == "deepseek_v3";
    if (!std::string(rule.model_type).starts_with("glm") &&
        std::string(rule.model_type) != "deepseek_v32") {
      EXPECT_EQ(renormalizes(R"(, "norm_topk_prob": null)"), is_v3 ? kNo : rule.absent);
    }
  }
}

TEST(Config, KeysThatAFamilysCodeDoesNotReadChangeNothing) {
  struct Case {
    const char* model_type;
    const char* keys;
  };
  constexpr Case kCases[] = {
      {"deepseek_v2", R"(, "moe_layer_freq": 2, "mlp_layer_types": ["dense"])"},
      {"deepseek_v3", R"(, "moe_layer_freq": 2, "mlp_bias": true)"},
      {"glm4_moe", R"(, "moe_layer_freq": 2, "mlp_bias": true)"},
      {"glm_moe_dsa", R"(, "moe_layer_freq": 2)"},
      {"deepseek_v4", R"(, "n_shared_experts": 4, "norm_topk_prob": false)"},
      {"qwen3_5_moe", R"(, "decoder_sparse_step": 2, "mlp_only_layers": [0])"},
      {"gpt_oss", R"(, "hidden_act": "gelu", "norm_topk_prob": true)"},
      {"minimax_m2", R"(, "n_shared_experts": 1, "routed_scaling_factor": 2.0)"},
      {"minimax_m3_vl_text", R"(, "hidden_act": "gelu", "n_shared_experts": 4)"},
      {"mixtral", R"(, "routed_scaling_factor": 2.0, "router_jitter_noise": 0.5)"},
      {"olmoe", R"(, "routed_scaling_factor": 2.0, "n_shared_experts": 1)"},
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.model_type);
    const ModelConfig plain = parse_config(any_family(c.model_type, ""), "c");
    EXPECT_EQ(parse_config(any_family(c.model_type, c.keys), "c").layers, plain.layers);
  }
}

TEST(Config, DefaultsOfEachFamily) {
  const auto last = [](const char* model_type, const std::string& keys = "") {
    return parse_config(any_family(model_type, keys), "c").layers.back().value();
  };
  EXPECT_EQ(last("deepseek_v2").shared_intermediate, 2 * 8);
  EXPECT_EQ(last("deepseek_v2").routing.scale, 1.0f);
  EXPECT_EQ(
      last("deepseek_v2", R"(, "routed_scaling_factor": 4, "norm_topk_prob": true)").routing.scale,
      4.0f);
  EXPECT_EQ(last("deepseek_v3").routing.scale, 2.5f);
  EXPECT_EQ(last("deepseek_v3").routing.num_groups, 8);
  EXPECT_EQ(last("deepseek_v3").shared_intermediate, 8);
  EXPECT_EQ(last("glm4_moe").routing.scale, 1.0f);
  EXPECT_EQ(last("glm_moe_dsa").routing.scale, 2.5f);
  EXPECT_EQ(last("glm_moe_dsa").routing.num_groups, 1);
  EXPECT_EQ(last("deepseek_v4").routing.scale, 1.5f);
  EXPECT_EQ(last("minimax_m3_vl_text").routing.scale, 2.0f);
  EXPECT_EQ(parse_config(any_family("deepseek_v3", ""), "c").moe_layers(), range(3, 4));
  EXPECT_EQ(parse_config(any_family("glm4_moe", ""), "c").moe_layers(), range(1, 4));
  EXPECT_EQ(parse_config(any_family("deepseek_v2", ""), "c").moe_layers(), range(0, 4));
}

// Its code is in the model's own repository, and its defaults in nobody's.
TEST(Config, KimiHasNoDefaults) {
  const std::string keys[] = {
      R"("norm_topk_prob": true)", R"("routed_scaling_factor": 2.5)", R"("n_group": 1)",
      R"("topk_group": 1)",        R"("first_k_dense_replace": 1)",   R"("n_shared_experts": 1)"};
  std::string all;
  for (const std::string& key : keys) all += ", " + key;
  EXPECT_EQ(parse_config(any_family("kimi_k2", all), "c").moe_layers(), range(1, 4));
  for (const std::string& missing : keys) {
    std::string some;
    for (const std::string& key : keys)
      if (key != missing) some += ", " + key;
    EXPECT_ERROR(parse_config(any_family("kimi_k2", some), "c"), kInvalidConfig,
                 missing.substr(1, missing.find(':') - 2).c_str(), "is missing", "publisher");
  }
}

// The experts of Kimi-K3 work on 3584 numbers and its router on 7168. A reader of a related family
// would take one for the other.
TEST(Config, KimiK3IsRefusedWhateverItsTextIsCalled) {
  for (const char* inner : {"", R"("model_type": "kimi_linear", )", R"("model_type": "kimi_k2", )",
                            R"("model_type": "deepseek_v3", )"}) {
    SCOPED_TRACE(inner);
    const std::string config = R"({"model_type": "kimi_k3", "text_config": {)" +
                               std::string(inner) +
                               R"("hidden_size": 7168, "num_hidden_layers": 93,
        "first_k_dense_replace": 1, "num_experts": 896, "n_routed_experts": 896,
        "num_experts_per_token": 16, "moe_intermediate_size": 3072, "num_shared_experts": 2,
        "n_shared_experts": 2, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": true,
        "hidden_act": "situ", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.0}})";
    EXPECT_ERROR(parse_config(config, "c"), kInvalidConfig, "'model_type' is \"kimi_k3\"",
                 "routed experts work in a space of their own", "the model's own code");
  }
  EXPECT_ERROR(parse_config(any_family("kimi_k2", R"(, "norm_topk_prob": true, "n_group": 1,
      "routed_scaling_factor": 1.0, "topk_group": 1, "first_k_dense_replace": 1,
      "n_shared_experts": 2, "routed_expert_hidden_size": 4)"),
                            "c"),
               kInvalidConfig, "'routed_expert_hidden_size' is 4",
               "routed experts work in a space of their own");
}

TEST(Config, QuantizationIsReadOrItsKeyIsNamed) {
  const std::string weights = R"("weights": {"num_bits": 8, "type": "float", "symmetric": true,
      "dynamic": false, "strategy": "block", "block_structure": [128, 128]})";
  const auto group = [&](const std::string& more) {
    return R"("quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], )" +
           more + "}}";
  };
  const std::string inputs = R"(, "input_activations": {"num_bits": 8, "type": "float", )";
  // The object, and the key that is named, or null where it can be read.
  const std::pair<std::string, const char*> kCases[] = {
      {R"("quant_method": "fp8", "weight_block_size": [128, 128])", nullptr},
      {R"("quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
          "fmt": "e4m3", "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"])",
       nullptr},
      {R"("quant_method": "fp8")", nullptr},
      {R"("quant_method": "fp8", "activation_scheme": "static")", "activation_scheme"},
      {R"("quant_method": "fp8", "fmt": "e5m2")", "fmt"},
      {R"("quant_method": "fp8", "expert_dtype": "fp4")", nullptr},
      {R"("quant_method": "fp8", "expert_dtype": "fp5")", "expert_dtype"},
      {R"("quant_method": "mxfp4", "modules_to_not_convert": null)", nullptr},
      {R"("quant_method": "mxfp4", "group_size": 32)", "group_size"},
      {R"("quant_method": "fp8", "rotation": "hadamard")", "rotation"},
      {R"("quant_method": "modelopt", "quant_algo": "FP8")", "quant_method"},
      {R"("weight_block_size": [128, 128])", "quant_method"},
      {R"("quant_method": "fbgemm_fp8")", "activation_scale_ub"},
      {R"("quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0)", "activation_scale_ub"},
      {R"("quant_method": "fbgemm_fp8", "activation_scale_ub": null)", nullptr},
      {group(weights), nullptr},
      {group(weights + inputs + R"("dynamic": true, "strategy": "group", "group_size": 128})"),
       nullptr},
      {group(weights + inputs + R"("dynamic": false, "strategy": "tensor"})"),
       "config_groups.group_0.input_activations.dynamic"},
      {group(weights + inputs + R"("dynamic": "local", "strategy": "tensor"})"),
       "config_groups.group_0.input_activations.dynamic"},
      {group(weights + R"(, "output_activations": {"num_bits": 8})"), "output_activations"},
      {group(R"("weights": {"num_bits": 4, "type": "int", "strategy": "group"})"), "num_bits"},
      {group(R"("weights": {"num_bits": 8, "type": "int", "strategy": "channel"})"), "type"},
      {group(R"("weights": {"num_bits": 8, "type": "float", "strategy": "block"})"),
       "block_structure"},
      {group(R"("weights": {"num_bits": 8, "type": "float", "symmetric": false})"), "symmetric"},
      {group(R"("weights": {"num_bits": 8, "type": "float", "twist": 1})"), "twist"},
      {group(weights) + R"(, "transform_config": {"config_groups": {}})", "transform_config"},
      {group(weights) + R"(, "transform_config": {}, "sparsity_config": {"format": "dense"})",
       nullptr},
      {group(weights) + R"(, "sparsity_config": {"format": "sparse-24-bitmask"})",
       "sparsity_config.format"},
      {R"("quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized")", "format"},
      {R"("quant_method": "compressed-tensors", "format": "pack-quantized")", "config_groups"},
  };
  for (const auto& [json, problem] : kCases) {
    SCOPED_TRACE(json);
    for (const char* name : {"quantization_config", "compression_config"}) {
      const Quantization quantization =
          parse_config(any_family("mixtral", std::string(", \"") + name + "\": {" + json + "}"),
                       "c")
              .quantization;
      if (problem == nullptr) {
        EXPECT_EQ(quantization.problem, "");
      } else {
        EXPECT_NE(quantization.problem.find(problem), std::string::npos) << quantization.problem;
        EXPECT_NE(quantization.problem.find("convert the checkpoint"), std::string::npos);
      }
    }
  }
}

TEST(Config, OverridesRewriteTheModelsOwnKeys) {
  const ConfigOverrides overrides{.num_moe_layers = 2,
                                  .num_experts = 16,
                                  .top_k = 4,
                                  .hidden = 256,
                                  .intermediate = 128,
                                  .vocab_size = 1000};
  for (const ModelEntry& entry : model_table()) {
    SCOPED_TRACE(entry.name);
    ConfigOverrides fitting = overrides;
    if (std::string(entry.name) == "thesis") fitting.num_moe_layers = 1;
    if (std::string(entry.name) == "phi-3.5-moe") fitting.top_k = 2;
    const ModelConfig before = parse_config(entry.config_json, entry.name);
    const ModelConfig after =
        parse_config(rewrite_config(entry.config_json, fitting, DType::kF8E4M3), entry.name);
    EXPECT_EQ(after.moe_layers().size(), static_cast<std::size_t>(fitting.num_moe_layers));
    EXPECT_EQ(after.vocab_size, 1000);
    EXPECT_EQ(after.quantization.block_rows, 128);
    const LayerSpec old_spec = spec_of(before, before.moe_layers().front());
    LayerSpec expected = old_spec;
    expected.hidden = 256;
    expected.intermediate = 128;
    expected.num_experts = 16;
    expected.top_k = fitting.top_k;
    expected.shared_intermediate = old_spec.shared_intermediate * 128 / old_spec.intermediate;
    expect_same(spec_of(after, after.moe_layers().front()), expected);
  }
  EXPECT_ERROR(rewrite_config(find_model("olmoe").config_json, {.num_experts = 4}, DType::kBF16),
               kInvalidArgument, "goes to 8 experts", "there would be 4");
  try {
    rewrite_config(find_model("deepseek-v3").config_json, {.num_experts = 100}, DType::kBF16);
    ADD_FAILURE();
  } catch (const Error& error) {
    // Not the words of a program that was never written.
    EXPECT_EQ(std::string(error.what()).find("LayerSpec"), std::string::npos) << error.what();
  }
  EXPECT_ERROR(
      rewrite_config(find_model("deepseek-v3").config_json, {.num_experts = 100}, DType::kBF16),
      kInvalidArgument, "num_groups is 8", "num_experts = 100");
  EXPECT_ERROR(
      rewrite_config(find_model("olmoe").config_json, {.num_moe_layers = 17}, DType::kBF16),
      kInvalidArgument, "17 MoE layers", "has 16");
}

TEST(ModelTable, EveryEntryParsesAndUnknownNamesAreExplained) {
  for (const ModelEntry& entry : model_table()) {
    SCOPED_TRACE(entry.name);
    const ModelConfig config = parse_config(entry.config_json, entry.name);
    EXPECT_GT(config.vocab_size, 0);
    EXPECT_EQ(&find_model(entry.name), &find_model(std::string(entry.name)));
  }
  EXPECT_EQ(model_table().size(), 31u);
  EXPECT_ERROR(find_model("deepseek-v5"), kInvalidArgument, "unknown model 'deepseek-v5'",
               "deepseek-v2", "deepseek-v3");
  EXPECT_ERROR(find_model(std::string(1 << 20, 'x')), kInvalidArgument, "unknown model");
}

TEST(LayerSpecValidation, NamesFieldValueAndRemedy) {
  const LayerSpec good = testing::spec_of(64, 32, 8, 2);
  validate(good);
  const auto expect_bad = [&](auto change, std::initializer_list<const char*> parts) {
    LayerSpec spec = good;
    change(spec);
    test::expect_error([&] { validate(spec); }, ErrorCode::kInvalidArgument, parts);
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  expect_bad([](LayerSpec& s) { s.hidden = 0; }, {"LayerSpec::hidden is 0", "[1, "});
  expect_bad([](LayerSpec& s) { s.intermediate = -4; }, {"LayerSpec::intermediate is -4"});
  expect_bad([](LayerSpec& s) { s.num_experts = 1 << 20; }, {"LayerSpec::num_experts is 1048576"});
  expect_bad([](LayerSpec& s) { s.top_k = 9; }, {"LayerSpec::top_k is 9", "[1, 8]"});
  expect_bad([](LayerSpec& s) { s.activation.alpha = kNan; }, {"activation.alpha is nan"});
  expect_bad([](LayerSpec& s) { s.activation.limit = 0; }, {"activation.limit is 0"});
  // Reciprocals of these are infinite, or too small to be normal numbers.
  for (const float bound : {1e-39f, 1e38f}) {
    const auto situ = [](LayerSpec& s) { s.activation.kind = ActivationKind::kSitu; };
    expect_bad([&](LayerSpec& s) { situ(s), s.activation.alpha = bound; },
               {"activation.alpha is", "1e30"});
    expect_bad([&](LayerSpec& s) { situ(s), s.activation.limit = bound; },
               {"activation.limit is", "1e30"});
  }
  expect_bad(
      [](LayerSpec& s) {
        s.activation.kind = ActivationKind::kGelu;
        s.activation.alpha = 1.702f;
      },
      {"activation.alpha is 1.702", "silu"});
  expect_bad(
      [](LayerSpec& s) {
        s.activation.gated = false;
        s.activation.up_bias = 1;
      },
      {"activation.up_bias is 1", "plain"});
  expect_bad([](LayerSpec& s) { s.activation.kind = static_cast<ActivationKind>(77); },
             {"activation.kind is 77"});
  expect_bad([](LayerSpec& s) { s.routing.scale = -1; }, {"routing.scale is -1"});
  expect_bad([](LayerSpec& s) { s.routing.renormalize_epsilon = -1; },
             {"routing.renormalize_epsilon is -1"});
  expect_bad([](LayerSpec& s) { s.routing.num_groups = 3; }, {"routing.num_groups is 3", "divide"});
  expect_bad(
      [](LayerSpec& s) {
        s.routing.num_groups = 4;
        s.routing.top_k_groups = 5;
      },
      {"routing.top_k_groups is 5"});
  expect_bad(
      [](LayerSpec& s) {
        s.routing.num_groups = 4;
        s.top_k = 3;
      },
      {"LayerSpec::top_k is 3", "cannot supply"});
  expect_bad(
      [](LayerSpec& s) {
        s.routing.num_groups = 8;
        s.routing.top_k_groups = 8;
      },
      {"routing.num_groups is 8", "kSumTopTwo"});
  expect_bad(
      [](LayerSpec& s) {
        s.routing.method = RoutingMethod::kSparseMixer;
        s.top_k = 1;
      },
      {"LayerSpec::top_k is 1", "top-2"});
  expect_bad([](LayerSpec& s) { s.shared_sigmoid_gate = true; }, {"shared_sigmoid_gate is true"});
  expect_bad([](LayerSpec& s) { s.shared_intermediate = -1; }, {"shared_intermediate is -1"});
  expect_bad([](LayerSpec& s) { s.capacity_factor = kNan; }, {"capacity_factor is nan"});
  expect_bad([](LayerSpec& s) { s.capacity_rule = static_cast<CapacityRule>(2); },
             {"capacity_rule is 2", "kTokens (1)"});
}

}  // namespace
}  // namespace switchyard
