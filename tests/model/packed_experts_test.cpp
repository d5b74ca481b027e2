// Experts that a checkpoint packs into two tensors: both layouts that such tensors occur in, and
// the scales of FP8 for each.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/convert.h"
#include "model/errors.h"
#include "model/safetensors.h"
#include "model/temporary_directory.h"
#include "models/safetensors_writer.h"
#include "switchyard/checkpoint.h"
#include "switchyard/weights.h"

namespace switchyard {
namespace {

constexpr std::int64_t kExperts = 3;

struct Sizes {
  std::int64_t hidden, intermediate;
};

struct PackedFamily {
  const char* model_type;
  const char* block;  // of layer 0
  const char* router;
  bool interleaved;  // gate and up rows in turn, and biases
  const char* more_keys;
};
constexpr PackedFamily kFamilies[] = {
    {"olmoe", "model.layers.0.mlp.", "gate", false, ""},
    {"qwen3_vl_moe", "model.language_model.layers.0.mlp.", "gate", false, ""},
    {"qwen3_5_moe", "model.language_model.layers.0.mlp.", "gate", false,
     R"(, "shared_expert_intermediate_size": 0)"},
    {"mixtral", "model.layers.0.mlp.", "gate", false, ""},
    {"jamba", "model.layers.0.feed_forward.", "router", false,
     R"(, "expert_layer_period": 1, "expert_layer_offset": 0)"},
    {"gpt_oss", "model.layers.0.mlp.", "router", true, ""},
};

// The transpose of a matrix [rows, cols].
std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows,
                              std::int64_t cols) {
  std::vector<float> result(matrix.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c)
      result[static_cast<std::size_t>(c * rows + r)] =
          matrix[static_cast<std::size_t>(r * cols + c)];
  return result;
}

// The value of an element: exact in FP8, and different in neighbours.
float value(std::int64_t expert, int which, std::int64_t r, std::int64_t c) {
  return static_cast<float>((r * 5 + c * 3 + expert * 7 + which * 11) % 15 - 7);
}

class Tensors {
 public:
  void add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
           const std::vector<float>& values) {
    infos_.push_back({.name = name, .dtype = dtype, .shape = std::move(shape)});
    for (const float v : values) {
      if (dtype == "F32") {
        const auto* const bytes = reinterpret_cast<const std::byte*>(&v);
        data_.insert(data_.end(), bytes, bytes + sizeof v);
      } else {
        data_.push_back(static_cast<std::byte>(f32_to_f8e4m3(v)));
      }
    }
  }
  void write(const std::filesystem::path& path) const {
    SafetensorsWriter writer(path, infos_);
    writer.append(data_);
    writer.finish();
  }

 private:
  std::vector<TensorInfo> infos_;
  std::vector<std::byte> data_;
};

