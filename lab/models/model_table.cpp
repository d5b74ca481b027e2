#include "models/model_table.h"

#include <fmt/core.h>

#include <iterator>
#include <string>
#include <vector>

#include "base/printable.h"
#include "common/nearest.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr const char* kKimiK2 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_act": "silu",
  "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
  "num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 2.827, "vocab_size": 163840})";

// Kimi-K3's routed experts, which work in a latent space of 3584 numbers of the model's 7168. Its
// config.json, as programs that load it quote it, has model_type kimi_k3 and, under text_config:
// hidden_size 7168, num_hidden_layers 93, first_k_dense_replace 1, num_experts 896,
// num_experts_per_token 16, moe_intermediate_size 3072, num_shared_experts 2,
// routed_expert_hidden_size 3584, latent_moe_use_norm true, hidden_act "situ", activation_situ_beta
// 4, activation_situ_linear_beta 25, moe_router_activation_func "sigmoid", topk_method "noaux_tc",
// num_expert_group 1, topk_group 1, moe_renormalize true, routed_scaling_factor 1;
// quantization_config is compressed-tensors, mxfp4-pack-quantized.
//
// The order of a layer follows SGLang 0.5.23 (srt/models/kimi_k3.py, KimiK3MoE, and
// srt/configs/kimi_linear.py). Parts 1, 2, 4 and 5 are not part of a LayerSpec:
//   1. logits of the 7168 numbers: sigmoid, a correction bias for the choice, weights that are
//      divided by their sum. (This entry has a router of the latent space.)
//   2. routed_expert_down_proj, 7168 -> 3584
//   3. the routed experts: down(b tanh(g / b) sigmoid(g) * c tanh(u / c)), b = 4, c = 25: SiTU
//   4. an RMSNorm of their weighted sum, and routed_expert_up_proj, 3584 -> 7168
//   5. added to that the shared experts, one of 2 x 3072 in bf16 on the 7168 numbers, with SiTU
// The keys below say the same of a layer of Kimi-K2's family, which config.json's reader knows, and
// checkpoints that are written of it have that family's names of tensors. The published ones are
// language_model.model.layers.L.block_sparse_moe.experts.N.{w1,w3,w2}.
constexpr const char* kKimiK3 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
  "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
  "hidden_size": 3584, "intermediate_size": 33792,
  "moe_intermediate_size": 3072, "num_hidden_layers": 93, "n_routed_experts": 896,
  "num_experts_per_tok": 16, "n_shared_experts": 0, "first_k_dense_replace": 1,
  "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1,
  "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0, "vocab_size": 163840})";

