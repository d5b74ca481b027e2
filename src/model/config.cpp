#include "model/config.h"

#include <fmt/core.h>

#include <initializer_list>

#include "base/join.h"
#include "base/json.h"
#include "base/printable.h"
#include "model/config_keys.h"
#include "model/layer_problem.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr int kMaxLayers = 4096;
constexpr int kMaxVocabulary = 1 << 26;
// DeepSeek adds this to the sum that it divides by; so do the families that descend from it.
constexpr float kDeepseekEpsilon = 1e-20f;

struct FamilyName {
  const char* model_type;
  Family family;
};
constexpr FamilyName kFamilies[] = {
    {"olmoe", Family::kOlmoe},
    {"qwen2_moe", Family::kQwenMoe},
    {"qwen3_moe", Family::kQwenMoe},
    {"qwen3_vl_moe", Family::kQwenMoe},
    {"qwen3_vl_moe_text", Family::kQwenMoe},
    {"qwen3_next", Family::kQwenMoe},
    {"qwen3_5_moe", Family::kQwenMoe},
    {"qwen3_5_moe_text", Family::kQwenMoe},
    {"mixtral", Family::kMixtral},
    {"deepseek_v2", Family::kDeepseekV2},
    {"deepseek_v3", Family::kDeepseekV3},
    {"deepseek_v32", Family::kDeepseekV3},
    {"kimi_k2", Family::kDeepseekV3},
    {"glm4_moe", Family::kDeepseekV3},
    {"glm4v_moe", Family::kDeepseekV3},
    {"glm4v_moe_text", Family::kDeepseekV3},
    {"glm_moe_dsa", Family::kDeepseekV3},
    {"deepseek_v4", Family::kDeepseekV4},
    {"llama4", Family::kLlama4},
    {"llama4_text", Family::kLlama4},
    {"gpt_oss", Family::kGptOss},
    {"minimax_m2", Family::kMiniMax},
    {"minimax_m3", Family::kMiniMax},
    {"minimax_m3_vl", Family::kMiniMax},
    {"minimax_m3_vl_text", Family::kMiniMax},
    {"dbrx", Family::kDbrx},
    {"phimoe", Family::kPhimoe},
    {"jamba", Family::kJamba},
    {"switchyard_ffn", Family::kPlainFfn},
};

const FamilyName* find_family(const std::string& model_type) {
  for (const FamilyName& entry : kFamilies)
    if (model_type == entry.model_type) return &entry;
  return nullptr;
}

bool starts_with(const std::string& text, std::string_view prefix) {
  return std::string_view(text).substr(0, prefix.size()) == prefix;
}

ActivationKind activation_kind(const Keys& keys, std::string_view key, const std::string& name) {
  struct Entry {
    std::string_view name;
    ActivationKind kind;
  };
  static constexpr Entry kEntries[] = {
      {"silu", ActivationKind::kSilu},         {"swish", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGelu},         {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"gelu_new", ActivationKind::kGeluTanh}, {"relu", ActivationKind::kRelu},
      {"relu2", ActivationKind::kRelu2},       {"linear", ActivationKind::kIdentity},
      {"situ", ActivationKind::kSitu},
  };
  for (const Entry& entry : kEntries)
    if (entry.name == name) return entry.kind;
  keys.fail(key, fmt::format("is {}; supported are silu, swish, gelu, gelu_pytorch_tanh, gelu_new, "
                             "relu, relu2, linear and situ",
                             excerpt(Json(name))));
}

// Reads what gate and up of SiTU tend to.
void read_situ(const Keys& keys, Activation& activation) {
  const auto number = [&](std::string_view key) {
    if (keys.find(key) == nullptr) keys.fail(key, "is missing; the activation situ needs it");
    return keys.number_or(key, 0, 1e-6f, 1e6f);
  };
  activation.alpha = number("activation_situ_beta");
  activation.limit = number("activation_situ_linear_beta");
}

// A parsed family: the spec of its ordinary MoE layers, and which layers they are.
struct Draft {
  LayerSpec spec;
  std::vector<bool> is_moe;     // [num_layers]
  std::vector<bool> is_hashed;  // [num_layers] or empty
  OptionalParts optional = {};
};

// 1 << 20 and friends: validate(LayerSpec) has the same bounds and the final word.
constexpr int kMaxHidden = 1 << 20;
constexpr int kMaxIntermediate = 1 << 22;
constexpr int kMaxExperts = 1 << 16;

