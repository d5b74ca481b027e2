// Experts of four bits in the layouts of published checkpoints, and what is refused of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/convert.h"
#include "model/errors.h"
#include "model/safetensors.h"
#include "model/temporary_directory.h"
#include "models/safetensors_writer.h"
#include "reference/decode.h"
#include "switchyard/checkpoint.h"

namespace switchyard {
namespace {

constexpr std::int64_t kExperts = 2, kHidden = 128, kIntermediate = 256;
using Shape = std::vector<std::int64_t>;

struct Tensor {
  std::string dtype;
  Shape shape;
  std::vector<std::byte> bytes;
};
using Tensors = std::map<std::string, Tensor>;

constexpr double kFourBitFloats[] = {0, .5, 1, 1.5, 2, 3, 4, 6};

// A matrix as numbers that a checkpoint can hold, and the pieces that it is stored in.
struct Matrix {
  std::int64_t rows, cols, group;
  std::vector<int> codes;   // [rows][cols], 0 to 15
  std::vector<int> scales;  // [rows][cols / group]: exponents of MXFP4, bf16 of INT4
  std::vector<int> zeros;   // the same; empty: none

  static Matrix random(std::int64_t rows, std::int64_t cols, std::int64_t group, bool is_int,
                       bool has_zero, unsigned seed) {
    std::mt19937 random(seed);
    Matrix m{rows, cols, group, {}, {}, {}};
    for (std::int64_t i = 0; i < rows * cols; ++i) m.codes.push_back(random() % 16);
    for (std::int64_t i = 0; i < rows * cols / group; ++i) {
      m.scales.push_back(is_int ? f32_to_bf16(0.01f * static_cast<float>(1 + random() % 100))
                                : 110 + static_cast<int>(random() % 20));
      if (has_zero) m.zeros.push_back(random() % 16);
    }
    return m;
  }
  double value(std::int64_t r, std::int64_t c, bool is_int) const {
    const auto at = static_cast<std::size_t>((r * cols + c) / group);
    const int code = codes[static_cast<std::size_t>(r * cols + c)];
    if (is_int) {
      return (code - (zeros.empty() ? 8 : zeros[at])) *
             double{bf16_to_f32(static_cast<std::uint16_t>(scales[at]))};
    }
    return (code < 8 ? 1 : -1) * kFourBitFloats[code % 8] * std::ldexp(1.0, scales[at] - 127);
  }
  // Words of `columns` columns each, the first in the lowest bits, as a little-endian machine
  // stores them.
  std::vector<std::byte> packed(int columns) const {
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < codes.size(); i += static_cast<std::size_t>(columns)) {
      std::uint64_t word = 0;
      for (int j = 0; j < columns; ++j) {
        word |= static_cast<std::uint64_t>(codes[i + static_cast<std::size_t>(j)]) << (4 * j);
      }
      for (int b = 0; b < columns / 2; ++b)
        bytes.push_back(static_cast<std::byte>(word >> (8 * b)));
    }
    return bytes;
  }
  std::vector<std::byte> scale_bytes(int size) const {
    std::vector<std::byte> bytes;
    for (const int s : scales) {
      for (int b = 0; b < size; ++b) bytes.push_back(static_cast<std::byte>(s >> (8 * b)));
    }
    return bytes;
  }
  // Eight rows a word.
  std::vector<std::byte> zero_bytes() const {
    const std::int64_t groups = cols / group;
    std::vector<std::byte> bytes;
    for (std::int64_t r = 0; r < rows; r += 8) {
      for (std::int64_t g = 0; g < groups; ++g) {
        std::uint32_t word = 0;
        for (std::int64_t j = 0; j < 8 && r + j < rows; ++j) {
          word |= static_cast<std::uint32_t>(zeros[static_cast<std::size_t>((r + j) * groups + g)])
                  << (4 * j);
        }
        for (int b = 0; b < 4; ++b) bytes.push_back(static_cast<std::byte>(word >> (8 * b)));
      }
    }
    return bytes;
  }
};

struct Layout {
  const char* name;
  bool is_int;
  std::int64_t group;
  bool has_zero;
  std::string keys;  // of config.json, behind the sizes
  // Adds a module's tensors; unused for gpt-oss.
  std::function<void(Tensors&, const std::string& module, const Matrix&)> add;
  const char* block = "model.layers.0.mlp.";
  std::vector<const char*> projections = {"gate_proj", "up_proj", "down_proj"};
};

void add_native(Tensors& tensors, const std::string& module, const Matrix& m) {
  tensors[module + ".weight"] = {"I8", {m.rows, m.cols / 2}, m.packed(2)};
  tensors[module + ".scale"] = {"F8_E8M0", {m.rows, m.cols / m.group}, m.scale_bytes(1)};
}
void add_mxfp4_packed(Tensors& tensors, const std::string& module, const Matrix& m) {
  tensors[module + ".weight_packed"] = {"U8", {m.rows, m.cols / 2}, m.packed(2)};
  tensors[module + ".weight_scale"] = {"U8", {m.rows, m.cols / m.group}, m.scale_bytes(1)};
}
void add_int4_packed(Tensors& tensors, const std::string& module, const Matrix& m) {
  tensors[module + ".weight_packed"] = {"I32", {m.rows, m.cols / 8}, m.packed(8)};
  tensors[module + ".weight_scale"] = {"BF16", {m.rows, m.cols / m.group}, m.scale_bytes(2)};
  std::vector<std::byte> shape(16);
  const std::int64_t sizes[] = {m.rows, m.cols};
  std::memcpy(shape.data(), sizes, shape.size());
  tensors[module + ".weight_shape"] = {"I64", {2}, shape};
  if (m.zeros.empty()) return;
  tensors[module + ".weight_zero_point"] = {
      "I32", {(m.rows + 7) / 8, m.cols / m.group}, m.zero_bytes()};
}

std::string compressed(const char* format, const std::string& weights) {
  return std::string(R"(, "model_type": "olmoe", "quantization_config": {"quant_method":
      "compressed-tensors", "format": ")") +
         format + R"(", "quantization_status": "compressed", "ignore": ["lm_head"],
      "kv_cache_scheme": null, "config_groups": {"group_0": {"targets": ["Linear"],
      "input_activations": null, "output_activations": null, "weights": {"num_bits": 4,
      "strategy": "group", "actorder": null, "block_structure": null, "dynamic": false,
      "observer": "minmax", "observer_kwargs": {}, )" +
         weights + "}}}}";
}

std::vector<Layout> layouts() {
  const std::string v4 =
      R"(, "model_type": "deepseek_v4", "n_routed_experts": 2, "num_hash_layers": 0,
       "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
       "activation_scheme": "dynamic", "weight_block_size": [128, 128])";
  const std::vector<const char*> native = {"w1", "w3", "w2"};
  return {
      {"DeepSeekV4", false, 32, false, v4 + R"(}, "expert_dtype": "fp4")", add_native,
       "layers.0.ffn.", native},
      {"DeepSeekV4Resaved", false, 32, false, v4 + R"(, "expert_dtype": "fp4"})", add_native,
       "layers.0.ffn.", native},
      {"GptOss", false, 32, false,
       R"(, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"]})",
       nullptr},
      {"Mxfp4Packed", false, 32, false,
       compressed("mxfp4-pack-quantized",
                  R"("type": "float", "group_size": 32, "symmetric": true,
                     "scale_dtype": "torch.uint8")"),
       add_mxfp4_packed},
      {"Int4Packed", true, 32, false,
       compressed("pack-quantized", R"("type": "int", "group_size": 32, "symmetric": true)"),
       add_int4_packed},
      {"Int4PackedOf128WithZeroPoints", true, 128, true,
       compressed("pack-quantized", R"("type": "int", "group_size": 128, "symmetric": false)"),
       add_int4_packed},
  };
}

