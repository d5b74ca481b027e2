#include "model/quantization.h"

#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "model/config_keys.h"

namespace switchyard {
namespace {

constexpr int kMostBlock = 1 << 20;
constexpr std::string_view kRemedy = "convert the checkpoint to bf16, or use one of another format";

// An exception that never leaves this file.
struct Problem {
  std::string text;
};

[[noreturn]] void reject(const Keys& keys, std::string_view key, std::string_view why) {
  const Json* const value = keys.find(key);
  throw Problem{keys.sentence(
      key,
      fmt::format("is {}; {}, {}", value == nullptr ? "missing" : excerpt(*value), why, kRemedy))};
}

void require_known(const Keys& keys, std::initializer_list<std::string_view> known) {
  if (const std::optional<std::string> key = keys.unknown(known))
    reject(keys, *key, "what this key does to the numbers is not known");
}

// A key that may be absent or null, or else has one of these values.
void require_one_of(const Keys& keys, std::string_view key,
                    std::initializer_list<std::string_view> allowed) {
  if (!keys.has(key)) return;
  const std::string value = keys.text_or(key, "");
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    reject(keys, key, fmt::format("supported are {}", join(allowed, ", ")));
}

void set_block(Quantization& result, const Keys& keys, std::string_view key) {
  const std::optional<std::vector<int>> block = keys.integers(key, 1, kMostBlock);
  if (!block) return;
  if (block->size() != 2)
    keys.fail(key, fmt::format("has {} entries; expected two, as in [128, 128]", block->size()));
  const bool is_other = result.block_rows > 0 &&
                        (result.block_rows != (*block)[0] || result.block_cols != (*block)[1]);
  if (is_other) reject(keys, key, "another group of this checkpoint has other blocks");
  result.block_rows = (*block)[0];
  result.block_cols = (*block)[1];
}

void set_four_bit(Quantization& result, const Keys& keys, const FourBitFormat& format) {
  if (result.four_bit && *result.four_bit != format)
    reject(keys, "weights", "another group of this checkpoint has other weights of four bits");
  result.four_bit = format;
}

// DeepSeek-V4 says so beside quantization_config, re-saved checkpoints in it.
void read_expert_dtype(Quantization& result, const Keys& keys) {
  require_one_of(keys, "expert_dtype", {"fp8", "fp4"});
  if (keys.text_or("expert_dtype", "fp8") == "fp4") result.four_bit = FourBitFormat{};
}

// DeepSeek's format, which transformers calls fine-grained FP8.
void read_fp8(Quantization& result, const Keys& keys) {
  require_known(keys, {"quant_method", "fmt", "activation_scheme", "weight_block_size",
                       "modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore",
                       "dequantize", "scale_fmt", "expert_dtype", "kv_cache_scheme"});
  // transformers' default. null is a value here: a scale for each matrix or row.
  if (!keys.has("weight_block_size") && !keys.is_null("weight_block_size"))
    result.block_rows = result.block_cols = 128;
  set_block(result, keys, "weight_block_size");
  require_one_of(keys, "fmt", {"e4m3", "float8_e4m3fn"});
  require_one_of(keys, "scale_fmt", {"float", "ue8m0"});
  read_expert_dtype(result, keys);
  if (keys.has("activation_scheme") && keys.text_or("activation_scheme", "") != "dynamic")
    reject(keys, "activation_scheme", "scales of inputs that are fixed are not supported");
}

void require_float8(const Keys& keys) {
  require_known(keys,
                {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure",
                 "dynamic", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"});
  if (keys.integer_or("num_bits", 8, 1, 64) != 8) reject(keys, "num_bits", "only 8 is supported");
  if (keys.text_or("type", "int") != "float") reject(keys, "type", "only \"float\" is supported");
  if (!keys.boolean_or("symmetric", true)) reject(keys, "symmetric", "only true is supported");
  if (keys.has("actorder")) reject(keys, "actorder", "only null is supported");
}

// MXFP4, or INT4 in groups of 32 or 128 columns.
void read_four_bit(Quantization& result, const Keys& keys) {
  require_known(keys,
                {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure",
                 "dynamic", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"});
  if (!keys.has("strategy")) reject(keys, "strategy", "weights of four bits are in groups");
  require_one_of(keys, "strategy", {"group"});
  require_one_of(keys, "type", {"int", "float"});
  if (keys.has("actorder")) reject(keys, "actorder", "only null is supported");
  if (keys.has("block_structure")) reject(keys, "block_structure", "only null is supported");
  if (keys.has("dynamic") && keys.boolean_or("dynamic", false))
    reject(keys, "dynamic", "weights have scales that are stored");
  const bool is_float = keys.text_or("type", "int") == "float";
  FourBitFormat format;
  format.dtype = is_float ? DType::kF4E2M1 : DType::kU4;
  format.group = keys.integer_or("group_size", 0, 0, kMostBlock);
  format.has_zero = !keys.boolean_or("symmetric", true);
  if (is_float && format.group != kMxGroup)
    reject(keys, "group_size", "of floats of four bits, groups of 32 are supported (MXFP4)");
  if (is_float && format.has_zero) reject(keys, "symmetric", "floats have no zero points");
  if (!is_float && format.group != 32 && format.group != 128)
    reject(keys, "group_size", "of integers of four bits, groups of 32 and 128 are supported");
  if (is_float) require_one_of(keys, "scale_dtype", {"torch.uint8", "uint8"});
  set_four_bit(result, keys, format);
}

void read_weights(Quantization& result, const Keys& keys, bool packed) {
  if (packed) {
    if (keys.integer_or("num_bits", 8, 1, 64) != 4)
      reject(keys, "num_bits", "of packed weights, only 4 is supported");
    return read_four_bit(result, keys);
  }
  require_float8(keys);
  if (keys.has("dynamic") && keys.boolean_or("dynamic", false))
    reject(keys, "dynamic", "weights have scales that are stored");
  require_one_of(keys, "strategy", {"tensor", "channel", "block"});
  if (keys.text_or("strategy", "tensor") != "block") return;
  if (!keys.has("block_structure")) reject(keys, "block_structure", "the blocks have no size");
  set_block(result, keys, "block_structure");
}

void read_inputs(const Keys& keys) {
  require_float8(keys);
  const Json* const dynamic = keys.find("dynamic");
  if (dynamic == nullptr || !dynamic->is_boolean() || !dynamic->boolean())
    reject(keys, "dynamic", "scales of inputs that are fixed are not supported");
  require_one_of(keys, "strategy", {"tensor", "token", "group"});
}

void read_compressed_tensors(Quantization& result, const Keys& keys) {
  require_known(keys, {"quant_method", "format", "quantization_status", "global_compression_ratio",
                       "kv_cache_scheme", "ignore", "config_groups", "sparsity_config",
                       "transform_config", "version", "run_compressed"});
  require_one_of(keys, "format",
                 {"float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
                  "mixed-precision"});
  require_one_of(keys, "quantization_status", {"compressed", "frozen"});
  if (const std::optional<Keys> sparsity = keys.object("sparsity_config"))
    require_one_of(*sparsity, "format", {"dense"});
  if (const std::optional<Keys> transform = keys.object("transform_config");
      transform && !transform->names().empty())
    reject(keys, "transform_config", "transforms of inputs and weights are not supported");
  const std::optional<Keys> groups = keys.object("config_groups");
  if (!groups || groups->names().empty())
    reject(keys, "config_groups", "it tells how weights are quantised");
  for (const std::string& name : groups->names()) {
    const std::optional<Keys> group = groups->object(name);
    if (!group) continue;
    require_known(*group,
                  {"targets", "weights", "input_activations", "output_activations", "format"});
    require_one_of(
        *group, "format",
        {"float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized"});
    const std::string of_all = keys.text_or("format", "naive-quantized");
    const std::string format = group->text_or("format", of_all.c_str());
    const bool packed = format == "pack-quantized" || format == "mxfp4-pack-quantized";
    if (group->has("output_activations"))
      reject(*group, "output_activations", "outputs that are quantised are not supported");
    if (const std::optional<Keys> weights = group->object("weights"))
      read_weights(result, *weights, packed);
    if (const std::optional<Keys> inputs = group->object("input_activations")) read_inputs(*inputs);
  }
}

void read_fbgemm(const Keys& keys) {
  require_known(keys, {"quant_method", "activation_scale_ub", "modules_to_not_convert"});
  // Absent means 1200.
  if (keys.has("activation_scale_ub") || !keys.is_null("activation_scale_ub"))
    reject(keys, "activation_scale_ub", "inputs that are clamped are not supported");
}

// gpt-oss.
void read_mxfp4(Quantization& result, const Keys& keys) {
  require_known(keys, {"quant_method", "modules_to_not_convert", "dequantize"});
  result.four_bit = FourBitFormat{};
}

void read_method(Quantization& result, const Keys& keys) {
  if (result.method == "fp8") return read_fp8(result, keys);
  if (result.method == "compressed-tensors") return read_compressed_tensors(result, keys);
  if (result.method == "fbgemm_fp8") return read_fbgemm(keys);
  if (result.method == "mxfp4") return read_mxfp4(result, keys);
  reject(keys, "quant_method", "weights are read of fp8, compressed-tensors, fbgemm_fp8 and mxfp4");
}

}  // namespace

Quantization parse_quantization(const Keys& root, const Keys& text) {
  Quantization result;
  std::optional<Keys> keys;
  for (const Keys* const object : {&root, &text})
    for (const char* const name : {"quantization_config", "compression_config"})
      if (!keys) keys = object->object(name);
  if (!keys) return result;
  result.method = keys->text_or("quant_method", "unnamed");
  try {
    read_method(result, *keys);
    if (result.method == "fp8") {
      for (const Keys* const object : {&root, &text}) read_expert_dtype(result, *object);
    }
  } catch (const Problem& problem) {
    result.problem = problem.text;
  }
  return result;
}

}  // namespace switchyard
