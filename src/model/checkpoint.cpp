#include "switchyard/checkpoint.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/file_error.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "model/config.h"
#include "model/tensor_index.h"
#include "model/tensor_names.h"
#include "model/tensor_reader.h"
#include "switchyard/error.h"
#include "switchyard/weights.h"

namespace switchyard {
namespace {

// A published config.json has some kilobytes.
constexpr std::uint64_t kMostConfigBytes = std::uint64_t{16} << 20;

}  // namespace

struct Checkpoint::State {
  ModelConfig config;
  DType dtype = DType::kBF16;
  TensorIndex index;
};

namespace {

// Reads one layer of one checkpoint.
class LayerLoader {
 public:
  LayerLoader(const ModelConfig& config, const TensorIndex& index, int layer, const LayerSpec& spec)
      : config_(config),
        index_(index),
        layer_(layer),
        spec_(spec),
        reader_(index, config.quantization) {}

  // The dtype of the first expert's up projection, if the checkpoint has one that can be read.
  std::optional<DType> expert_dtype() {
    if (!locate()) return std::nullopt;
    if (const std::optional<std::string> up = first_up()) {
      if (reader_.has_module(*up)) return reader_.type_of_module(*up);
    }
    return reader_.type_of_packed(base_ + names_->packed_gate_up);
  }

  bool has_shared_experts() {
    return locate() && (reader_.has_module(shared_name(names_->shared_up)) ||
                        reader_.has_module(shared_name(names_->packed_shared_gate_up)));
  }
  bool has_correction_bias() { return locate() && find_correction_bias().has_value(); }

  MoeWeights load() {
    if (!locate())
      index_.missing(base(published_names(config_).stack, published_names(config_)) +
                     published_names(config_).router);
    MoeWeights weights;
    weights.router = reader_.matrix(base_ + names_->router, spec_.num_experts, spec_.hidden);
    reader_.prefetch(base_ + names_->router);
    if (spec_.router_bias)
      weights.router_bias = reader_.vector(base_ + names_->router_bias, spec_.num_experts);
    if (spec_.routing.has_correction_bias) weights.correction_bias = correction_bias();
    if (spec_.routing.method == RoutingMethod::kHash) weights.hash_table = hash_table();
    load_experts(weights);
    load_shared(weights);
    weights.owner = reader_.owner();
    reader_.require_whole_files();
    validate(spec_, weights);
    return weights;
  }

 private:
  std::string base(std::string_view stack, const TensorNames& names) const {
    return fmt::format("{}{}{}", stack, layer_, names.block);
  }

  bool locate() {
    const auto try_stack = [&](const std::string& stack, const TensorNames& names) {
      const std::string candidate = base(stack, names);
      if (!index_.has(candidate + names.router)) return false;
      names_ = &names;
      base_ = candidate;
      return true;
    };
    for (const TensorNames* names : tensor_names(config_.family)) {
      const std::string_view stack = names->stack;
      const std::size_t dot = stack.rfind('.', stack.size() - 2);
      const std::string_view stem = dot == std::string_view::npos ? stack : stack.substr(dot + 1);
      for (const char* prefix : kPrefixes)
        if (try_stack(fmt::format("{}{}", prefix, stem), *names)) return true;
    }
    return false;
  }

  // The first expert's up projection, where the family has a module for each.
  std::optional<std::string> first_up() const {
    if (names_->up == nullptr) return std::nullopt;
    return base_ + expert_name(names_->up, 0);
  }

  // MiniMax keeps the bias in the block, DeepSeek in the gate, re-saved checkpoints in either.
  std::optional<std::string> find_correction_bias() const {
    for (const char* name :
         {names_->correction_bias, "gate.e_score_correction_bias", "e_score_correction_bias"})
      if (index_.has(base_ + name)) return base_ + name;
    return std::nullopt;
  }

  VectorView correction_bias() {
    const std::optional<std::string> name = find_correction_bias();
    if (!name) index_.missing(base_ + names_->correction_bias);
    return reader_.vector(*name, spec_.num_experts);
  }

  MatrixView hash_table() {
    const std::string name = base_ + names_->hash_table;
    const Located tensor = reader_.require(name);
    const std::optional<DType> dtype = dtype_from_name(tensor.info->dtype);
    if (dtype != DType::kI64 && dtype != DType::kI32)
      throw Error(
          ErrorCode::kDTypeMismatch,
          fmt::format("{}: tensor '{}' has dtype {}, expected I64 or I32 expert ids; download "
                      "the checkpoint again",
                      printable(tensor.file->path()), name, printable(tensor.info->dtype)));
    const std::vector<std::int64_t>& shape = tensor.info->shape;
    const int vocabulary = config_.vocab_size;
    if (shape.size() != 2 || shape[1] != spec_.top_k || (vocabulary > 0 && shape[0] != vocabulary))
      reader_.bad_shape(
          tensor,
          fmt::format("[{}, {}]", vocabulary > 0 ? fmt::format("{}", vocabulary) : "vocabulary",
                      spec_.top_k));
    MatrixView view;
    view.dtype = *dtype;
    view.data = reader_.aligned_data(tensor, size_of(*dtype));
    view.rows = shape[0];
    view.cols = shape[1];
    view.row_stride = shape[1];
    reader_.prefetch(name);
    return view;
  }

