#include "switchyard/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "base/convert.h"
#include "model/errors.h"
#include "model/safetensors.h"
#include "model/temporary_directory.h"
#include "models/generate.h"
#include "models/random_tensor.h"
#include "models/safetensors_writer.h"
#include "support/identifier.h"
#include "support/specs.h"

namespace switchyard {
namespace {

constexpr std::int64_t kVocabulary = 300;

ConfigOverrides small(const std::string& name) {
  ConfigOverrides overrides{.num_moe_layers = 2,
                            .num_experts = 16,
                            .top_k = 2,
                            .hidden = 144,
                            .intermediate = 136,
                            .vocab_size = static_cast<int>(kVocabulary)};
  if (name == "thesis") overrides.num_moe_layers = 1;
  return overrides;
}

// small(), with sizes that are whole groups of four-bit columns.
ConfigOverrides small(const std::string& name, DType dtype) {
  ConfigOverrides overrides = small(name);
  if (is_four_bit(dtype)) {
    overrides.hidden = 160;
    overrides.intermediate = 96;
  }
  return overrides;
}

double four_bit_element(const MatrixView& view, std::int64_t r, std::int64_t c) {
  const auto* const row = static_cast<const std::uint8_t*>(view.row(r));
  const int code = c % 2 == 0 ? row[c / 2] & 15 : row[c / 2] >> 4;
  const std::int64_t at = r * view.scale_stride + c / view.scale_cols;
  if (view.dtype == DType::kU4) {
    // The scales of the models here are bf16, and symmetric.
    EXPECT_EQ(view.scale_dtype, DType::kBF16);
    EXPECT_EQ(view.zero, nullptr);
    return (code - 8) *
           static_cast<double>(bf16_to_f32(static_cast<const std::uint16_t*>(view.scale)[at]));
  }
  EXPECT_EQ(view.scale_dtype, DType::kF8E8M0);
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code < 8 ? 1 : -1) * kMagnitudes[code % 8] *
         std::ldexp(1.0, static_cast<const std::uint8_t*>(view.scale)[at] - 127);
}

double element(const MatrixView& view, std::int64_t r, std::int64_t c) {
  if (is_four_bit(view.dtype)) return four_bit_element(view, r, c);
  const std::byte* at =
      static_cast<const std::byte*>(view.data) +
      static_cast<std::size_t>(r * view.row_stride + c * view.col_stride) * size_of(view.dtype);
  std::uint16_t half = 0;
  std::int64_t integer = 0;
  float value = 0;
  switch (view.dtype) {
    case DType::kF32: std::memcpy(&value, at, 4); return static_cast<double>(value);
    case DType::kF16: std::memcpy(&half, at, 2); return static_cast<double>(f16_to_f32(half));
    case DType::kBF16: std::memcpy(&half, at, 2); return static_cast<double>(bf16_to_f32(half));
    case DType::kF8E4M3:
      return static_cast<double>(f8e4m3_to_f32(static_cast<std::uint8_t>(*at))) *
             static_cast<double>(
                 view.f32_scale()[r / view.scale_rows * view.scale_stride + c / view.scale_cols]);
    case DType::kI64: std::memcpy(&integer, at, 8); return static_cast<double>(integer);
    default: ADD_FAILURE() << "dtype " << to_string(view.dtype); return 0;
  }
}

void expect_equal(const MatrixView& actual, const MatrixView& expected, const char* what) {
  ASSERT_EQ(actual.empty(), expected.empty()) << what;
  if (actual.empty()) return;
  ASSERT_EQ(actual.dtype, expected.dtype) << what;
  ASSERT_EQ(actual.rows, expected.rows) << what;
  ASSERT_EQ(actual.cols, expected.cols) << what;
  for (std::int64_t r = 0; r < actual.rows; ++r)
    for (std::int64_t c = 0; c < actual.cols; ++c)
      ASSERT_EQ(element(actual, r, c), element(expected, r, c))
          << what << " at (" << r << ", " << c << ")";
}

void expect_equal(const VectorView& actual, const VectorView& expected, const char* what) {
  const auto as_matrix = [](const VectorView& v) {
    return MatrixView{.data = v.data,
                      .dtype = v.dtype,
                      .rows = 1,
                      .cols = v.size,
                      .row_stride = 0,
                      .col_stride = v.stride};
  };
  expect_equal(as_matrix(actual), as_matrix(expected), what);
}

void expect_equal(const FfnWeights& actual, const FfnWeights& expected) {
  expect_equal(actual.gate, expected.gate, "gate");
  expect_equal(actual.up, expected.up, "up");
  expect_equal(actual.down, expected.down, "down");
  expect_equal(actual.gate_bias, expected.gate_bias, "gate_bias");
  expect_equal(actual.up_bias, expected.up_bias, "up_bias");
  expect_equal(actual.down_bias, expected.down_bias, "down_bias");
}

void expect_equal(const MoeWeights& actual, const MoeWeights& expected) {
  expect_equal(actual.router, expected.router, "router");
  expect_equal(actual.router_bias, expected.router_bias, "router_bias");
  expect_equal(actual.correction_bias, expected.correction_bias, "correction_bias");
  expect_equal(actual.hash_table, expected.hash_table, "hash_table");
  expect_equal(actual.shared, expected.shared);
  expect_equal(actual.shared_gate, expected.shared_gate, "shared_gate");
  ASSERT_EQ(actual.experts.size(), expected.experts.size());
  for (std::size_t e = 0; e < actual.experts.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_equal(actual.experts[e], expected.experts[e]);
  }
}

struct RoundTrip {
  const char* model;
  DType dtype;
};

class EveryModel : public ::testing::TestWithParam<RoundTrip> {};

TEST_P(EveryModel, RoundTripsThroughItsOwnCheckpointFormat) {
  const ModelEntry& entry = find_model(GetParam().model);
  const test::TemporaryDirectory directory;
  const std::filesystem::path target = directory / "checkpoint/";
  const ConfigOverrides overrides = small(entry.name, GetParam().dtype);
  std::uint64_t reported = 0;
  write_checkpoint(entry, target,
                   {.dtype = GetParam().dtype,
                    .seed = 11,
                    .max_shard_bytes = is_four_bit(GetParam().dtype) ? 150'000u : 400'000u,
                    .overrides = overrides,
                    .progress = [&](std::uint64_t done, std::uint64_t total) {
                      EXPECT_LE(done, total);
                      reported = done;
                    }});
  EXPECT_GT(reported, 0u);
  EXPECT_TRUE(std::filesystem::exists(target / "model.safetensors.index.json"));

  const ModelConfig config =
      parse_config(rewrite_config(entry.config_json, overrides, GetParam().dtype), entry.name);
  MoeWeights last;
  {
    const Checkpoint checkpoint = Checkpoint::open(target);
    EXPECT_EQ(checkpoint.model_type(), config.model_type);
    EXPECT_EQ(checkpoint.num_layers(), config.num_layers);
    EXPECT_EQ(checkpoint.moe_layers(), config.moe_layers());
    EXPECT_EQ(checkpoint.dtype(), GetParam().dtype);
    for (const int layer : checkpoint.moe_layers()) {
      SCOPED_TRACE("layer " + std::to_string(layer));
      const LayerSpec spec = checkpoint.layer_spec(layer);
      EXPECT_EQ(spec, *config.layers[static_cast<std::size_t>(layer)]);
      last = checkpoint.load_layer(layer);
      expect_equal(last, generate_weights(spec, GetParam().dtype, layer_seed(11, layer),
                                          {.vocabulary = kVocabulary}));
    }
  }
  // The checkpoint is gone, the last layer's memory is not.
  const int layer = config.moe_layers().back();
  expect_equal(
      last, generate_weights(*config.layers[static_cast<std::size_t>(layer)], GetParam().dtype,
                             layer_seed(11, layer), {.vocabulary = kVocabulary, .num_threads = 3}));
}

std::vector<RoundTrip> round_trips() {
  std::vector<RoundTrip> result;
  for (const ModelEntry& entry : model_table()) {
    result.push_back({entry.name, DType::kBF16});
    if (entry.dtype != DType::kBF16) result.push_back({entry.name, entry.dtype});
  }
  for (const char* name : {"mixtral-8x7b", "qwen3.5-35b", "llama-4-scout", "deepseek-v4-flash"})
    result.push_back({name, DType::kF8E4M3});
  // Experts one by one in the formats of compressed-tensors, under names of other families.
  for (const char* name : {"mixtral-8x7b", "qwen3-30b"}) result.push_back({name, DType::kF4E2M1});
  for (const char* name : {"qwen3.5-35b", "minimax-m2"}) result.push_back({name, DType::kU4});
  for (const char* name : {"olmoe", "gpt-oss-20b", "dbrx", "thesis"}) {
    result.push_back({name, DType::kF32});
    result.push_back({name, DType::kF16});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Models, EveryModel, ::testing::ValuesIn(round_trips()),
                         [](const ::testing::TestParamInfo<RoundTrip>& param) {
                           return testing::identifier(param.param.model) + "_" +
                                  to_string(param.param.dtype);
                         });

// A directory with one small Mixtral layer, whose files tests then damage.
class DamagedCheckpoint : public ::testing::Test {
 protected:
  void write(const char* model = "mixtral-8x7b", DType dtype = DType::kBF16,
             std::uint64_t max_shard_bytes = std::uint64_t{1} << 30) {
    ConfigOverrides overrides = small(model);
    overrides.num_moe_layers = 1;
    overrides.num_experts = 4;
    write_checkpoint(find_model(model), path_,
                     {.dtype = dtype, .max_shard_bytes = max_shard_bytes, .overrides = overrides});
  }

  // Replaces the checkpoint by one in bf16, of the given config.json.
  void write_unquantised(const std::string& config) {
    std::filesystem::remove_all(path_);
    write();
    test::write_file(path_ / "config.json", config);
  }

  // Rewrites model.safetensors with each tensor passed through `change`; false drops it.
  template <class Change>
  void rewrite(Change change) {
    const auto file = SafetensorsFile::open(path_ / "model.safetensors");
    std::vector<TensorInfo> infos;
    std::vector<std::byte> data;
    for (const TensorInfo& original : file->header().tensors) {
      TensorInfo info = original;
      std::vector<std::byte> bytes(file->data(original), file->data(original) + original.bytes());
      if (!change(info, bytes)) continue;
      infos.push_back(info);
      data.insert(data.end(), bytes.begin(), bytes.end());
    }
    SafetensorsWriter writer(path_ / "model.safetensors", infos);
    writer.append(data);
    writer.finish();
  }

  MoeWeights load() { return Checkpoint::open(path_).load_layer(0); }

  const test::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "m";
  const std::string block_ = "model.layers.0.block_sparse_moe.";
};

TEST_F(DamagedCheckpoint, AbsentFiles) {
  EXPECT_ERROR(Checkpoint::open(path_), kSystem, "is not a directory");
  std::filesystem::create_directory(path_);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidConfig, "no config.json");
  test::write_file(path_ / "config.json", "{}");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidConfig, "config.json", "model_type");
  test::write_file(path_ / "config.json", find_model("olmoe").config_json);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "no *.safetensors", "download");
  test::write_file(path_ / "pytorch_model.bin", "PK");
  test::write_file(path_ / "model.gguf", "GGUF");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "no *.safetensors", "model.gguf and 1 more",
               "save_pretrained");
}

