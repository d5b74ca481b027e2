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
  require_one_of(keys, "expert_dtype", {"fp8"});
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

void read_weights(Quantization& result, const Keys& keys) {
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
  require_one_of(keys, "format", {"float-quantized", "naive-quantized"});
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
    require_one_of(*group, "format", {"float-quantized", "naive-quantized"});
    if (group->has("output_activations"))
      reject(*group, "output_activations", "outputs that are quantised are not supported");
    if (const std::optional<Keys> weights = group->object("weights"))
      read_weights(result, *weights);
    if (const std::optional<Keys> inputs = group->object("input_activations")) read_inputs(*inputs);
  }
}

void read_fbgemm(const Keys& keys) {
  require_known(keys, {"quant_method", "activation_scale_ub", "modules_to_not_convert"});
  // Absent means 1200.
  if (keys.has("activation_scale_ub") || !keys.is_null("activation_scale_ub"))
    reject(keys, "activation_scale_ub", "inputs that are clamped are not supported");
}

void read_method(Quantization& result, const Keys& keys) {
  if (result.method == "fp8") return read_fp8(result, keys);
  if (result.method == "compressed-tensors") return read_compressed_tensors(result, keys);
  if (result.method == "fbgemm_fp8") return read_fbgemm(keys);
  reject(keys, "quant_method", "FP8 weights are read of fp8, compressed-tensors and fbgemm_fp8");
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
  } catch (const Problem& problem) {
    result.problem = problem.text;
  }
  return result;
}

}  // namespace switchyard