class FourBitCheckpoint : public ::testing::TestWithParam<Layout> {
 protected:
  FourBitCheckpoint() {
    const Layout& layout = GetParam();
    const std::string block = layout.block;
    const bool is_gpt_oss = layout.add == nullptr;
    const auto zeros = [&](const std::string& name, const Shape& shape) {
      std::int64_t count = 2;
      for (const std::int64_t extent : shape) count *= extent;
      tensors_[block + name] = {"BF16", shape,
                                std::vector<std::byte>(static_cast<std::size_t>(count))};
    };
    zeros(is_gpt_oss ? "router.weight" : "gate.weight", {kExperts, kHidden});
    for (int e = 0; e < kExperts; ++e) {
      for (int p = 0; p < 3; ++p) {
        const std::int64_t rows = p == 2 ? kHidden : kIntermediate;
        matrices_.push_back(Matrix::random(rows, kHidden + kIntermediate - rows, layout.group,
                                           layout.is_int, layout.has_zero,
                                           static_cast<unsigned>(3 * e + p)));
        if (!is_gpt_oss) {
          layout.add(tensors_,
                     block + "experts." + std::to_string(e) + "." +
                         layout.projections[static_cast<std::size_t>(p)],
                     matrices_.back());
        }
      }
    }
    if (is_gpt_oss) {
      zeros("router.bias", {kExperts});
      zeros("experts.gate_up_proj_bias", {kExperts, 2 * kIntermediate});
      zeros("experts.down_proj_bias", {kExperts, kHidden});
      add_gpt_oss(block);
    }
    if (block == "layers.0.ffn.") {
      zeros("gate.bias", {kExperts});
      tensors_[block + "gate.bias"] = {
          "F32", {kExperts}, std::vector<std::byte>(4 * static_cast<std::size_t>(kExperts))};
      for (const char* const name : {"w1", "w3"}) {
        zeros(std::string("shared_experts.") + name + ".weight", {kIntermediate, kHidden});
      }
      zeros("shared_experts.w2.weight", {kHidden, kIntermediate});
    }
    keys_ = layout.keys;
  }