class PackedExperts : public ::testing::Test {
 protected:
  void configure(const PackedFamily& family, const Sizes& sizes, const std::string& more = "") {
    const auto number = [](std::int64_t n) { return std::to_string(n); };
    test::write_file(path_ / "config.json",
                     std::string(R"({"model_type": ")") + family.model_type +
                         R"(", "hidden_size": )" + number(sizes.hidden) +
                         R"(, "intermediate_size": )" + number(sizes.intermediate) +
                         R"(, "moe_intermediate_size": )" + number(sizes.intermediate) +
                         R"(, "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2,
                "num_hidden_layers": 1)" +
                         family.more_keys + more + "}");
  }

  // Experts in rows, [E, 2I, H] and [E, H, I], or transposed.
  static Tensors pack(const PackedFamily& family, const Sizes& sizes, const std::string& dtype,
                      bool gate_up_by_rows, bool down_by_rows) {
    const std::int64_t h = sizes.hidden, i = sizes.intermediate;
    Tensors tensors;
    const std::string block = family.block;
    tensors.add(block + family.router + ".weight", "F32", {kExperts, h},
                std::vector<float>(static_cast<std::size_t>(kExperts * h), 1.0f));
    std::vector<float> gate_up, down;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      std::vector<float> both, one;
      for (std::int64_t r = 0; r < 2 * i; ++r)
        for (std::int64_t c = 0; c < h; ++c)
          both.push_back(family.interleaved ? value(e, static_cast<int>(r % 2), r / 2, c)
                                            : value(e, static_cast<int>(r / i), r % i, c));
      for (std::int64_t r = 0; r < h; ++r)
        for (std::int64_t c = 0; c < i; ++c) one.push_back(value(e, 2, r, c));
      if (!gate_up_by_rows) both = transposed(both, 2 * i, h);
      if (!down_by_rows) one = transposed(one, h, i);
      gate_up.insert(gate_up.end(), both.begin(), both.end());
      down.insert(down.end(), one.begin(), one.end());
    }
    using Shape = std::vector<std::int64_t>;
    tensors.add(block + "experts.gate_up_proj", dtype,
                gate_up_by_rows ? Shape{kExperts, 2 * i, h} : Shape{kExperts, h, 2 * i}, gate_up);
    tensors.add(block + "experts.down_proj", dtype,
                down_by_rows ? Shape{kExperts, h, i} : Shape{kExperts, i, h}, down);
    if (family.interleaved) {
      const auto zeros = [](std::int64_t n) {
        return std::vector<float>(static_cast<std::size_t>(n));
      };
      tensors.add(block + "router.bias", "F32", {kExperts}, zeros(kExperts));
      tensors.add(block + "experts.gate_up_proj_bias", "F32", {kExperts, 2 * i},
                  zeros(kExperts * 2 * i));
      tensors.add(block + "experts.down_proj_bias", "F32", {kExperts, h}, zeros(kExperts * h));
    }
    return tensors;
  }

  // The scale that is expected of row r of both gate and up together (0 to 2I - 1 as they are
  // packed), or of down.
  using Scale = std::function<float(std::int64_t e, std::int64_t r, std::int64_t c)>;

  static float element(const MatrixView& view, std::int64_t r, std::int64_t c) {
    const auto* const at =
        static_cast<const std::byte*>(view.data) +
        static_cast<std::size_t>(r * view.row_stride + c * view.col_stride) * size_of(view.dtype);
    if (view.dtype == DType::kF8E4M3)
      return f8e4m3_to_f32(static_cast<std::uint8_t>(*at)) *
             view.f32_scale()[r / view.scale_rows * view.scale_stride + c / view.scale_cols];
    float result = 0;
    std::memcpy(&result, at, sizeof result);
    return result;
  }

  void expect_experts(const PackedFamily& family, const Sizes& sizes, const Scale& gate_up,
                      const Scale& down) const {
    const MoeWeights weights = Checkpoint::open(path_).load_layer(0);
    const std::int64_t h = sizes.hidden, i = sizes.intermediate;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      for (std::int64_t r = 0; r < i; ++r)
        for (std::int64_t c = 0; c < h; ++c) {
          const std::int64_t gate_row = family.interleaved ? 2 * r : r;
          const std::int64_t up_row = family.interleaved ? 2 * r + 1 : i + r;
          ASSERT_EQ(element(expert.gate, r, c), value(e, 0, r, c) * gate_up(e, gate_row, c))
              << "gate of " << e << " at " << r << ", " << c;
          ASSERT_EQ(element(expert.up, r, c), value(e, 1, r, c) * gate_up(e, up_row, c))
              << "up of " << e << " at " << r << ", " << c;
          ASSERT_EQ(element(expert.down, c, r), value(e, 2, c, r) * down(e, c, r))
              << "down of " << e << " at " << c << ", " << r;
        }
    }
  }

  const test::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_.path();
};

float unscaled(std::int64_t, std::int64_t, std::int64_t) { return 1; }

// With sizes at which one tensor alone does not tell: I = H, 2I = H.
TEST_F(PackedExperts, BothLayoutsAreRead) {
  for (const PackedFamily& family : kFamilies) {
    for (const Sizes sizes : {Sizes{16, 6}, Sizes{16, 8}, Sizes{16, 16}, Sizes{8, 16}}) {
      for (const bool by_rows : {true, false}) {
        SCOPED_TRACE(std::string(family.model_type) + " of " + std::to_string(sizes.intermediate) +
                     (by_rows ? " by rows" : " by columns"));
        configure(family, sizes);
        pack(family, sizes, "F32", by_rows, by_rows).write(path_ / "model.safetensors");
        expect_experts(family, sizes, unscaled, unscaled);
      }
    }
  }
}