LayerSpec common_spec(const Keys& keys, std::initializer_list<std::string_view> intermediate_names,
                      std::initializer_list<std::string_view> expert_names) {
  LayerSpec spec;
  spec.hidden = keys.integer("hidden_size", 1, kMaxHidden);
  spec.intermediate = keys.integer(intermediate_names, 1, kMaxIntermediate);
  spec.num_experts = keys.integer(expert_names, 1, kMaxExperts);
  spec.top_k = keys.integer({"num_experts_per_tok", "num_experts_per_token", "experts_per_token"},
                            1, spec.num_experts);
  return spec;
}

// transformers gives the shared experts biases for it; no published MoE model has any.
void refuse_mlp_bias(const Keys& keys) {
  if (keys.boolean_or("mlp_bias", false))
    keys.fail("mlp_bias",
              "is true; shared experts with biases are not supported, use the "
              "config.json that the model's publisher ships");
}

// Sets the shared expert. Checkpoints store the experts that every token takes as one of `count`
// times the width.
void set_shared_experts(Draft& draft, const Keys& keys, int default_count) {
  const int count = keys.integer_or("n_shared_experts", default_count, 0, kMaxExperts);
  const std::int64_t total = static_cast<std::int64_t>(count) * draft.spec.intermediate;
  if (total > kMaxIntermediate)
    keys.fail("n_shared_experts",
              fmt::format("is {}, which makes a shared expert of {} rows; the limit is {}", count,
                          total, kMaxIntermediate));
  draft.spec.shared_intermediate = static_cast<int>(total);
  draft.optional.shared_experts = keys.is_null("n_shared_experts");
}

std::vector<bool> layers_from_types(const Keys& keys, int num_layers, std::string_view key,
                                    std::string_view wanted, std::string_view other) {
  std::vector<bool> result;
  const Json& types = *keys.find(key);
  if (!types.is_array() || types.elements().size() < static_cast<std::size_t>(num_layers))
    keys.fail(key, fmt::format("is {}; expected an array with an entry for each of the {} layers",
                               excerpt(types), num_layers));
  for (int layer = 0; layer < num_layers; ++layer) {
    const Json& type = types.elements()[static_cast<std::size_t>(layer)];
    const std::string name = type.is_string() ? type.text() : "";
    if (name != wanted && name != other)
      keys.fail(key, fmt::format("has {} for layer {}; expected \"{}\" or \"{}\"", excerpt(type),
                                 layer, wanted, other));
    result.push_back(name == wanted);
  }
  return result;
}

std::vector<bool> layers_from(int first, int num_layers) {
  std::vector<bool> result;
  for (int layer = 0; layer < num_layers; ++layer) result.push_back(layer >= first);
  return result;
}

// Returns the layers of a family whose first ones are dense. Its code reads no moe_layer_freq.
std::vector<bool> layers_after_dense(const Keys& keys, int num_layers, int default_dense) {
  return layers_from(keys.integer_or("first_k_dense_replace", default_dense, 0, kMaxLayers),
                     num_layers);
}

// Does the same where mlp_layer_types goes before: transformers writes it in place of the count.
std::vector<bool> typed_layers(const Keys& keys, int num_layers, int default_dense) {
  if (keys.has("mlp_layer_types"))
    return layers_from_types(keys, num_layers, "mlp_layer_types", "sparse", "dense");
  return layers_after_dense(keys, num_layers, default_dense);
}

// Applies moe_layer_freq: a 0/1 list with an entry for each layer, or a period.
std::vector<bool> layers_by_frequency(const Keys& keys, std::vector<bool> layers) {
  const Json* const freq = keys.find("moe_layer_freq");
  if (freq == nullptr) return layers;
  if (freq->is_array()) {
    const std::vector<int> flags = *keys.integers("moe_layer_freq", 0, 1);
    if (flags.size() < layers.size())
      keys.fail("moe_layer_freq", fmt::format("has {} entries; expected one for each of {} layers",
                                              flags.size(), layers.size()));
    for (std::size_t layer = 0; layer < layers.size(); ++layer) layers[layer] = flags[layer] == 1;
    return layers;
  }
  const int period = keys.integer("moe_layer_freq", 1, kMaxLayers);
  for (std::size_t layer = 0; layer < layers.size(); ++layer)
    layers[layer] = layers[layer] && layer % static_cast<std::size_t>(period) == 0;
  return layers;
}