  // Gate's and up's rows in turn.
  void add_gpt_oss(const std::string& block) {
    Tensor codes{"U8", {kExperts, 2 * kIntermediate, kHidden / 32, 16}, {}};
    Tensor scales{"U8", {kExperts, 2 * kIntermediate, kHidden / 32}, {}};
    Tensor down{"U8", {kExperts, kHidden, kIntermediate / 32, 16}, {}};
    Tensor down_scales{"U8", {kExperts, kHidden, kIntermediate / 32}, {}};
    const auto append = [](Tensor& to, const std::vector<std::byte>& from, std::int64_t row,
                           std::int64_t size) {
      to.bytes.insert(to.bytes.end(), from.begin() + row * size, from.begin() + (row + 1) * size);
    };
    for (std::size_t e = 0; e < kExperts; ++e) {
      for (std::int64_t r = 0; r < 2 * kIntermediate; ++r) {
        const Matrix& m = matrices_[3 * e + static_cast<std::size_t>(r % 2)];
        append(codes, m.packed(2), r / 2, kHidden / 2);
        append(scales, m.scale_bytes(1), r / 2, kHidden / 32);
      }
      for (std::int64_t r = 0; r < kHidden; ++r) {
        append(down, matrices_[3 * e + 2].packed(2), r, kIntermediate / 2);
        append(down_scales, matrices_[3 * e + 2].scale_bytes(1), r, kIntermediate / 32);
      }
    }
    tensors_[block + "experts.gate_up_proj_blocks"] = codes;
    tensors_[block + "experts.gate_up_proj_scales"] = scales;
    tensors_[block + "experts.down_proj_blocks"] = down;
    tensors_[block + "experts.down_proj_scales"] = down_scales;
  }

