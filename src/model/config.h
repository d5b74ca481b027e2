// config.json of every supported model family -> LayerSpecs.
//
// Semantics and defaults follow Hugging Face transformers' modeling_*.py of each family: a key gets
// a default only where transformers itself has one and published configs rely on it; sizes, expert
// counts and top-k have none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

struct Quantization {
  std::string method;  // quantization_config.quant_method: "fp8", "mxfp4", ...; empty: none
  int block_rows = 0;  // weight_block_size; 0: not given
  int block_cols = 0;
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
