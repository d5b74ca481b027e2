#include "models/four_bit_layout.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/json.h"
#include "base/names.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

bool has_shared_expert(const ModelConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(),
                     [](const auto& layer) { return layer && layer->shared_intermediate > 0; });
}

Json weights_of_group(FourBitLayout layout) {
  Json weights = {{"num_bits", 4}, {"strategy", "group"}, {"group_size", 32}};
  if (layout == FourBitLayout::kMxfp4Packed) {
    weights["type"] = "float";
    weights["scale_dtype"] = "torch.uint8";
    return weights;
  }
  weights["type"] = "int";
  weights["symmetric"] = true;
  weights["actorder"] = nullptr;
  weights["dynamic"] = false;
  return weights;
}

Json compressed_tensors(FourBitLayout layout) {
  const bool mxfp4 = layout == FourBitLayout::kMxfp4Packed;
  const char* const format = mxfp4 ? "mxfp4-pack-quantized" : "pack-quantized";
  const Json group = {{"targets", Json::Array{"Linear"}},
                      {"input_activations", nullptr},
                      {"output_activations", nullptr},
                      {"weights", weights_of_group(layout)}};
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"ignore", Json::Array{"lm_head", "re:.*self_attn.*", "re:.*shared_expert.*",
                                 "re:.*\\.gate$", "re:.*router.*"}},
          {"config_groups", {{"group_0", group}}}};
}

}  // namespace

FourBitLayout four_bit_layout(const ModelConfig& config, DType dtype) {
  if (!is_four_bit(dtype)) return FourBitLayout::kNone;
  const bool mxfp4 = dtype == DType::kF4E2M1;
  if (mxfp4 && config.family == Family::kGptOss) return FourBitLayout::kBlocks;
  if (mxfp4 && config.family == Family::kDeepseekV4) return FourBitLayout::kDeepseek;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} has no published {} layout of its experts{}; use bf16",
                            config.model_type, short_name(dtype), why));
  };
  if (published_names(config).up == nullptr) refuse("");
  // Its generated shared expert is FP8, which no group of compressed-tensors' MXFP4 has.
  if (mxfp4 && has_shared_expert(config)) refuse(" beside a shared one");
  return mxfp4 ? FourBitLayout::kMxfp4Packed : FourBitLayout::kInt4Packed;
}

std::string declare_layout(const std::string& config_json, FourBitLayout layout) {
  if (layout == FourBitLayout::kNone) return config_json;
  Json document = parse_json(config_json, ErrorCode::kInvalidConfig, "config.json");
  Json& quantization = document["quantization_config"];
  switch (layout) {
    case FourBitLayout::kNone: break;
    case FourBitLayout::kBlocks:
      quantization = {{"quant_method", "mxfp4"},
                      {"modules_to_not_convert",
                       Json::Array{"model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"}}};
      break;
    case FourBitLayout::kDeepseek:
      quantization = {{"activation_scheme", "dynamic"},
                      {"fmt", "e4m3"},
                      {"quant_method", "fp8"},
                      {"scale_fmt", "ue8m0"},
                      {"weight_block_size", Json::Array{128, 128}}};
      document["expert_dtype"] = "fp4";
      break;
    case FourBitLayout::kMxfp4Packed:
    case FourBitLayout::kInt4Packed: quantization = compressed_tensors(layout); break;
  }
  return document.dump({.indent = 2, .sorted = true}) + "\n";
}

std::vector<StoredTensor> stored_tensors(FourBitLayout layout, const RandomTensor& matrix) {
  using Part = StoredTensor::Part;
  const std::int64_t rows = matrix.rows, cols = matrix.cols, groups = matrix.scale_cols();
  switch (layout) {
    case FourBitLayout::kDeepseek:
      return {{"weight", Part::kCodes, "I8", {rows, cols / 2}},
              {"scale", Part::kScales, "F8_E8M0", {rows, groups}}};
    case FourBitLayout::kMxfp4Packed:
      return {{"weight_packed", Part::kCodes, "U8", {rows, cols / 2}},
              {"weight_scale", Part::kScales, "U8", {rows, groups}}};
    case FourBitLayout::kInt4Packed:
      return {{"weight_packed", Part::kCodes, "I32", {rows, cols / 8}},
              {"weight_scale", Part::kScales, "BF16", {rows, groups}},
              {"weight_shape", Part::kShape, "I64", {2}}};
    case FourBitLayout::kNone:
    case FourBitLayout::kBlocks: break;
  }
  throw Error(ErrorCode::kInvalidArgument, "a layout without a module for each matrix");
}

}  // namespace switchyard