  Checkpoint open() const {
    test::write_file(path_ / "config.json",
                     R"({"hidden_size": 128, "intermediate_size": 256,
                "moe_intermediate_size": 256, "num_experts": 2, "num_local_experts": 2,
                "num_experts_per_tok": 1, "num_hidden_layers": 1)" +
                         keys_ + "}");
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : tensors_) infos.push_back({name, tensor.dtype, tensor.shape});
    SafetensorsWriter writer(path_ / "model.safetensors", infos);
    for (const auto& [name, tensor] : tensors_) writer.append(tensor.bytes);
    writer.finish();
    return Checkpoint::open(path_);
  }
  void load() const { open().load_layer(0); }

  // Loads the layer, and compares every weight with what was stored.
  void expect_stored() const {
    const Layout& layout = GetParam();
    const Checkpoint checkpoint = open();
    EXPECT_EQ(checkpoint.dtype(), layout.is_int ? DType::kU4 : DType::kF4E2M1);
    const MoeWeights weights = checkpoint.load_layer(0);
    for (std::size_t e = 0; e < kExperts; ++e) {
      const FfnWeights& expert = weights.experts[e];
      const MatrixView* const views[] = {&expert.gate, &expert.up, &expert.down};
      for (std::size_t p = 0; p < 3; ++p) {
        const Matrix& m = matrices_[3 * e + p];
        std::vector<double> row(static_cast<std::size_t>(m.cols));
        for (std::int64_t r = 0; r < m.rows; ++r) {
          reference::decode_row(*views[p], r, row.data());
          for (std::int64_t c = 0; c < m.cols; ++c) {
            ASSERT_EQ(row[static_cast<std::size_t>(c)], m.value(r, c, layout.is_int))
                << "expert " << e << " matrix " << p << " row " << r << " column " << c;
          }
        }
      }
    }
  }

  // The first tensor whose name ends so.
  Tensor& tensor(const std::string& end) {
    for (auto& [name, one] : tensors_) {
      if (name.ends_with(end)) return one;
    }
    ADD_FAILURE() << "no " << end;
    return tensors_.begin()->second;
  }
  void rename(const std::string& end, const std::string& to) {
    Tensors renamed;
    for (auto& [name, one] : tensors_) {
      const bool ends = name.ends_with(end);
      renamed[ends ? name.substr(0, name.size() - end.size()) + to : name] = one;
    }
    tensors_ = renamed;
  }
  void replace_key(const std::string& from, const std::string& to) {
    const std::size_t at = keys_.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    keys_.replace(at, from.size(), to);
  }

  test::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_.path();
  Tensors tensors_;
  std::vector<Matrix> matrices_;  // [experts][gate, up, down]
  std::string keys_;
};

TEST_P(FourBitCheckpoint, IsReadAsItIsStored) { expect_stored(); }

// Tensors of one format beside a config.json that tells of another: whoever believed the config
// would read beyond the tensors.
TEST_P(FourBitCheckpoint, AnotherFormatsConfigIsRefused) {
  const std::string config = R"("quantization_config")";
  const std::string model = keys_.substr(0, keys_.find(config));
  for (const Layout& other : layouts()) {
    SCOPED_TRACE(other.name);
    keys_ = model + other.keys.substr(other.keys.find(config));
    const bool same = other.is_int == GetParam().is_int && other.group == GetParam().group &&
                      other.has_zero == GetParam().has_zero;
    try {
      load();
    } catch (const Error&) {
      continue;
    }
    ASSERT_TRUE(same) << "it was read";
    expect_stored();
  }
}

TEST_P(FourBitCheckpoint, SizesThatDoNotFitAreRefused) {
  const bool is_gpt_oss = GetParam().add == nullptr;
  const bool is_native = std::string(GetParam().name).starts_with("DeepSeek");
  const std::string codes = is_gpt_oss  ? "gate_up_proj_blocks"
                            : is_native ? "w1.weight"
                                        : "gate_proj.weight_packed";
  const std::string scales = is_gpt_oss  ? "gate_up_proj_scales"
                             : is_native ? "w1.scale"
                                         : "gate_proj.weight_scale";
  const Tensors whole = tensors_;
  for (const std::string& end : {codes, scales}) {
    tensors_ = whole;
    Tensor& one = tensor(end);
    // One column, or group, less.
    one.bytes.resize(one.bytes.size() / static_cast<std::size_t>(one.shape.back()) *
                     static_cast<std::size_t>(one.shape.back() - 1));
    --one.shape.back();
    EXPECT_ERROR(load(), kShapeMismatch, end.c_str(), "config.json asks for");
  }
  tensors_ = whole;
  tensor(scales).dtype = "I8";
  if (GetParam().is_int) tensor(scales).bytes.resize(tensor(scales).bytes.size() / 2);
  EXPECT_ERROR(load(), kDTypeMismatch, scales.c_str(), "I8");
  tensors_ = whole;
  rename(scales, "elsewhere");
  EXPECT_ERROR(load(), kMissingTensor, "no tensor", scales.c_str());
}