TEST_F(PackedExperts, TensorsOfTwoLayoutsAndOfOthersAreRefused) {
  const PackedFamily& family = kFamilies[0];
  configure(family, {16, 6});
  pack(family, {16, 6}, "F32", true, false).write(path_ / "model.safetensors");
  EXPECT_ERROR(Checkpoint::open(path_).load_layer(0), kShapeMismatch,
               "experts.gate_up_proj' has shape [3, 12, 16]", "experts.down_proj' has [3, 6, 16]",
               "one of them is transposed");
  pack(family, {16, 7}, "F32", true, true).write(path_ / "model.safetensors");
  EXPECT_ERROR(Checkpoint::open(path_).load_layer(0), kShapeMismatch,
               "experts.gate_up_proj' has shape [3, 14, 16]", "[3, 12, 16] or [3, 16, 12]");
}

// A scale that differs in every block.
float block_scale(std::int64_t e, std::int64_t block_row, std::int64_t block_col) {
  return 1.0f + static_cast<float>(e * 64 + block_row * 8 + block_col);
}

// Scales of blocks of 4 x 8 as the tensor is stored, or for each output (block 0).
void add_scales(Tensors& tensors, const std::string& name, std::int64_t rows, std::int64_t cols,
                bool by_rows, bool blocked) {
  const std::int64_t down = by_rows ? rows : cols, across = by_rows ? cols : rows;  // as stored
  const std::int64_t scale_rows = blocked ? (down + 3) / 4 : by_rows ? down : 1;
  const std::int64_t scale_cols = blocked ? (across + 7) / 8 : by_rows ? 1 : across;
  std::vector<float> scales;
  for (std::int64_t e = 0; e < kExperts; ++e)
    for (std::int64_t r = 0; r < scale_rows; ++r)
      for (std::int64_t c = 0; c < scale_cols; ++c) scales.push_back(block_scale(e, r, c));
  tensors.add(name, "F32", {kExperts, scale_rows, scale_cols}, scales);
}

// Also with I = 10 and 6, where blocks of 4 rows straddle gate and up.
TEST_F(PackedExperts, ScalesOfFp8FollowTheLayout) {
  for (const PackedFamily& family : kFamilies) {
    for (const Sizes sizes : {Sizes{16, 8}, Sizes{24, 10}, Sizes{20, 6}, Sizes{16, 16}}) {
      for (const bool by_rows : {true, false}) {
        for (const bool blocked : {true, false}) {
          SCOPED_TRACE(std::string(family.model_type) + " of " +
                       std::to_string(sizes.intermediate) + (by_rows ? " by rows" : " by columns") +
                       (blocked ? ", blocks" : ", rows"));
          configure(family, sizes,
                    std::string(R"(, "quantization_config": {"quant_method": "fp8",
                                    "weight_block_size": )") +
                        (blocked ? "[4, 8]" : "null") + "}");
          Tensors tensors = pack(family, sizes, "F8_E4M3", by_rows, by_rows);
          const std::string experts = std::string(family.block) + "experts.";
          add_scales(tensors, experts + "gate_up_proj_scale_inv", 2 * sizes.intermediate,
                     sizes.hidden, by_rows, blocked);
          add_scales(tensors, experts + "down_proj_scale_inv", sizes.hidden, sizes.intermediate,
                     by_rows, blocked);
          tensors.write(path_ / "model.safetensors");
          const auto scale = [&](std::int64_t e, std::int64_t r, std::int64_t c) {
            if (!blocked) return by_rows ? block_scale(e, r, 0) : block_scale(e, 0, r);
            return by_rows ? block_scale(e, r / 4, c / 8) : block_scale(e, c / 4, r / 8);
          };
          expect_experts(family, sizes, scale, scale);
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