// Downloads that went wrong, in place of the weights, of the index and of config.json.
TEST_F(DamagedCheckpoint, FilesThatAreSomethingElseAreToldSo) {
  const std::pair<std::string, const char*> kFiles[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4995584424\n",
       "Git LFS pointer"},
      {"<!DOCTYPE html><html><head><title>401</title></head></html>", "HTML page"},
      {"\n  <HTML lang=\"en\">", "HTML page"},
      {"", "is empty"},
      {std::string("PK\x03\x04 archive/data.pkl"), "zip archive"},
  };
  write();
  const std::string weights = test::read_file(path_ / "model.safetensors");
  const std::string config = test::read_file(path_ / "config.json");
  for (const auto& [contents, what] : kFiles) {
    SCOPED_TRACE(what);
    test::write_file(path_ / "model.safetensors", contents);
    EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "/m/model.safetensors: ", what);
    test::write_file(path_ / "model.safetensors", weights);
    test::write_file(path_ / "model.safetensors.index.json", contents);
    EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "/m/model.safetensors.index.json: ", what);
    std::filesystem::remove(path_ / "model.safetensors.index.json");
    test::write_file(path_ / "config.json", contents);
    EXPECT_ERROR(Checkpoint::open(path_), kInvalidConfig, "/m/config.json: ", what);
    test::write_file(path_ / "config.json", config);
  }
}