std::vector<bool> all_layers(int num_layers) {
  return std::vector<bool>(static_cast<std::size_t>(num_layers), true);
}

// The parsers below follow transformers' code of each family, key by key: what it does without a
// key is the default, and a key that it never reads is not read here. config.h tells the
// exceptions.

Draft parse_olmoe(const Keys& keys, int num_layers) {
  Draft draft{common_spec(keys, {"intermediate_size"}, {"num_experts", "num_local_experts"}),
              all_layers(num_layers),
              {}};
  draft.spec.routing.renormalize = keys.boolean_or("norm_topk_prob", false);
  return draft;
}

struct QwenRules {
  bool always_renormalizes;  // the router of VL and 3.5 reads no norm_topk_prob
  bool default_renormalize;
  bool has_shared_expert;
  bool has_dense_layers;  // 3.5 makes every layer an MoE layer
};

QwenRules qwen_rules(const std::string& model_type) {
  if (model_type == "qwen2_moe") return {false, false, true, true};
  if (starts_with(model_type, "qwen3_vl_moe")) return {true, true, false, true};
  if (model_type == "qwen3_next") return {false, true, true, true};
  if (starts_with(model_type, "qwen3_5_moe")) return {true, true, true, false};
  return {false, false, false, true};  // qwen3_moe
}

Draft parse_qwen(const Keys& keys, int num_layers, const std::string& model_type) {
  const QwenRules rules = qwen_rules(model_type);
  // transformers 5 saves Qwen3's num_experts as num_local_experts.
  Draft draft{common_spec(keys, {"moe_intermediate_size"}, {"num_experts", "num_local_experts"}),
              all_layers(num_layers),
              {}};
  draft.spec.routing.renormalize =
      rules.always_renormalizes || keys.boolean_or("norm_topk_prob", rules.default_renormalize);
  if (rules.has_shared_expert) {
    draft.spec.shared_intermediate =
        keys.integer("shared_expert_intermediate_size", 0, kMaxIntermediate);
    draft.spec.shared_sigmoid_gate = draft.spec.shared_intermediate > 0;
  }
  if (!rules.has_dense_layers) return draft;
  const int step = keys.integer_or("decoder_sparse_step", 1, 1, kMaxLayers);
  for (int layer = 0; layer < num_layers; ++layer)
    draft.is_moe[static_cast<std::size_t>(layer)] = (layer + 1) % step == 0;
  if (const auto dense = keys.integers("mlp_only_layers", 0, kMaxLayers))
    for (const int layer : *dense)
      if (layer < num_layers) draft.is_moe[static_cast<std::size_t>(layer)] = false;
  return draft;
}

Draft parse_mixtral(const Keys& keys, int num_layers) {
  Draft draft{common_spec(keys, {"intermediate_size"}, {"num_local_experts", "num_experts"}),
              all_layers(num_layers),
              {}};
  draft.spec.routing.renormalize = true;
  return draft;
}

Draft parse_deepseek_v2(const Keys& keys, int num_layers) {
  Draft draft{common_spec(keys, {"moe_intermediate_size"}, {"n_routed_experts", "num_experts"}),
              layers_after_dense(keys, num_layers, 0),
              {}};
  LayerSpec& spec = draft.spec;
  refuse_mlp_bias(keys);
  set_shared_experts(draft, keys, 2);
  keys.text_in("scoring_func", "softmax", {"softmax"});
  // transformers' router never renormalises and always scales, whatever norm_topk_prob says.
  spec.routing.scale = keys.number_or("routed_scaling_factor", 1.0f, 1e-6f, 1e6f);
  if (keys.text_in("topk_method", "greedy", {"greedy", "group_limited_greedy"}) != "greedy") {
    spec.routing.num_groups = keys.integer("n_group", 1, spec.num_experts);
    spec.routing.top_k_groups = keys.integer("topk_group", 1, spec.routing.num_groups);
    spec.routing.group_score = GroupScore::kMax;
  }
  return draft;
}

// Kimi-K3. A LayerSpec has one hidden size for the router and the experts.
[[noreturn]] void refuse_latent_experts(const Keys& keys, std::string_view key, const Json& value) {
  keys.fail(key, fmt::format("is {}: the routed experts work in a space of their own, which is "
                             "narrower than what the router reads; such layers are not read, so "
                             "run them with the model's own code",
                             excerpt(value)));
}