  void load_experts(MoeWeights& weights) {
    weights.experts.resize(static_cast<std::size_t>(spec_.num_experts));
    const std::string packed = base_ + names_->packed_gate_up;
    if (first_up() && reader_.has_module(*first_up())) {
      load_separate_experts(weights);
    } else if (reader_.has_blocks(packed)) {
      load_block_experts(weights);
    } else if (index_.has(packed)) {
      names_->packing == Packing::kSeparateTransposed ? load_dbrx_experts(weights)
                                                      : load_packed_experts(weights);
    } else {
      refuse_quantized();
      index_.missing(first_up() ? *first_up() + ".weight" : packed);
    }
  }

  // Quantised formats rename the tensors, so they would otherwise look like missing ones.
  void refuse_quantized() const {
    std::vector<std::string> stems = {base_ + names_->packed_gate_up};
    if (names_->up) stems.push_back(base_ + expert_name(names_->up, 0));
    for (const std::string& stem : stems)
      for (const char* suffix : {".qweight", "_packed", ".weight_blocks"})
        if (index_.has(stem + suffix))
          throw Error(
              ErrorCode::kUnsupported,
              fmt::format("{}: the experts are stored as '{}'{}, a format that this build cannot "
                          "read; convert the checkpoint to bf16",
                          printable(index_.directory()), stem + suffix, reader_.method_text()));
  }

  void load_separate_experts(MoeWeights& weights) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    for (int e = 0; e < spec_.num_experts; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      const std::string gate = base_ + expert_name(names_->gate, e);
      const std::string up = base_ + expert_name(names_->up, e);
      const std::string down = base_ + expert_name(names_->down, e);
      if (spec_.activation.gated) expert.gate = reader_.module(gate, i, h);
      expert.up = reader_.module(up, i, h);
      expert.down = reader_.module(down, h, i);
      if (!spec_.expert_bias) continue;
      if (spec_.activation.gated) expert.gate_bias = reader_.vector(gate + ".bias", i);
      expert.up_bias = reader_.vector(up + ".bias", i);
      expert.down_bias = reader_.vector(down + ".bias", h);
    }
  }

  // Gate's and up's rows stand in turn, as in gpt-oss.
  void load_block_experts(MoeWeights& weights) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    for (std::int64_t e = 0; e < spec_.num_experts; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      const MatrixView both =
          reader_.blocks(base_ + names_->packed_gate_up, spec_.num_experts, e, 2 * i, h);
      expert.gate = reader_.half(both, 0, true);
      expert.up = reader_.half(both, 1, true);
      expert.down = reader_.blocks(base_ + names_->packed_down, spec_.num_experts, e, h, i);
    }
    if (spec_.expert_bias) load_packed_biases(weights, true);
  }

  void load_packed_experts(MoeWeights& weights) {
    const std::int64_t e_count = spec_.num_experts;
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const bool interleaved = names_->packing == Packing::kInterleavedColumns;
    const std::string gate_up_name = base_ + names_->packed_gate_up;
    const std::string down_name = base_ + names_->packed_down;
    const Located gate_up = reader_.require(gate_up_name);
    const Located down = reader_.require(down_name);
    const DType dtype = reader_.float_dtype(gate_up);
    const DType down_dtype = reader_.float_dtype(down);
    const bool by_rows = is_packed_by_rows(gate_up, down);
    const std::byte* gate_up_data = reader_.aligned_data(gate_up, size_of(dtype));
    const std::byte* down_data = reader_.aligned_data(down, size_of(down_dtype));

    for (std::int64_t e = 0; e < e_count; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      MatrixView both;
      both.dtype = dtype;
      both.data = gate_up_data + static_cast<std::size_t>(e * 2 * i * h) * size_of(dtype);
      both.rows = 2 * i;
      both.cols = h;
      both.row_stride = by_rows ? h : 1;
      both.col_stride = by_rows ? 1 : 2 * i;
      if (dtype == DType::kF8E4M3) reader_.attach_scale(both, gate_up_name, e_count, e);
      expert.gate = reader_.half(both, 0, interleaved);
      expert.up = reader_.half(both, 1, interleaved);

      expert.down.dtype = down_dtype;
      expert.down.data = down_data + static_cast<std::size_t>(e * i * h) * size_of(down_dtype);
      expert.down.rows = h;
      expert.down.cols = i;
      expert.down.row_stride = by_rows ? i : 1;
      expert.down.col_stride = by_rows ? 1 : h;
      if (down_dtype == DType::kF8E4M3) reader_.attach_scale(expert.down, down_name, e_count, e);
    }
    if (spec_.expert_bias) load_packed_biases(weights, interleaved);
  }