// An entry that cannot be read is told apart from an absent one.
TEST_F(DamagedCheckpoint, ConfigsThatAreNoFiles) {
  std::filesystem::create_directories(path_ / "config.json");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "config.json", "is a directory");
  std::filesystem::remove(path_ / "config.json");
  std::filesystem::create_symlink("config.json", path_ / "config.json");
  EXPECT_ERROR(Checkpoint::open(path_), kSystem, "config.json", "leads back to itself");
  std::filesystem::remove(path_ / "config.json");
  std::filesystem::create_symlink("blob", path_ / "config.json");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "a symbolic link to a file that");
  std::filesystem::remove(path_ / "config.json");
  ASSERT_EQ(::mkfifo((path_ / "config.json").c_str(), 0600), 0);
  ::alarm(20);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "config.json", "is a pipe");
  ::alarm(0);
}

TEST_F(DamagedCheckpoint, DirectoriesThatLeadNowhere) {
  std::filesystem::create_symlink("m", path_);
  EXPECT_ERROR(Checkpoint::open(path_), kSystem, "leads back to itself");
}

TEST_F(DamagedCheckpoint, DirectoriesThatMayNotBeRead) {
  write();
  std::filesystem::permissions(path_, std::filesystem::perms::none);
  const uid_t user = ::geteuid();
  if (user == 0) {
    // Nothing is forbidden to root.
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::all);
    constexpr uid_t kNobody = 65534;
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  EXPECT_ERROR(Checkpoint::open(path_), kSystem, "Permission denied", "permissions");
  if (user == 0) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
}