// Kimi-K2's code is in the model's own repository, so that no default of it is known for sure.
void require_kimi_keys(const Keys& keys) {
  for (const char* key : {"norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
                          "first_k_dense_replace", "n_shared_experts"})
    if (!keys.has(key) && !keys.is_null(key))
      keys.fail(key,
                "is missing, and its default in this family is not known; use the config.json "
                "that the model's publisher ships");
}

Draft parse_deepseek_v3(const Keys& keys, int num_layers, const std::string& model_type) {
  const bool is_kimi = model_type == "kimi_k2";
  const bool is_glm = starts_with(model_type, "glm");
  const bool is_glm4 = is_glm && model_type != "glm_moe_dsa";
  const bool is_typed = model_type == "glm_moe_dsa" || model_type == "deepseek_v32";
  if (is_kimi) {
    require_kimi_keys(keys);
    if (const Json* const width = keys.find("routed_expert_hidden_size"))
      refuse_latent_experts(keys, "routed_expert_hidden_size", *width);
  }
  Draft draft{common_spec(keys, {"moe_intermediate_size"},
                          {"n_routed_experts", "num_local_experts", "num_experts"}),
              {},
              {}};
  LayerSpec& spec = draft.spec;
  const int default_dense = is_glm4 ? 1 : 3;
  draft.is_moe = is_typed ? typed_layers(keys, num_layers, default_dense)
                          : layers_after_dense(keys, num_layers, default_dense);
  if (is_kimi) draft.is_moe = layers_by_frequency(keys, draft.is_moe);
  set_shared_experts(draft, keys, 1);
  keys.text_in("scoring_func", "sigmoid", {"sigmoid"});
  keys.text_in("topk_method", "noaux_tc", {"noaux_tc"});
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  // Here null is a value, and false: the classes of GLM and DeepSeek-V3.2 take no null.
  spec.routing.renormalize =
      !keys.is_null("norm_topk_prob") && keys.boolean_or("norm_topk_prob", true);
  if (spec.routing.renormalize) spec.routing.renormalize_epsilon = kDeepseekEpsilon;
  spec.routing.scale = keys.number_or("routed_scaling_factor", is_glm4 ? 1.0f : 2.5f, 1e-6f, 1e6f);
  spec.routing.num_groups = keys.integer_or("n_group", is_glm ? 1 : 8, 1, spec.num_experts);
  spec.routing.top_k_groups = keys.integer_or("topk_group", is_glm ? 1 : 4, 1, kMaxExperts);
  if (spec.routing.top_k_groups > spec.routing.num_groups)
    keys.fail("topk_group", fmt::format("is {}; there are only {} groups (n_group)",
                                        spec.routing.top_k_groups, spec.routing.num_groups));
  return draft;
}

Draft parse_deepseek_v4(const Keys& keys, int num_layers) {
  Draft draft{
      common_spec(keys, {"moe_intermediate_size"}, {"n_routed_experts", "num_local_experts"}),
      all_layers(num_layers),
      {}};
  LayerSpec& spec = draft.spec;
  refuse_mlp_bias(keys);
  spec.shared_intermediate = spec.intermediate;  // one, whatever n_shared_experts says
  const std::string score =
      keys.text_in("scoring_func", "sqrtsoftplus", {"sqrtsoftplus", "sigmoid"});
  spec.routing.score = score == "sigmoid" ? ScoreFunction::kSigmoid : ScoreFunction::kSqrtSoftplus;
  spec.routing.has_correction_bias = true;
  spec.routing.renormalize = true;  // whatever norm_topk_prob says
  spec.routing.renormalize_epsilon = kDeepseekEpsilon;
  spec.routing.scale = keys.number_or("routed_scaling_factor", 1.5f, 1e-6f, 1e6f);
  if (const Json* limit = keys.find("swiglu_limit");
      limit && limit->is_number() && limit->number() == 0)
    keys.fail("swiglu_limit",
              "is 0, which transformers takes for a clamp to 0 and DeepSeek's own code for none; "
              "for none write 1e6");
  spec.activation.limit = keys.number_or("swiglu_limit", 10.0f, 1e-6f, 1e6f);
  if (keys.has("mlp_layer_types")) {
    draft.is_hashed = layers_from_types(keys, num_layers, "mlp_layer_types", "hash_moe", "moe");
  } else {
    const int num_hashed = keys.integer_or("num_hash_layers", 3, 0, kMaxLayers);
    for (int layer = 0; layer < num_layers; ++layer) draft.is_hashed.push_back(layer < num_hashed);
  }
  return draft;
}