TEST_P(FourBitCheckpoint, AStatedShapeMustBeThatOfTheModel) {
  if (!GetParam().is_int) return;
  tensor("experts.0.up_proj.weight_shape").bytes[8] = std::byte{64};
  EXPECT_ERROR(load(), kShapeMismatch, "up_proj.weight_shape", "[256, 64]", "[256, 128]");
}

TEST_P(FourBitCheckpoint, FormatsThatAreNotKnownAreRefused) {
  const std::string keys = keys_;
  const auto expect = [&](const std::string& from, const std::string& to, const char* words) {
    SCOPED_TRACE(to);
    keys_ = keys;
    replace_key(from, to);
    EXPECT_ERROR(load(), kUnsupported, words);
  };
  if (GetParam().name == std::string("GptOss")) {
    expect(R"("mxfp4")", R"("mxfp5")", "weights are read of fp8, compressed-tensors");
    expect(R"("modules_to_not_convert")", R"("rotation")", "'quantization_config.rotation'");
  } else if (std::string(GetParam().name).starts_with("DeepSeek")) {
    expect(R"("fp4")", R"("fp3")", "expert_dtype");
    expect(R"("expert_dtype": "fp4")", R"("expert_dtype": "fp8")", "config.json says nothing");
  } else {
    expect(R"("num_bits": 4)", R"("num_bits": 3)", "num_bits");
    expect(R"("strategy": "group")", R"("strategy": "channel")", "strategy");
    expect(R"("actorder": null)", R"("actorder": "group")", "actorder");
    expect(R"("dynamic": false)", R"("dynamic": true)", "dynamic");
    expect(R"("observer": "minmax")", R"("rounding": "minmax")", "rounding");
    expect(R"(pack-quantized")", R"(pack-quantised")", "format");
    expect(R"("group_size": )", R"("group_size": 6)", "group_size");
  }
}

// As transformers saves a shared expert whose gate and up it holds in one module. The second half
// has scales and zero points of its own.
TEST_P(FourBitCheckpoint, SharedExpertWithGateAndUpInOneModule) {
  const Layout& layout = GetParam();
  // The other families' shared experts are never of four bits.
  if (keys_.find(R"("model_type": "olmoe")") == std::string::npos) return;
  replace_key(R"("model_type": "olmoe")", R"("model_type": "deepseek_v2", "n_routed_experts": 2,
      "n_shared_experts": 1, "first_k_dense_replace": 0)");
  const Matrix both =
      Matrix::random(2 * kIntermediate, kHidden, layout.group, layout.is_int, layout.has_zero, 77);
  const std::string shared = std::string(layout.block) + "shared_experts.";
  layout.add(tensors_, shared + "gate_up_proj", both);
  layout.add(tensors_, shared + "down_proj", matrices_[2]);
  const MoeWeights weights = open().load_layer(0);
  std::vector<double> row(static_cast<std::size_t>(kHidden));
  for (std::int64_t r = 0; r < 2 * kIntermediate; ++r) {
    const bool is_up = r >= kIntermediate;
    reference::decode_row(is_up ? weights.shared.up : weights.shared.gate,
                          is_up ? r - kIntermediate : r, row.data());
    for (std::int64_t c = 0; c < kHidden; ++c)
      ASSERT_EQ(row[static_cast<std::size_t>(c)], both.value(r, c, layout.is_int))
          << "row " << r << " column " << c;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, FourBitCheckpoint, ::testing::ValuesIn(layouts()),
                         [](const auto& given) { return given.param.name; });

}  // namespace
}  // namespace switchyard