TEST_F(DamagedCheckpoint, FilesOfAbsurdSizesAreNotRead) {
  write();
  const std::filesystem::path index = path_ / "model.safetensors.index.json";
  test::write_file(index, "");
  std::filesystem::resize_file(index, std::uintmax_t{10} << 30);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "index.json", "more than the");
  std::filesystem::resize_file(path_ / "config.json", std::uintmax_t{10} << 30);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "config.json", "more than the");
}

// If it were taken for absent, whatever lies in the directory would pass for the checkpoint.
TEST_F(DamagedCheckpoint, AnIndexThatIsALinkToNothing) {
  write();
  std::filesystem::create_symlink("blob", path_ / "model.safetensors.index.json");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "index.json",
               "a symbolic link to a file that is not there");
}

TEST_F(DamagedCheckpoint, AShardThatBecomesShorterAfterItWasOpened) {
  write();
  const Checkpoint checkpoint = Checkpoint::open(path_);
  checkpoint.load_layer(0);
  std::filesystem::resize_file(path_ / "model.safetensors", 4096);
  EXPECT_ERROR(checkpoint.load_layer(0), kInvalidFile, "model.safetensors", "has 4096 now");
}

TEST_F(DamagedCheckpoint, MissingShardIsNamed) {
  write("mixtral-8x7b", DType::kBF16, 100'000);
  const std::string shard = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      if (entry.path().filename().string().find("model-00002") == 0)
        return entry.path().filename().string();
    return std::string();
  }();
  ASSERT_FALSE(shard.empty());
  std::filesystem::remove(path_ / shard);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "names shard", shard.c_str(), "download it");
}

TEST_F(DamagedCheckpoint, IndexThatPromisesAnAbsentTensor) {
  write();
  test::write_file(path_ / "model.safetensors.index.json",
                   R"({"weight_map":{"ghost":"model.safetensors"}})");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "'ghost'", "does not have it");
}

TEST_F(DamagedCheckpoint, DuplicateTensor) {
  write();
  std::filesystem::copy(path_ / "model.safetensors", path_ / "consolidated.safetensors");
  load();  // model.safetensors alone is the checkpoint
  std::filesystem::rename(path_ / "model.safetensors", path_ / "other.safetensors");
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "is in both", "other.safetensors");
}

TEST_F(DamagedCheckpoint, TruncatedFile) {
  write();
  std::filesystem::resize_file(path_ / "model.safetensors",
                               std::filesystem::file_size(path_ / "model.safetensors") - 1);
  EXPECT_ERROR(Checkpoint::open(path_), kInvalidFile, "truncated", "download it again");
}

TEST_F(DamagedCheckpoint, MissingTensorNamesTheClosest) {
  write();
  const std::string name = block_ + "experts.2.w3.weight";
  rewrite([&](TensorInfo& info, auto&) { return info.name != name; });
  EXPECT_ERROR(load(), kMissingTensor, ("'" + name + "'").c_str(), "closest names are",
               "experts.2.w1.weight");
  rewrite([&](TensorInfo& info, auto&) { return info.name.find("gate") == std::string::npos; });
  EXPECT_ERROR(load(), kMissingTensor, (block_ + "gate.weight").c_str());
}