Draft parse_llama4(const Keys& keys, int num_layers) {
  Draft draft{common_spec(keys, {"intermediate_size"}, {"num_local_experts"}), {}, {}};
  LayerSpec& spec = draft.spec;
  spec.shared_intermediate = spec.intermediate;
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.top_k_before_score = true;
  spec.weight_on_input = true;
  draft.is_moe.assign(static_cast<std::size_t>(num_layers), false);
  if (const auto layers = keys.integers("moe_layers", 0, kMaxLayers)) {
    for (const int layer : *layers)
      if (layer < num_layers) draft.is_moe[static_cast<std::size_t>(layer)] = true;
  } else {
    const int step = keys.integer_or("interleave_moe_layer_step", 1, 1, kMaxLayers);
    for (int layer = step - 1; layer < num_layers; layer += step)
      draft.is_moe[static_cast<std::size_t>(layer)] = true;
  }
  return draft;
}

Draft parse_gpt_oss(const Keys& keys, int num_layers) {
  Draft draft{common_spec(keys, {"intermediate_size"}, {"num_local_experts", "num_experts"}),
              all_layers(num_layers),
              {}};
  LayerSpec& spec = draft.spec;
  spec.routing.top_k_before_score = true;
  spec.router_bias = true;
  spec.expert_bias = true;
  spec.activation.alpha = keys.number_or("swiglu_alpha", 1.702f, 1e-6f, 1e6f);
  spec.activation.limit = keys.number_or("swiglu_limit", 7.0f, 1e-6f, 1e6f);
  spec.activation.up_bias = 1.0f;  // fixed in transformers' GptOssExperts
  return draft;
}

std::vector<bool> minimax_m3_layers(const Keys& keys, int num_layers) {
  if (keys.has("mlp_layer_types")) return typed_layers(keys, num_layers, 0);
  return layers_by_frequency(keys, all_layers(num_layers));
}

Draft parse_minimax(const Keys& keys, int num_layers, const std::string& model_type) {
  const bool is_m3 = starts_with(model_type, "minimax_m3");
  Draft draft{common_spec(keys, {"intermediate_size"}, {"num_local_experts", "num_experts"}),
              is_m3 ? minimax_m3_layers(keys, num_layers) : all_layers(num_layers),
              {}};
  LayerSpec& spec = draft.spec;
  keys.text_in("scoring_func", "sigmoid", {"sigmoid"});
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.renormalize = true;
  spec.routing.has_correction_bias = true;
  draft.optional.correction_bias = !keys.boolean_or("use_routing_bias", true);
  if (is_m3) {
    spec.routing.scale = keys.number_or("routed_scaling_factor", 2.0f, 1e-6f, 1e6f);
    spec.activation.alpha = keys.number_or("swiglu_alpha", 1.702f, 1e-6f, 1e6f);
    spec.activation.limit = keys.number_or("swiglu_limit", 7.0f, 1e-6f, 1e6f);
    spec.activation.up_bias = 1.0f;
    // There is one shared expert, whatever n_shared_experts says.
    spec.shared_intermediate = keys.integer("shared_intermediate_size", 1, kMaxIntermediate);
  }
  return draft;
}

Draft parse_dbrx(const Keys& keys, int num_layers) {
  const std::optional<Keys> ffn = keys.object("ffn_config");
  if (!ffn)
    keys.fail("ffn_config",
              "is missing; it holds DBRX's expert sizes, use the config.json that the "
              "model's publisher ships");
  Draft draft;
  LayerSpec& spec = draft.spec;
  spec.hidden = keys.integer({"d_model", "hidden_size"}, 1, kMaxHidden);
  spec.intermediate = ffn->integer("ffn_hidden_size", 1, kMaxIntermediate);
  spec.num_experts = ffn->integer("moe_num_experts", 1, kMaxExperts);
  spec.top_k = ffn->integer("moe_top_k", 1, spec.num_experts);
  // The order of the norm that the weights are divided by; models use only 1. Here null is a value:
  // no division.
  if (!ffn->is_null("moe_normalize_expert_weights"))
    spec.routing.renormalize =
        ffn->number_or("moe_normalize_expert_weights", 1.0f, 1.0f, 1.0f) == 1.0f;
  if (const std::optional<Keys> activation = ffn->object("ffn_act_fn"))
    spec.activation.kind =
        activation_kind(*activation, "name", activation->text_or("name", "silu"));
  draft.is_moe = all_layers(num_layers);
  return draft;
}

