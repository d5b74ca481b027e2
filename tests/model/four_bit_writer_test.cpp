// The bytes and the config.json of checkpoints with four-bit experts, beside generate_weights().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "model/errors.h"
#include "model/safetensors.h"
#include "model/temporary_directory.h"
#include "models/generate.h"

namespace switchyard {
namespace {

using nlohmann::json;
using ::testing::IsEmpty;

constexpr ConfigOverrides kSmall{
    .num_moe_layers = 1, .num_experts = 16, .hidden = 160, .intermediate = 96, .vocab_size = 50};
constexpr std::int64_t kHidden = 160, kIntermediate = 96;

// A small checkpoint of a model, and the weights that it should hold.
class Written {
 public:
  explicit Written(const char* model, DType dtype, ConfigOverrides overrides = kSmall) {
    const ModelEntry& entry = find_model(model);
    write_checkpoint(entry, directory_ / "m", {.dtype = dtype, .seed = 7, .overrides = overrides});
    config = json::parse(test::read_file(directory_ / "m" / "config.json"));
    file_ = SafetensorsFile::open(directory_ / "m" / "model.safetensors");
    const ModelConfig plain =
        parse_config(rewrite_config(entry.config_json, overrides, dtype), model);
    layer = plain.moe_layers().back();
    spec = *plain.layers[static_cast<std::size_t>(layer)];
    weights = generate_weights(spec, dtype, layer_seed(7, layer), {.vocabulary = 50});
  }

  // The bytes of a tensor, which must be of this type and shape.
  std::string tensor(const std::string& name, const std::string& dtype,
                     const std::vector<std::int64_t>& shape) {
    const TensorInfo* const info = file_->find(name);
    if (info == nullptr) {
      ADD_FAILURE() << "no tensor " << name;
      return "";
    }
    read_.insert(name);
    EXPECT_EQ(info->dtype, dtype) << name;
    EXPECT_EQ(info->shape, shape) << name;
    return {reinterpret_cast<const char*>(file_->data(*info)), info->bytes()};
  }
  // The tensors that nobody has read.
  std::vector<std::string> others() const {
    std::vector<std::string> names;
    for (const TensorInfo& info : file_->header().tensors) {
      if (!read_.contains(info.name)) names.push_back(info.name);
    }
    return names;
  }

  json config;
  int layer = 0;
  LayerSpec spec;
  MoeWeights weights;