TEST_F(DamagedCheckpoint, WrongShape) {
  write();
  rewrite([&](TensorInfo& info, auto&) {
    if (info.name == block_ + "experts.1.w2.weight") std::swap(info.shape[0], info.shape[1]);
    return true;
  });
  EXPECT_ERROR(load(), kShapeMismatch, "experts.1.w2.weight", "[136, 144]", "[144, 136]");
}

TEST_F(DamagedCheckpoint, WrongDType) {
  write();
  rewrite([&](TensorInfo& info, auto&) {
    if (info.name == block_ + "experts.1.w2.weight") info.dtype = "I16";
    return true;
  });
  EXPECT_ERROR(load(), kDTypeMismatch, "experts.1.w2.weight", "I16", "BF16");
  rewrite([&](TensorInfo& info, auto&) {
    if (info.name == block_ + "experts.1.w2.weight") info.dtype = "F16";
    return true;
  });
  EXPECT_ERROR(load(), kDTypeMismatch, "experts[1]", "f16", "bf16", "one dtype");
}

TEST_F(DamagedCheckpoint, QuantizedFormatsAreUnsupportedNotMissing) {
  write("gpt-oss-20b");
  rewrite([](TensorInfo& info, auto&) {
    if (info.name.ends_with("gate_up_proj")) info.name += ".qweight";
    return true;
  });
  EXPECT_ERROR(load(), kUnsupported, "gate_up_proj.qweight", "cannot read", "bf16");
  rewrite([](TensorInfo& info, auto&) {
    if (info.name.ends_with("gate_up_proj.qweight")) {
      info.name.replace(info.name.size() - 8, 8, "_blocks");
    }
    return true;
  });
  EXPECT_ERROR(load(), kUnsupported, "gate_up_proj_blocks", "says nothing", "bf16");
}

TEST_F(DamagedCheckpoint, UnusableDTypeIsUnsupported) {
  write();
  rewrite([&](TensorInfo& info, std::vector<std::byte>& bytes) {
    if (info.name == block_ + "experts.0.w1.weight") {
      info.dtype = "I8";
      bytes.resize(bytes.size() / 2);
    }
    return true;
  });
  EXPECT_ERROR(load(), kUnsupported, "experts.0.w1.weight", "four bits", "convert", "bf16");
}

TEST_F(DamagedCheckpoint, MissingScale) {
  write("mixtral-8x7b", DType::kF8E4M3);
  rewrite([&](TensorInfo& info, auto&) {
    return info.name != block_ + "experts.3.w1.weight_scale_inv";
  });
  EXPECT_ERROR(load(), kMissingTensor, "experts.3.w1.weight_scale_inv");
}

TEST_F(DamagedCheckpoint, NotAnMoeLayer) {
  write();
  const Checkpoint checkpoint = Checkpoint::open(path_);
  for (const int layer : {-1, 1, 99})
    EXPECT_ERROR(checkpoint.load_layer(layer), kInvalidArgument,
                 ("layer " + std::to_string(layer)).c_str(), "1 MoE layers");
}

TEST_F(DamagedCheckpoint, SharedExpertsThatConfigLeavesOpenAreThoseOfTheTensors) {
  write("kimi-k2");
  std::string config = test::read_file(path_ / "config.json");
  const std::size_t at = config.find("\"n_shared_experts\": 1");
  ASSERT_NE(at, std::string::npos);
  config.replace(at, 21, "\"n_shared_experts\": null");
  test::write_file(path_ / "config.json", config);
  const auto shared = [&] {
    const Checkpoint checkpoint = Checkpoint::open(path_);
    const int layer = checkpoint.moe_layers().front();
    EXPECT_EQ(checkpoint.load_layer(layer).shared.up.rows,
              checkpoint.layer_spec(layer).shared_intermediate);
    return checkpoint.layer_spec(layer).shared_intermediate;
  };
  EXPECT_EQ(shared(), 136);
  rewrite([&](TensorInfo& info, auto&) {
    return info.name.find("shared_experts") == std::string::npos;
  });
  EXPECT_EQ(shared(), 0);
}

// transformers adds MiniMax's bias whatever use_routing_bias says, if there is one.
TEST_F(DamagedCheckpoint, ACorrectionBiasThatConfigDeniesIsThatOfTheTensors) {
  write("minimax-m2");
  std::string config = test::read_file(path_ / "config.json");
  const std::size_t at = config.find("\"use_routing_bias\": true");
  ASSERT_NE(at, std::string::npos);
  config.replace(at, 24, "\"use_routing_bias\": false");
  test::write_file(path_ / "config.json", config);
  EXPECT_FALSE(load().correction_bias.empty());
  rewrite([&](TensorInfo& info, auto&) { return !info.name.ends_with("correction_bias"); });
  EXPECT_TRUE(load().correction_bias.empty());
  EXPECT_FALSE(Checkpoint::open(path_).layer_spec(0).routing.has_correction_bias);
}