  // True if experts are packed as [E, 2I, H] and [E, H, I], false if as [E, H, 2I] and [E, I, H].
  // The shapes of both tensors together always tell: 2I = H and I = H cannot both hold.
  bool is_packed_by_rows(const Located& gate_up, const Located& down) const {
    using Shape = std::vector<std::int64_t>;
    const std::int64_t e = spec_.num_experts;
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const Shape& first = gate_up.info->shape;
    const Shape& second = down.info->shape;
    if (first == Shape{e, 2 * i, h} && second == Shape{e, h, i}) return true;
    if (first == Shape{e, h, 2 * i} && second == Shape{e, i, h}) return false;
    const bool first_fits = first == Shape{e, 2 * i, h} || first == Shape{e, h, 2 * i};
    const bool second_fits = second == Shape{e, h, i} || second == Shape{e, i, h};
    if (!first_fits)
      reader_.bad_shape(gate_up, fmt::format("[{0}, {1}, {2}] or [{0}, {2}, {1}]", e, 2 * i, h));
    if (!second_fits)
      reader_.bad_shape(down, fmt::format("[{0}, {1}, {2}] or [{0}, {2}, {1}]", e, h, i));
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{}: tensor '{}' has shape {}, but '{}' has {}: one of them is "
                            "transposed; save both as [{}, {}, {}] and [{}, {}, {}]",
                            printable(gate_up.file->path()), printable(gate_up.info->name),
                            shape_text(first), printable(down.info->name), shape_text(second), e,
                            2 * i, h, e, h, i));
  }

  void load_packed_biases(MoeWeights& weights, bool interleaved) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const Located gate_up = reader_.require(base_ + names_->packed_gate_up + "_bias");
    const Located down = reader_.require(base_ + names_->packed_down + "_bias");
    const std::int64_t e_count = spec_.num_experts;
    if (gate_up.info->shape != std::vector<std::int64_t>{e_count, 2 * i})
      reader_.bad_shape(gate_up, fmt::format("[{}, {}]", e_count, 2 * i));
    if (down.info->shape != std::vector<std::int64_t>{e_count, h})
      reader_.bad_shape(down, fmt::format("[{}, {}]", e_count, h));
    const DType dtype = reader_.float_dtype(gate_up);
    const DType down_dtype = reader_.float_dtype(down);
    const std::byte* gate_up_data = reader_.aligned_data(gate_up, size_of(dtype));
    const std::byte* down_data = reader_.aligned_data(down, size_of(down_dtype));
    const auto slice = [](const std::byte* data, DType type, std::int64_t first, std::int64_t size,
                          std::int64_t stride) {
      return VectorView{data + static_cast<std::size_t>(first) * size_of(type), type, size, stride};
    };
    for (std::int64_t e = 0; e < e_count; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      const std::int64_t first = e * 2 * i;
      const std::int64_t stride = interleaved ? 2 : 1;
      expert.gate_bias = slice(gate_up_data, dtype, first, i, stride);
      expert.up_bias = slice(gate_up_data, dtype, first + (interleaved ? 1 : i), i, stride);
      expert.down_bias = slice(down_data, down_dtype, e * h, h, 1);
    }
  }

  void load_dbrx_experts(MoeWeights& weights) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const std::int64_t rows = i * spec_.num_experts;
    const MatrixView gate = packed_matrix(base_ + names_->packed_gate_up, rows, h);
    const MatrixView up = packed_matrix(base_ + names_->packed_up, rows, h);
    const MatrixView down = packed_matrix(base_ + names_->packed_down, rows, h);
    for (std::int64_t e = 0; e < spec_.num_experts; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      expert.gate = gate;
      expert.gate.data = gate.row(e * i);
      expert.gate.rows = i;
      expert.up = up;
      expert.up.data = up.row(e * i);
      expert.up.rows = i;
      expert.down = down;
      expert.down.data = down.row(e * i);
      expert.down.rows = h;
      expert.down.cols = i;
      expert.down.row_stride = 1;
      expert.down.col_stride = h;
    }
  }

  // Returns a matrix that will be sliced by expert, which block scales would not survive.
  MatrixView packed_matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const Located tensor = reader_.require(name);
    if (reader_.float_dtype(tensor) == DType::kF8E4M3)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: '{}' packs all experts in FP8, which has no published layout of "
                              "scales; convert it to bf16",
                              printable(tensor.file->path()), name));
    return reader_.matrix(name, rows, cols);
  }

  void load_shared(MoeWeights& weights) {
    if (spec_.shared_intermediate == 0) return;
    const std::string gate = shared_name(names_->shared_gate);
    const std::string up = shared_name(names_->shared_up);
    const std::string down = shared_name(names_->shared_down);
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.shared_intermediate;
    const std::string gate_up = shared_name(names_->packed_shared_gate_up);
    // Every pass needs all of the shared expert.
    const auto read = [&](const std::string& module, std::int64_t rows, std::int64_t cols) {
      const MatrixView view = reader_.module(module, rows, cols);
      reader_.prefetch_module(module);
      return view;
    };
    if (spec_.activation.gated && !reader_.has_module(up) && reader_.has_module(gate_up)) {
      const MatrixView both = read(gate_up, 2 * i, h);
      weights.shared.gate = reader_.half(both, 0, false);
      weights.shared.up = reader_.half(both, 1, false);
    } else {
      if (spec_.activation.gated) weights.shared.gate = read(gate, i, h);
      weights.shared.up = read(up, i, h);
    }
    weights.shared.down = read(down, h, i);
    if (spec_.shared_sigmoid_gate)
      weights.shared_gate = reader_.vector(base_ + names_->shared_sigmoid_gate, spec_.hidden);
  }

  std::string shared_name(const char* name) const { return base_ + name; }

  const ModelConfig& config_;
  const TensorIndex& index_;
  const int layer_;
  const LayerSpec& spec_;
  TensorReader reader_;
  const TensorNames* names_ = nullptr;
  std::string base_;
};