 private:
  test::TemporaryDirectory directory_;
  std::shared_ptr<const SafetensorsFile> file_;
  std::set<std::string> read_;
};

std::string bytes_at(const void* data, DType dtype, std::int64_t count) {
  return {static_cast<const char*>(data), static_cast<std::size_t>(bytes_of(dtype, count))};
}
std::string codes_of(const MatrixView& m) { return bytes_at(m.data, m.dtype, m.rows * m.cols); }
std::string scales_of(const MatrixView& m) {
  return bytes_at(m.scale, m.scale_dtype,
                  (m.rows + m.scale_rows - 1) / m.scale_rows * m.scale_stride);
}
std::string values_of(const VectorView& v) { return bytes_at(v.data, v.dtype, v.size); }

// The rows of two matrices in turn.
std::string in_turn(const std::string& a, const std::string& b, std::int64_t rows) {
  const std::size_t row = a.size() / static_cast<std::size_t>(rows);
  std::string both;
  for (std::size_t at = 0; at < a.size(); at += row) both += a.substr(at, row) + b.substr(at, row);
  return both;
}

TEST(FourBitCheckpoint, GptOssHasBlocksOfAllExpertsWithGateAndUpInTurn) {
  Written written("gpt-oss-20b", DType::kF4E2M1);
  std::string gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias;
  for (const FfnWeights& e : written.weights.experts) {
    gate_up += in_turn(codes_of(e.gate), codes_of(e.up), kIntermediate);
    gate_up_scales += in_turn(scales_of(e.gate), scales_of(e.up), kIntermediate);
    gate_up_bias += in_turn(values_of(e.gate_bias), values_of(e.up_bias), kIntermediate);
    down += codes_of(e.down);
    down_scales += scales_of(e.down);
    down_bias += values_of(e.down_bias);
  }
  const std::string experts = "model.layers.0.mlp.experts.";
  const std::int64_t groups = kHidden / 32, down_groups = kIntermediate / 32;
  EXPECT_EQ(
      written.tensor(experts + "gate_up_proj_blocks", "U8", {16, 2 * kIntermediate, groups, 16}),
      gate_up);
  EXPECT_EQ(written.tensor(experts + "gate_up_proj_scales", "U8", {16, 2 * kIntermediate, groups}),
            gate_up_scales);
  EXPECT_EQ(written.tensor(experts + "gate_up_proj_bias", "BF16", {16, 2 * kIntermediate}),
            gate_up_bias);
  EXPECT_EQ(written.tensor(experts + "down_proj_blocks", "U8", {16, kHidden, down_groups, 16}),
            down);
  EXPECT_EQ(written.tensor(experts + "down_proj_scales", "U8", {16, kHidden, down_groups}),
            down_scales);
  EXPECT_EQ(written.tensor(experts + "down_proj_bias", "BF16", {16, kHidden}), down_bias);
  written.tensor("model.layers.0.mlp.router.weight", "BF16", {16, kHidden});
  written.tensor("model.layers.0.mlp.router.bias", "BF16", {16});
  EXPECT_THAT(written.others(), IsEmpty());
  EXPECT_EQ(written.config["quantization_config"]["quant_method"], "mxfp4");
  EXPECT_TRUE(written.config["quantization_config"]["modules_to_not_convert"].is_array());
}

TEST(FourBitCheckpoint, DeepseekV4HasBytesAndExponentsBesideAnFp8SharedExpert) {
  // The fourth layer is the first that has a correction bias.
  ConfigOverrides overrides = kSmall;
  overrides.num_moe_layers = 4;
  Written written("deepseek-v4-flash", DType::kF4E2M1, overrides);
  ASSERT_EQ(written.layer, 3);
  const std::string block = "layers.3.ffn.";
  for (std::size_t e = 0; e < 16; ++e) {
    const FfnWeights& expert = written.weights.experts[e];
    const std::string base = block + "experts." + std::to_string(e) + ".";
    for (const auto& [name, matrix] : {std::pair("w1", &expert.gate), std::pair("w3", &expert.up),
                                       std::pair("w2", &expert.down)}) {
      EXPECT_EQ(written.tensor(base + name + ".weight", "I8", {matrix->rows, matrix->cols / 2}),
                codes_of(*matrix));
      EXPECT_EQ(
          written.tensor(base + name + ".scale", "F8_E8M0", {matrix->rows, matrix->cols / 32}),
          scales_of(*matrix));
    }
  }
  const MatrixView& shared = written.weights.shared.up;
  EXPECT_EQ(written.tensor(block + "shared_experts.w3.weight", "F8_E4M3", {kIntermediate, kHidden}),
            codes_of(shared));
  EXPECT_EQ(written.tensor(block + "shared_experts.w3.scale", "F32", {1, 2}), scales_of(shared));
  EXPECT_EQ(written.config["expert_dtype"], "fp4");
  EXPECT_EQ(written.config["quantization_config"]["quant_method"], "fp8");
  EXPECT_EQ(written.config["quantization_config"]["scale_fmt"], "ue8m0");
  EXPECT_EQ(written.config["quantization_config"]["weight_block_size"], json::array({128, 128}));
}

TEST(FourBitCheckpoint, KimiK2HasWordsOfEightBesideABf16SharedExpert) {
  Written written("kimi-k2-thinking", DType::kU4);
  const std::string block = "model.layers.1.mlp.";
  for (std::size_t e = 0; e < 16; ++e) {
    const FfnWeights& expert = written.weights.experts[e];
    const std::string base = block + "experts." + std::to_string(e) + ".";
    for (const auto& [name, matrix] :
         {std::pair("gate_proj", &expert.gate), std::pair("up_proj", &expert.up),
          std::pair("down_proj", &expert.down)}) {
      const std::string words =
          written.tensor(base + name + ".weight_packed", "I32", {matrix->rows, matrix->cols / 8});
      EXPECT_EQ(words, codes_of(*matrix));
      // Column c of a row is nibble c % 8 of word c / 8, counted from the lowest.
      std::uint32_t word = 0;
      std::memcpy(&word, &words[4], sizeof word);
      const auto byte = static_cast<const std::uint8_t*>(matrix->data)[4 + 5 / 2];
      EXPECT_EQ(word >> (4 * 5) & 15, byte >> 4);
      EXPECT_EQ(
          written.tensor(base + name + ".weight_scale", "BF16", {matrix->rows, matrix->cols / 32}),
          scales_of(*matrix));
      const std::int64_t shape[] = {matrix->rows, matrix->cols};
      EXPECT_EQ(written.tensor(base + name + ".weight_shape", "I64", {2}),
                std::string(reinterpret_cast<const char*>(shape), sizeof shape));
    }
  }
  EXPECT_EQ(
      written.tensor(block + "shared_experts.up_proj.weight", "BF16", {kIntermediate, kHidden}),
      codes_of(written.weights.shared.up));
  const json& quantization = written.config["quantization_config"];
  EXPECT_EQ(quantization["quant_method"], "compressed-tensors");
  EXPECT_EQ(quantization["format"], "pack-quantized");
  const json& weights = quantization["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["num_bits"], 4);
  EXPECT_EQ(weights["type"], "int");
  EXPECT_EQ(weights["symmetric"], true);
  EXPECT_EQ(weights["strategy"], "group");
  EXPECT_EQ(weights["group_size"], 32);
}

TEST(FourBitCheckpoint, KimiK3HasBytesAndExponents) {
  Written written("kimi-k3", DType::kF4E2M1);
  const std::string base = "model.layers.1.mlp.experts.15.";
  const FfnWeights& expert = written.weights.experts[15];
  EXPECT_EQ(written.tensor(base + "down_proj.weight_packed", "U8", {kHidden, kIntermediate / 2}),
            codes_of(expert.down));
  EXPECT_EQ(written.tensor(base + "down_proj.weight_scale", "U8", {kHidden, kIntermediate / 32}),
            scales_of(expert.down));
  const json& quantization = written.config["quantization_config"];
  EXPECT_EQ(quantization["format"], "mxfp4-pack-quantized");
  const json& weights = quantization["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["type"], "float");
  EXPECT_EQ(weights["scale_dtype"], "torch.uint8");
}

// Families that publish all experts of a layer in one tensor have them one by one in these formats.
TEST(FourBitCheckpoint, OtherFamiliesHaveCompressedTensors) {
  Written written("qwen3.5-35b", DType::kU4);
  written.tensor("model.language_model.layers.0.mlp.experts.3.up_proj.weight_packed", "I32",
                 {kIntermediate, kHidden / 8});
}

TEST(FourBitCheckpoint, LayoutsThatNobodyPublishesAreRefused) {
  const test::TemporaryDirectory directory;
  const auto write = [&](const char* model, DType dtype, ConfigOverrides overrides = kSmall) {
    write_checkpoint(find_model(model), directory / "m", {.dtype = dtype, .overrides = overrides});
  };
  EXPECT_ERROR(write("gpt-oss-20b", DType::kU4), kUnsupported,
               "gpt_oss has no published int4 layout", "use bf16");
  EXPECT_ERROR(write("dbrx", DType::kF4E2M1), kUnsupported, "dbrx", "mxfp4");
  EXPECT_ERROR(write("kimi-k2", DType::kF4E2M1), kUnsupported, "beside a shared one");
  ConfigOverrides odd = kSmall;
  odd.hidden = 144;
  EXPECT_ERROR(write("gpt-oss-20b", DType::kF4E2M1, odd), kInvalidArgument, "hidden 144",
               "multiples");
  EXPECT_FALSE(std::filesystem::exists(directory / "m"));
}

}  // namespace
}  // namespace switchyard
