// config.json of every supported model family -> LayerSpecs.
//
// Semantics follow Hugging Face transformers' code of each family, of version 5.24: a key that is
// absent means what that code does without it, and a key that the code never reads is not read here
// (norm_topk_prob of DeepSeek-V2 and V4, of Qwen3-VL-MoE and of Qwen3.5, say). null counts as
// absent, where the code does not take it for a value of its own. The exceptions:
//   - sizes, expert counts and top-k have no default, though transformers' classes have one;
//   - scoring_func, topk_method and mlp_bias are refused where they ask for what the code does not
//     do: other engines do it, so that the checkpoint is of another family;
//   - Kimi-K2, whose code is not part of transformers, has no defaults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/quantization.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard {

enum class Family : std::uint8_t {
  kOlmoe,
  kQwenMoe,  // Qwen1.5, 2, 3, Next, 3.5
  kMixtral,
  kDeepseekV2,
  kDeepseekV3,  // also Kimi-K2, GLM-4.5, GLM-5
  kDeepseekV4,
  kLlama4,
  kGptOss,
  kMiniMax,
  kDbrx,
  kPhimoe,
  kJamba,
  kPlainFfn,  // "switchyard_ffn": plain FFN experts with biases, of the FlashDMoE thesis
};

// Parts of a layer that config.json leaves open: the checkpoint may or may not have them. Its
// tensors decide: without them the LayerSpecs lose the part.
struct OptionalParts {
  bool shared_experts = false;  // n_shared_experts is null
  bool correction_bias =
      false;  // use_routing_bias is false, and transformers adds one that is there
};

struct ModelConfig {
  std::string model_type;  // as the file spells it
  Family family = Family::kOlmoe;
  int num_layers = 0;
  int vocab_size = 0;  // 0: not given
  // The dtype of unquantised weights; bf16 if the file does not say (the tensors themselves
  // decide).
  DType dtype = DType::kBF16;
  Quantization quantization;
  OptionalParts optional;
  std::vector<std::optional<LayerSpec>> layers;  // [num_layers]; empty for dense layers

  std::vector<int> moe_layers() const;
};

// `source` names the text in messages (a path). Throws Error{kInvalidConfig} naming the key, its
// value and the remedy. Accepts arbitrary bytes.
ModelConfig parse_config(std::string_view json_text, const std::string& source);

// Changes to a config.json, for scaled-down checkpoints. Zero keeps the value.
struct ConfigOverrides {
  int num_moe_layers = 0;  // keep layers up to and including the n-th MoE layer
  int num_experts = 0;
  int top_k = 0;
  int hidden = 0;
  int intermediate = 0;  // the shared expert's size is scaled by the same ratio
  int vocab_size = 0;
};

// The same JSON with the overrides applied and dtype / quantization_config set for weights of
// `dtype` (FP8: 128 x 128 blocks). The result has been parsed once: an override that makes no sense
// throws Error{kInvalidArgument}.
std::string rewrite_config(std::string_view json_text, const ConfigOverrides& overrides,
                           DType dtype);

}  // namespace switchyard