constexpr ModelEntry kTable[] = {
    {"olmoe", R"({
  "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_experts": 64,
  "num_experts_per_tok": 8, "norm_topk_prob": false, "vocab_size": 50304})",
     DType::kBF16},
    {"qwen1.5-moe", R"({
  "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
  "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_experts": 60,
  "num_experts_per_tok": 4, "norm_topk_prob": false, "decoder_sparse_step": 1,
  "vocab_size": 151936})",
     DType::kBF16},
    {"qwen2-57b", R"({
  "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu",
  "hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560,
  "shared_expert_intermediate_size": 20480, "num_hidden_layers": 28, "num_experts": 64,
  "num_experts_per_tok": 8, "norm_topk_prob": false, "decoder_sparse_step": 1,
  "mlp_only_layers": [], "vocab_size": 151936})",
     DType::kBF16},
    {"qwen3-30b", R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
  "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936})",
     DType::kBF16},
    {"qwen3-235b", R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
  "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936})",
     DType::kBF16},
    {"qwen3.5-35b", R"({
  "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
  "text_config": {"model_type": "qwen3_5_moe_text", "hidden_act": "silu", "hidden_size": 2048,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    "vocab_size": 248320}})",
     DType::kBF16},
    {"qwen3.5-397b", R"({
  "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
  "text_config": {"model_type": "qwen3_5_moe_text", "hidden_act": "silu", "hidden_size": 4096,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 60, "num_experts": 512, "num_experts_per_tok": 10,
    "vocab_size": 248320}})",
     DType::kBF16},
    {"mixtral-8x7b", R"({
  "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000})",
     DType::kBF16},
    {"mixtral-8x22b", R"({
  "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
  "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
  "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32768})",
     DType::kBF16},
    {"deepseek-v2", R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
  "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
  "num_hidden_layers": 60, "n_routed_experts": 160, "num_experts_per_tok": 6,
  "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": 8,
  "topk_group": 3, "norm_topk_prob": false, "routed_scaling_factor": 16.0,
  "vocab_size": 102400})",
     DType::kBF16},
    {"deepseek-v2-lite", R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
  "num_hidden_layers": 27, "n_routed_experts": 64, "num_experts_per_tok": 6,
  "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
  "norm_topk_prob": false, "routed_scaling_factor": 1.0, "vocab_size": 102400})",
     DType::kBF16},
    {"deepseek-v3", R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
  "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
  "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
  "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 129280})",
     DType::kF8E4M3},
    {"deepseek-v4-flash", R"({
  "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
  "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
  "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
  "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
  "norm_topk_prob": true, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
  "vocab_size": 129280})",
     DType::kF4E2M1},
    {"deepseek-v4-pro", R"({
  "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
  "hidden_size": 7168, "moe_intermediate_size": 3072, "num_hidden_layers": 61,
  "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
  "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
  "vocab_size": 129280})",
     DType::kF4E2M1},
    {"glm-4.5", R"({
  "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu",
  "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
  "num_hidden_layers": 92, "n_routed_experts": 160, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 151552})",
     DType::kBF16},
    {"glm-4.5-air", R"({
  "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
  "num_hidden_layers": 46, "n_routed_experts": 128, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 1.0, "vocab_size": 151552})",
     DType::kBF16},
    {"glm-5", R"({
  "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_act": "silu",
  "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
  "num_hidden_layers": 78, "n_routed_experts": 256, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
  "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 154880})",
     DType::kF8E4M3},
    {"llama-4-scout", R"({
  "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
  "text_config": {"model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
    "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "vocab_size": 202048}})",
     DType::kBF16},
    {"llama-4-maverick", R"({
  "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
  "text_config": {"model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
    "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "vocab_size": 202048}})",
     DType::kBF16},
    {"gpt-oss-120b", R"({
  "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
  "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
  "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4,
  "swiglu_limit": 7.0, "vocab_size": 201088})",
     DType::kF4E2M1},
    {"gpt-oss-20b", R"({
  "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
  "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
  "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
  "swiglu_limit": 7.0, "vocab_size": 201088})",
     DType::kF4E2M1},
    {"minimax-m2", R"({
  "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu",
  "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
  "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
  "use_routing_bias": true, "shared_intermediate_size": 0, "vocab_size": 200064})",
     DType::kF8E4M3},
    {"minimax-m3", R"({
  "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
  "text_config": {"model_type": "minimax_m2", "hidden_act": "swigluoai", "hidden_size": 6144,
    "intermediate_size": 3072, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "n_shared_experts": 1, "num_hidden_layers": 60,
    "num_local_experts": 128, "num_experts_per_tok": 4, "scoring_func": "sigmoid",
    "use_routing_bias": true, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "moe_layer_freq": [0, 0, 0,
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "vocab_size": 200064}})",
     DType::kF8E4M3},
    {"kimi-k2", kKimiK2, DType::kF8E4M3},
    {"kimi-k2-thinking", kKimiK2, DType::kU4},
    {"kimi-k3", kKimiK3, DType::kF4E2M1},
    {"dbrx", R"({
  "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_layers": 40,
  "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
    "moe_normalize_expert_weights": 1, "ffn_act_fn": {"name": "silu"}},
  "vocab_size": 100352})",
     DType::kBF16},
    {"phi-3.5-moe", R"({
  "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
  "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
  "input_jitter_noise": 0.01, "vocab_size": 32064})",
     DType::kBF16},
    {"jamba-1.5-mini", R"({
  "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_experts": 16,
  "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
  "vocab_size": 65536})",
     DType::kBF16},
    {"jamba-1.5-large", R"({
  "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_act": "silu",
  "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 72, "num_experts": 16,
  "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
  "vocab_size": 65536})",
     DType::kBF16},
    {"thesis", R"({
  "architectures": ["FlashDMoE"], "model_type": "switchyard_ffn", "hidden_act": "gelu",
  "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1, "num_experts": 16,
  "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_bias": true, "vocab_size": 50257})",
     DType::kBF16},
};

}  // namespace

const std::vector<ModelEntry>& model_table() {
  static const std::vector<ModelEntry> table(std::begin(kTable), std::end(kTable));
  return table;
}

const ModelEntry& find_model(std::string_view name) {
  std::vector<std::string> names;
  for (const ModelEntry& entry : kTable) {
    if (name == entry.name) return entry;
    names.emplace_back(entry.name);
  }
  const std::vector<std::string> near = nearest(name, names, 3);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("unknown model '{}'; the nearest known names are {}, {} and {}",
                          printable(name), near[0], near[1], near[2]));
}

}  // namespace switchyard