TEST_F(DamagedCheckpoint, QuantizationThatIsNotKnownIsRefusedWhereItMatters) {
  write("mixtral-8x7b", DType::kF8E4M3);
  std::string config = test::read_file(path_ / "config.json");
  const std::size_t at = config.find("\"dynamic\"");
  ASSERT_NE(at, std::string::npos);
  config.replace(at, 9, "\"static\"");
  test::write_file(path_ / "config.json", config);
  EXPECT_ERROR(load(), kUnsupported, "'quantization_config.activation_scheme'", "\"static\"",
               "experts.0.w1.weight' is FP8");
  write_unquantised(config);
  load();
}

// Scales of other granularities and dtypes than the writer's.
TEST_F(DamagedCheckpoint, OtherScaleFormsAreUnderstood) {
  write("mixtral-8x7b", DType::kF8E4M3);
  rewrite([&](TensorInfo& info, std::vector<std::byte>& bytes) {
    if (info.name == block_ + "experts.0.w1.weight_scale_inv") {  // per tensor, in bf16
      const std::uint16_t half = f32_to_bf16(0.5f);
      bytes.resize(2);
      std::memcpy(bytes.data(), &half, 2);
      info.dtype = "BF16";
      info.shape = {};
    } else if (info.name == block_ + "experts.0.w3.weight_scale_inv") {  // per row
      std::vector<float> scales(136);
      for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i);
      bytes.resize(136 * 4);
      std::memcpy(bytes.data(), scales.data(), bytes.size());
      info.name = block_ + "experts.0.w3.weight_scale";
      info.shape = {136, 1};
    } else if (info.name == block_ + "experts.0.w2.weight_scale_inv") {  // powers of two
      bytes = {std::byte{127}, std::byte{128}, std::byte{126}, std::byte{129}};
      info.name = block_ + "experts.0.w2.scale";
      info.dtype = "F8_E8M0";
    }
    return true;
  });
  const MoeWeights weights = load();
  const FfnWeights& expert = weights.experts[0];
  const auto scale = [](const MatrixView& m, std::int64_t r, std::int64_t c) {
    return m.f32_scale()[r / m.scale_rows * m.scale_stride + c / m.scale_cols];
  };
  EXPECT_EQ(scale(expert.gate, 135, 143), 0.5f);
  EXPECT_EQ(scale(expert.up, 0, 143), 0.0f);
  EXPECT_EQ(scale(expert.up, 135, 143), 135.0f);
  EXPECT_EQ(scale(expert.down, 0, 0), 1.0f);
  EXPECT_EQ(scale(expert.down, 0, 135), 2.0f);
  EXPECT_EQ(scale(expert.down, 143, 0), 0.5f);
  EXPECT_EQ(scale(expert.down, 143, 135), 4.0f);
}

// transformers' in-memory form, the prefixes of multimodal exports, and misaligned data.
TEST_F(DamagedCheckpoint, PackedExpertsUnderAnotherPrefixMisaligned) {
  write();
  const MoeWeights expected = load();
  std::string header;
  std::string data(1, '\0');
  const auto add = [&](const std::string& name, const std::string& shape,
                       const std::string& bytes) {
    header += ",\"" + name + R"(":{"dtype":"BF16","shape":)" + shape + R"(,"data_offsets":[)" +
              std::to_string(data.size()) + "," + std::to_string(data.size() + bytes.size()) + "]}";
    data += bytes;
  };
  const auto raw = [](const MatrixView& m) {
    return std::string(static_cast<const char*>(m.data),
                       static_cast<std::size_t>(m.rows * m.cols) * 2);
  };
  std::string gate_up, down;
  for (const FfnWeights& expert : expected.experts) {
    gate_up += raw(expert.gate) + raw(expert.up);
    down += raw(expert.down);
  }
  const std::string base = "language_model.model.layers.0.mlp.";
  add(base + "gate.weight", "[4,144]", raw(expected.router));
  add(base + "experts.gate_up_proj", "[4,272,144]", gate_up);
  add(base + "experts.down_proj", "[4,144,136]", down);
  header = R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})" + header + "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  const std::uint64_t header_bytes = header.size();
  std::memcpy(length.data(), &header_bytes, 8);
  // Not overwritten in place: `expected` still maps the old file.
  std::filesystem::remove(path_ / "model.safetensors");
  test::write_file(path_ / "model.safetensors", length + header + data);
  expect_equal(load(), expected);
}