void require_directory(const std::filesystem::path& directory) {
  struct stat status = {};
  if (::stat(directory.c_str(), &status) != 0 && !is_absent(directory))
    throw_file_error(directory, "stat");
  if (!S_ISDIR(status.st_mode))
    throw Error(
        ErrorCode::kSystem,
        fmt::format("{}: is not a directory; pass the directory that holds config.json and the "
                    "*.safetensors files",
                    printable(directory)));
}

}  // namespace

Checkpoint Checkpoint::open(const std::filesystem::path& directory) {
  auto state = std::make_shared<State>();
  require_directory(directory);
  const std::filesystem::path config = directory / "config.json";
  if (is_absent(config))
    throw Error(ErrorCode::kInvalidConfig,
                fmt::format("{}: there is no config.json; download it with the weights",
                            printable(directory)));
  state->config = parse_config(read_text(config, kMostConfigBytes), config.string());
  try {
    state->index.open(directory);
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(ErrorCode::kSystem, fmt::format("{}: cannot be listed: {}; check the permissions",
                                                printable(directory), error.code().message()));
  }
  const int first = state->config.moe_layers().front();
  const LayerSpec spec = *state->config.layers[static_cast<std::size_t>(first)];
  LayerLoader loader(state->config, state->index, first, spec);
  state->dtype = loader.expert_dtype().value_or(state->config.dtype);
  const OptionalParts optional = state->config.optional;
  if (optional.shared_experts && !loader.has_shared_experts())
    for (std::optional<LayerSpec>& layer : state->config.layers)
      if (layer) layer->shared_intermediate = 0;
  if (optional.correction_bias && !loader.has_correction_bias())
    for (std::optional<LayerSpec>& layer : state->config.layers)
      if (layer) layer->routing.has_correction_bias = false;

  Checkpoint checkpoint;
  checkpoint.state_ = std::move(state);
  return checkpoint;
}

const std::string& Checkpoint::model_type() const { return state_->config.model_type; }
int Checkpoint::num_layers() const { return state_->config.num_layers; }
std::vector<int> Checkpoint::moe_layers() const { return state_->config.moe_layers(); }
DType Checkpoint::dtype() const { return state_->dtype; }

LayerSpec Checkpoint::layer_spec(int layer) const {
  const std::vector<std::optional<LayerSpec>>& layers = state_->config.layers;
  if (layer < 0 || static_cast<std::size_t>(layer) >= layers.size() ||
      !layers[static_cast<std::size_t>(layer)]) {
    const std::vector<int> moe = moe_layers();
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("layer {} of {} is not an MoE layer; its {} MoE layers lie between {} and {}",
                    layer, state_->config.model_type, moe.size(), moe.front(), moe.back()));
  }
  return *layers[static_cast<std::size_t>(layer)];
}

MoeWeights Checkpoint::load_layer(int layer) const {
  const LayerSpec spec = layer_spec(layer);
  return LayerLoader(state_->config, state_->index, layer, spec).load();
}

}  // namespace switchyard
