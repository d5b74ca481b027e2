#include "model/tensor_names.h"

#include <fmt/core.h>

namespace switchyard {
namespace {

constexpr TensorNames kMlp = {
    .stack = "model.layers.",
    .block = ".mlp.",
    .router = "gate.weight",
    .router_bias = "gate.bias",
    .correction_bias = "gate.e_score_correction_bias",
    .hash_table = "gate.tid2eid",
    .gate = "experts.{}.gate_proj",
    .up = "experts.{}.up_proj",
    .down = "experts.{}.down_proj",
    .shared_gate = "shared_experts.gate_proj",
    .shared_up = "shared_experts.up_proj",
    .shared_down = "shared_experts.down_proj",
    .packed_shared_gate_up = "shared_experts.gate_up_proj",
    .shared_sigmoid_gate = "shared_expert_gate.weight",
    .packing = Packing::kRows,
    .packed_gate_up = "experts.gate_up_proj",
    .packed_up = nullptr,
    .packed_down = "experts.down_proj",
    .scale_suffix = "weight_scale_inv",
    .published_packed = false,
};

constexpr TensorNames qwen_names(const char* stack, bool packed) {
  TensorNames names = kMlp;
  names.stack = stack;
  names.shared_gate = "shared_expert.gate_proj";
  names.shared_up = "shared_expert.up_proj";
  names.shared_down = "shared_expert.down_proj";
  names.published_packed = packed;
  return names;
}
constexpr TensorNames kQwen = qwen_names("model.layers.", false);
constexpr TensorNames kQwen35 = qwen_names("model.language_model.layers.", true);

constexpr TensorNames block_sparse_names(const char* stack) {
  TensorNames names = kMlp;
  names.stack = stack;
  names.block = ".block_sparse_moe.";
  names.correction_bias = "e_score_correction_bias";
  names.gate = "experts.{}.w1";
  names.up = "experts.{}.w3";
  names.down = "experts.{}.w2";
  return names;
}
constexpr TensorNames kBlockSparse = block_sparse_names("model.layers.");
constexpr TensorNames kMiniMaxM3 = block_sparse_names("language_model.model.layers.");

// transformers renames Phi's and Llama-4's gate to "router" when it re-saves them under "mlp".
constexpr TensorNames router_names() {
  TensorNames names = kMlp;
  names.router = "router.weight";
  names.router_bias = "router.bias";
  return names;
}
constexpr TensorNames kMlpRouter = router_names();

// DeepSeek's own format, in which V4 is published.
constexpr TensorNames deepseek_native_names() {
  TensorNames names = kMlp;
  names.stack = "layers.";
  names.block = ".ffn.";
  names.correction_bias = "gate.bias";
  names.router_bias = nullptr;
  names.gate = "experts.{}.w1";
  names.up = "experts.{}.w3";
  names.down = "experts.{}.w2";
  names.shared_gate = "shared_experts.w1";
  names.shared_up = "shared_experts.w3";
  names.shared_down = "shared_experts.w2";
  names.scale_suffix = "scale";
  return names;
}
constexpr TensorNames kDeepseekNative = deepseek_native_names();

constexpr TensorNames llama4_names() {
  TensorNames names = kMlp;
  names.stack = "language_model.model.layers.";
  names.block = ".feed_forward.";
  names.router = "router.weight";
  names.router_bias = "router.bias";
  names.shared_gate = "shared_expert.gate_proj";
  names.shared_up = "shared_expert.up_proj";
  names.shared_down = "shared_expert.down_proj";
  names.packing = Packing::kColumns;
  names.published_packed = true;
  return names;
}
constexpr TensorNames kLlama4 = llama4_names();

constexpr TensorNames gpt_oss_names() {
  TensorNames names = kMlpRouter;
  names.gate = names.up = names.down = nullptr;
  names.packing = Packing::kInterleavedColumns;
  names.published_packed = true;
  return names;
}
constexpr TensorNames kGptOss = gpt_oss_names();

constexpr TensorNames dbrx_names() {
  TensorNames names = kMlp;
  names.stack = "transformer.blocks.";
  names.block = ".ffn.";
  names.router = "router.layer.weight";
  names.gate = names.up = names.down = nullptr;
  names.packing = Packing::kSeparateTransposed;
  names.packed_gate_up = "experts.mlp.w1";
  names.packed_up = "experts.mlp.v1";
  names.packed_down = "experts.mlp.w2";
  names.published_packed = true;
  return names;
}
constexpr TensorNames kDbrx = dbrx_names();

constexpr TensorNames jamba_names() {
  TensorNames names = kMlp;
  names.block = ".feed_forward.";
  names.router = "router.weight";
  names.router_bias = nullptr;
  return names;
}
constexpr TensorNames kJamba = jamba_names();

constexpr const TensorNames* kMlpForms[] = {&kMlp};
constexpr const TensorNames* kQwenForms[] = {&kQwen};
constexpr const TensorNames* kBlockSparseForms[] = {&kBlockSparse, &kMlp, &kMlpRouter};
constexpr const TensorNames* kDeepseekV4Forms[] = {&kDeepseekNative, &kMlp};
constexpr const TensorNames* kLlama4Forms[] = {&kLlama4};
constexpr const TensorNames* kGptOssForms[] = {&kGptOss};
constexpr const TensorNames* kDbrxForms[] = {&kDbrx};
constexpr const TensorNames* kJambaForms[] = {&kJamba};

}  // namespace

std::span<const TensorNames* const> tensor_names(Family family) {
  switch (family) {
    case Family::kOlmoe:
    case Family::kDeepseekV2:
    case Family::kDeepseekV3:
    case Family::kPlainFfn: return kMlpForms;
    case Family::kQwenMoe: return kQwenForms;
    case Family::kMixtral:
    case Family::kMiniMax:
    case Family::kPhimoe: return kBlockSparseForms;
    case Family::kDeepseekV4: return kDeepseekV4Forms;
    case Family::kLlama4: return kLlama4Forms;
    case Family::kGptOss: return kGptOssForms;
    case Family::kDbrx: return kDbrxForms;
    case Family::kJamba: return kJambaForms;
  }
  return kMlpForms;
}

const TensorNames& published_names(const ModelConfig& config) {
  if (config.model_type == "qwen3_5_moe" || config.model_type == "qwen3_5_moe_text") return kQwen35;
  if (config.model_type == "minimax_m3_vl") return kMiniMaxM3;
  return *tensor_names(config.family).front();
}

std::string expert_name(const char* pattern, int expert) {
  return fmt::format(fmt::runtime(pattern), expert);
}

}  // namespace switchyard