// As transformers writes MiniMax-M3 unless it is asked for the published format.
TEST_F(DamagedCheckpoint, SharedExpertWithGateAndUpInOneTensor) {
  write("minimax-m3");
  const Checkpoint original = Checkpoint::open(path_);
  const int layer = original.moe_layers().front();
  const MoeWeights expected = original.load_layer(layer);
  std::vector<std::byte> gate;
  rewrite([&](TensorInfo& info, std::vector<std::byte>& bytes) {
    if (info.name.ends_with("shared_experts.gate_proj.weight")) {
      gate = bytes;
      return false;
    }
    const std::size_t at = info.name.find("shared_experts.up_proj");
    if (at == std::string::npos) return true;
    EXPECT_FALSE(gate.empty()) << "gate_proj is written before up_proj";
    bytes.insert(bytes.begin(), gate.begin(), gate.end());
    info.shape[0] *= 2;
    info.name.replace(at, std::string::npos, "shared_experts.gate_up_proj.weight");
    return true;
  });
  expect_equal(Checkpoint::open(path_).load_layer(layer), expected);
}

TEST(GenerateWeights, HasTheStatisticsOfRealWeights) {
  const LayerSpec spec = testing::spec_of(512, 384, 4, 2);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    SCOPED_TRACE(to_string(dtype));
    const MoeWeights weights = generate_weights(spec, dtype, 5);
    std::set<double> firsts;
    for (const FfnWeights& expert : weights.experts) {
      for (const MatrixView& view : {expert.gate, expert.up, expert.down}) {
        firsts.insert(element(view, 0, 0) + 1000 * element(view, 1, 1));
        double sum = 0, squares = 0, fourth = 0;
        for (std::int64_t r = 0; r < view.rows; ++r)
          for (std::int64_t c = 0; c < view.cols; ++c) {
            const double x = element(view, r, c) * std::sqrt(static_cast<double>(view.cols));
            sum += x;
            squares += x * x;
            fourth += x * x * x * x;
          }
        const double n = static_cast<double>(view.rows * view.cols);
        // Five standard errors of the mean; the FP8 scales spread the variance by up to a tenth.
        EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
        EXPECT_NEAR(squares / n, 1, dtype == DType::kF8E4M3 ? 0.3 : 0.02);
        // Irwin-Hall of four has 2.7 where the normal distribution has 3; mixing scales within 25 %
        // raises it by a factor of at most 1.28.
        const double kurtosis = fourth / squares / squares * n;
        EXPECT_GT(kurtosis, 2.5);
        EXPECT_LT(kurtosis, dtype == DType::kF8E4M3 ? 1.28 * 2.75 : 2.85);
      }
    }
    EXPECT_EQ(firsts.size(), 12u);
    const MoeWeights again = generate_weights(spec, dtype, 5, {.num_threads = 1});
    expect_equal(again, weights);
    EXPECT_NE(element(generate_weights(spec, dtype, 6).router, 0, 0),
              element(weights.router, 0, 0));
    EXPECT_GE(generated_bytes(spec, dtype), touched_weight_bytes(weights, {1, 1, 1, 1}));
  }
}

TEST(GenerateWeights, HashTableRowsAreDistinctExperts) {
  LayerSpec spec = testing::spec_of(16, 8, 12, 12);
  spec.routing.method = RoutingMethod::kHash;
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 1, {.vocabulary = 1000});
  for (std::int64_t r = 0; r < 1000; ++r) {
    std::set<double> ids;
    for (std::int64_t c = 0; c < 12; ++c) ids.insert(element(weights.hash_table, r, c));
    ASSERT_EQ(ids.size(), 12u);
    ASSERT_EQ(*ids.begin(), 0);
    ASSERT_EQ(*ids.rbegin(), 11);
  }
}

TEST(GenerateWeights, RefusesWhatDoesNotFit) {
  LayerSpec spec = testing::spec_of(1 << 16, 1 << 16, 4096, 2);
  EXPECT_ERROR(generate_weights(spec, DType::kF32, 0), kCapacityExceeded, "need ", "are available",
               "fewer experts");
  EXPECT_ERROR(generate_weights(spec, DType::kI32, 0), kInvalidArgument, "i32", "bf16");
  spec.top_k = 0;
  EXPECT_ERROR(generate_weights(spec, DType::kF32, 0), kInvalidArgument, "top_k is 0");
}