Draft parse_phimoe(const Keys& keys, int num_layers) {
  Draft draft{
      common_spec(keys, {"intermediate_size"}, {"num_local_experts"}), all_layers(num_layers), {}};
  draft.spec.routing.method = RoutingMethod::kSparseMixer;
  draft.spec.routing.jitter_eps = keys.number_or("router_jitter_noise", 0.01f, 0.0f, 1.0f);
  if (draft.spec.top_k != 2)
    keys.fail("num_experts_per_tok",
              fmt::format("is {}; the sparse mixer is a top-2 rule", draft.spec.top_k));
  return draft;
}

Draft parse_jamba(const Keys& keys, int num_layers) {
  Draft draft{
      common_spec(keys, {"intermediate_size"}, {"num_experts", "num_local_experts"}), {}, {}};
  const int period = keys.integer_or("expert_layer_period", 2, 1, kMaxLayers);
  const int offset = keys.integer_or("expert_layer_offset", 1, 0, kMaxLayers);
  // Jamba's models without experts have the same keys and num_experts 1.
  for (int layer = 0; layer < num_layers; ++layer)
    draft.is_moe.push_back(draft.spec.num_experts > 1 && layer % period == offset);
  return draft;
}

Draft parse_plain_ffn(const Keys& keys, int num_layers) {
  Draft draft{
      common_spec(keys, {"intermediate_size"}, {"num_experts"}), all_layers(num_layers), {}};
  draft.spec.activation.gated = false;
  draft.spec.routing.renormalize = keys.boolean_or("norm_topk_prob", true);
  draft.spec.expert_bias = keys.boolean_or("mlp_bias", true);
  return draft;
}

Draft parse_family(Family family, const Keys& keys, int num_layers, const std::string& model_type) {
  switch (family) {
    case Family::kOlmoe: return parse_olmoe(keys, num_layers);
    case Family::kQwenMoe: return parse_qwen(keys, num_layers, model_type);
    case Family::kMixtral: return parse_mixtral(keys, num_layers);
    case Family::kDeepseekV2: return parse_deepseek_v2(keys, num_layers);
    case Family::kDeepseekV3: return parse_deepseek_v3(keys, num_layers, model_type);
    case Family::kDeepseekV4: return parse_deepseek_v4(keys, num_layers);
    case Family::kLlama4: return parse_llama4(keys, num_layers);
    case Family::kGptOss: return parse_gpt_oss(keys, num_layers);
    case Family::kMiniMax: return parse_minimax(keys, num_layers, model_type);
    case Family::kDbrx: return parse_dbrx(keys, num_layers);
    case Family::kPhimoe: return parse_phimoe(keys, num_layers);
    case Family::kJamba: return parse_jamba(keys, num_layers);
    case Family::kPlainFfn: return parse_plain_ffn(keys, num_layers);
  }
  throw Error(ErrorCode::kInvalidConfig, "a model family without a parser");
}

// False for DBRX, which names its activation inside ffn_config, and for GPT-OSS and MiniMax-M3,
// whose code is SiLU with swiglu_alpha and swiglu_limit whatever hidden_act says.
bool has_hidden_act(Family family, const std::string& model_type) {
  return family != Family::kDbrx && family != Family::kGptOss &&
         !starts_with(model_type, "minimax_m3");
}

DType parse_dtype(const Keys& root, const Keys& text) {
  for (const Keys* keys : {&text, &root}) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      if (!keys->has(key)) continue;
      std::string name = keys->text_or(key, "");
      if (starts_with(name, "torch.")) name = name.substr(6);
      if (name == "bfloat16" || name == "auto") return DType::kBF16;
      if (name == "float16" || name == "half") return DType::kF16;
      if (name == "float32" || name == "float") return DType::kF32;
      if (name == "float8_e4m3fn") return DType::kF8E4M3;
      keys->fail(key, fmt::format("is {}; expected bfloat16, float16, float32 or float8_e4m3fn",
                                  excerpt(Json(name))));
    }
  }
  return DType::kBF16;
}

// The object with the language model's keys, and the model_type that decides its family.
struct Located {
  std::string model_type;
  Family family;
  bool nested;  // under text_config
};

Located locate(const Json& document, const std::string& source) {
  if (!document.is_object())
    throw Error(ErrorCode::kInvalidConfig,
                fmt::format("{}: the top level is {}; expected an object with a 'model_type'",
                            printable(source), excerpt(document)));
  const Keys root(document, source, "");
  const std::optional<Keys> text = root.object("text_config");
  const std::string outer = root.text_or("model_type", "");
  const std::string inner = text ? text->text_or("model_type", "") : std::string();
  // Its text_config could pass for another family's.
  for (const std::string& name : {outer, inner})
    if (name == "kimi_k3") refuse_latent_experts(root, "model_type", Json(name));
  // The outer name wins: MiniMax-M3 labels its inner config "minimax_m2".
  for (const std::string& name : {outer, inner})
    if (const FamilyName* family = find_family(name))
      return {name, family->family, text.has_value()};
  std::vector<const char*> known;
  for (const FamilyName& family : kFamilies) known.push_back(family.model_type);
  if (outer.empty() && inner.empty())
    root.fail("model_type", fmt::format("is missing; expected one of: {}", join(known, ", ")));
  root.fail(
      "model_type",
      fmt::format("is {}, a family whose checkpoints are not read; known are: {}. For another "
                  "model, load it in transformers with experts_implementation=\"switchyard\" "
                  "(after 'import switchyard'), or give one of its MoE blocks to "
                  "switchyard.MoeLayer.from_hf()",
                  excerpt(Json(outer.empty() ? inner : outer)), join(known, ", ")));
}

ModelConfig parse_document(const Json& document, const std::string& source) {
  const Located located = locate(document, source);
  const Keys root(document, source, "");
  const Keys text = located.nested ? *root.object("text_config") : root;

  ModelConfig config;
  config.model_type = located.model_type;
  config.family = located.family;
  config.num_layers = located.family == Family::kDbrx
                          ? text.integer({"n_layers", "num_hidden_layers"}, 1, kMaxLayers)
                          : text.integer("num_hidden_layers", 1, kMaxLayers);
  config.vocab_size = text.integer_or("vocab_size", 0, 1, kMaxVocabulary);
  config.dtype = parse_dtype(root, text);
  config.quantization = parse_quantization(root, text);

  Draft draft = parse_family(located.family, text, config.num_layers, located.model_type);
  config.optional = draft.optional;
  if (has_hidden_act(located.family, located.model_type))
    draft.spec.activation.kind =
        activation_kind(text, "hidden_act", text.text_or("hidden_act", "silu"));
  if (draft.spec.activation.kind == ActivationKind::kSitu) read_situ(text, draft.spec.activation);
  if (const std::string problem = layer_problem(draft.spec); !problem.empty())
    throw Error(
        ErrorCode::kInvalidConfig,
        fmt::format("{}: describes a layer that makes no sense: {}", printable(source), problem));
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::size_t index = static_cast<std::size_t>(layer);
    std::optional<LayerSpec> spec;
    if (draft.is_moe[index]) {
      spec = draft.spec;
      if (!draft.is_hashed.empty() && draft.is_hashed[index]) {
        spec->routing.method = RoutingMethod::kHash;
        spec->routing.has_correction_bias = false;
      }
    }
    config.layers.push_back(spec);
  }
  if (config.moe_layers().empty())
    throw Error(ErrorCode::kInvalidConfig,
                fmt::format("{}: none of the {} layers is an MoE layer; check the keys that choose "
                            "them (first_k_dense_replace, mlp_only_layers, decoder_sparse_step, "
                            "moe_layer_freq, expert_layer_period)",
                            printable(source), config.num_layers));
  return config;
}

void set_if_present(Json& object, const char* key, const Json& value) {
  if (Json* const old = object.find(key)) *old = value;
}

LayerSpec with_overrides(LayerSpec spec, const ConfigOverrides& overrides) {
  if (overrides.num_experts > 0) spec.num_experts = overrides.num_experts;
  if (overrides.top_k > 0) spec.top_k = overrides.top_k;
  if (overrides.hidden > 0) spec.hidden = overrides.hidden;
  if (overrides.intermediate > 0) spec.intermediate = overrides.intermediate;
  return spec;
}