TEST(WriteCheckpoint, RefusesToOverwriteAndLeavesNothingBehind) {
  const test::TemporaryDirectory directory;
  const ModelEntry& olmoe = find_model("olmoe");
  const WriteOptions options{
      .overrides = {.num_moe_layers = 1, .num_experts = 8, .hidden = 16, .intermediate = 8}};
  test::write_file(directory / "file", "x");
  EXPECT_ERROR(write_checkpoint(olmoe, directory.path(), options), kInvalidArgument,
               "already exists", "another path");
  EXPECT_ERROR(write_checkpoint(olmoe, directory / "file", options), kInvalidArgument,
               "already exists");
  std::filesystem::create_directory(directory / "empty");
  write_checkpoint(olmoe, directory / "empty", options);
  EXPECT_EQ(Checkpoint::open(directory / "empty").layer_spec(0).num_experts, 8);
  EXPECT_ERROR(
      write_checkpoint(find_model("gpt-oss-20b"), directory / "oss", {.dtype = DType::kF8E4M3}),
      kUnsupported, "gpt_oss", "bf16");
  EXPECT_ERROR(write_checkpoint(find_model("kimi-k2"), directory / "kimi", {.dtype = DType::kF32}),
               kCapacityExceeded, "bytes of disk");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 2);
}

TEST(ValidateWeights, NamesWhatDoesNotServeTheSpec) {
  LayerSpec spec = testing::spec_of(16, 8, 2, 1);
  spec.shared_intermediate = 8;
  const MoeWeights good = generate_weights(spec, DType::kBF16, 0);
  validate(spec, good);
  const auto expect_bad = [&](auto change, ErrorCode code,
                              std::initializer_list<const char*> parts) {
    MoeWeights weights = good;
    change(weights);
    test::expect_error([&] { validate(spec, weights); }, code, parts);
  };
  expect_bad([](MoeWeights& w) { w.experts.pop_back(); }, ErrorCode::kShapeMismatch,
             {"1 experts", "has 2"});
  expect_bad([](MoeWeights& w) { w.experts[1].up = {}; }, ErrorCode::kMissingTensor,
             {"experts[1].up is empty", "[8, 16]"});
  expect_bad([](MoeWeights& w) { w.experts[0].down.rows = 3; }, ErrorCode::kShapeMismatch,
             {"experts[0].down is [3, 8]", "[16, 8]"});
  expect_bad([](MoeWeights& w) { w.router.dtype = DType::kI32; }, ErrorCode::kDTypeMismatch,
             {"router is i32"});
  expect_bad([](MoeWeights& w) { w.experts[0].up.dtype = DType::kF8E4M3; },
             ErrorCode::kMissingTensor, {"experts[0].up", "without scales"});
  expect_bad([](MoeWeights& w) { w.shared = {}; }, ErrorCode::kMissingTensor, {"shared.gate"});
  expect_bad(
      [](MoeWeights& w) {
        w.experts[0].up_bias = {&w, DType::kF32, 8, 1};
      },
      ErrorCode::kShapeMismatch, {"experts[0].up_bias", "no such bias"});
  validate(spec, [&] {
    MoeWeights weights = good;
    weights.router = {};
    return weights;
  }());

  const std::uint64_t expert_bytes = 3 * 16 * 8 * 2;
  EXPECT_EQ(touched_weight_bytes(good, {0, 0}), expert_bytes);
  EXPECT_EQ(touched_weight_bytes(good, {0, 7}), 2 * expert_bytes);
  EXPECT_ERROR(touched_weight_bytes(good, {1}), kInvalidArgument, "1 entries");
}

TEST(TouchedWeightBytes, CountsScalesAndBiases) {
  LayerSpec spec = testing::spec_of(256, 130, 1, 1);
  EXPECT_EQ(touched_weight_bytes(generate_weights(spec, DType::kF8E4M3, 0), {1}),
            3u * (256 * 130 + 4 * 4));
  spec.expert_bias = true;
  EXPECT_EQ(touched_weight_bytes(generate_weights(spec, DType::kF32, 0), {1}),
            4u * (3 * 256 * 130 + 2 * 130 + 256));
}

}  // namespace
}  // namespace switchyard