// Checks the spec that the overrides make.
void require_layer(const LayerSpec& spec) {
  if (spec.top_k > spec.num_experts)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the overrides do not fit this model: each token goes to {} experts, "
                            "but there would be {}; ask for at least {} experts, or for a top-k of "
                            "at most {}",
                            spec.top_k, spec.num_experts, spec.top_k, spec.num_experts));
  if (const std::string problem = layer_problem(spec); !problem.empty())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the overrides do not fit this model: {}", problem));
}

void apply_overrides(Json& text, const ModelConfig& config, const ConfigOverrides& overrides) {
  Json& sizes = config.family == Family::kDbrx ? text["ffn_config"] : text;
  const LayerSpec& spec = *config.layers[static_cast<std::size_t>(config.moe_layers().front())];
  if (overrides.num_moe_layers > 0) {
    const std::vector<int> moe = config.moe_layers();
    if (static_cast<std::size_t>(overrides.num_moe_layers) > moe.size())
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} MoE layers were asked for, but {} has {}; ask for fewer",
                              overrides.num_moe_layers, config.model_type, moe.size()));
    const int layers = moe[static_cast<std::size_t>(overrides.num_moe_layers - 1)] + 1;
    for (const char* key : {"num_hidden_layers", "n_layers"}) set_if_present(text, key, layers);
    for (const char* key : {"moe_layer_freq", "mlp_layer_types"})
      if (Json* const list = text.find(key); list && list->is_array())
        list->elements().resize(static_cast<std::size_t>(layers));
  }
  if (overrides.num_experts > 0)
    for (const char* key :
         {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"})
      set_if_present(sizes, key, overrides.num_experts);
  if (overrides.top_k > 0)
    for (const char* key :
         {"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k"})
      set_if_present(sizes, key, overrides.top_k);
  if (overrides.hidden > 0)
    for (const char* key : {"hidden_size", "d_model"}) set_if_present(text, key, overrides.hidden);
  if (overrides.intermediate > 0) {
    const bool separate = text.contains("moe_intermediate_size");
    for (const char* key : {"moe_intermediate_size", "ffn_hidden_size"})
      set_if_present(sizes, key, overrides.intermediate);
    if (!separate) set_if_present(text, "intermediate_size", overrides.intermediate);
    for (const char* key : {"shared_expert_intermediate_size", "shared_intermediate_size"}) {
      Json* const width = text.find(key);
      if (!width || !width->is_integer() || width->integer() == 0) continue;
      const std::int64_t scaled = width->integer() * overrides.intermediate / spec.intermediate;
      *width = std::max<std::int64_t>(scaled, 1);
    }
  }
  if (overrides.vocab_size > 0) set_if_present(text, "vocab_size", overrides.vocab_size);
}

}  // namespace

std::vector<int> ModelConfig::moe_layers() const {
  std::vector<int> result;
  for (std::size_t layer = 0; layer < layers.size(); ++layer)
    if (layers[layer]) result.push_back(static_cast<int>(layer));
  return result;
}

ModelConfig parse_config(std::string_view json_text, const std::string& source) {
  return parse_document(parse_json(json_text, ErrorCode::kInvalidConfig, source), source);
}

std::string rewrite_config(std::string_view json_text, const ConfigOverrides& overrides,
                           DType dtype) {
  const std::string source = "config.json";
  Json document = parse_json(json_text, ErrorCode::kInvalidConfig, source);
  const ModelConfig config = parse_document(document, source);
  Json& text = locate(document, source).nested ? document["text_config"] : document;
  apply_overrides(text, config, overrides);
  for (const char* key : {"quantization_config", "compression_config"}) text.erase(key);
  // From here on `text` must not be used.
  for (const char* key : {"quantization_config", "compression_config"}) document.erase(key);
  document["torch_dtype"] = dtype == DType::kF32   ? "float32"
                            : dtype == DType::kF16 ? "float16"
                                                   : "bfloat16";
  if (dtype == DType::kF8E4M3)
    document["quantization_config"] = {{"activation_scheme", "dynamic"},
                                       {"fmt", "e4m3"},
                                       {"quant_method", "fp8"},
                                       {"weight_block_size", Json::Array{128, 128}}};
  // The first check speaks of what was asked for, not of the text's keys.
  require_layer(with_overrides(
      *config.layers[static_cast<std::size_t>(config.moe_layers().front())], overrides));
  try {
    parse_document(document, source);
  } catch (const Error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the overrides do not fit this model: {}", error.what()));
  }
  return document.dump({.indent = 2, .sorted = true}) + "\n";
}

}  // namespace switchyard
