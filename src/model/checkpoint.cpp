#include <fmt/core.h>
#include <sys/stat.h>

#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>

#include "base/convert.h"
#include "base/file_error.h"
#include "base/join.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/tensor_names.h"
#include "switchyard/error.h"
#include "switchyard/weights.h"

namespace switchyard {
namespace {

struct Located {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

// What MoeWeights::owner points to: the mapped files, and the few small tensors that had to be
// copied (scales that are not fp32, tensors that the file leaves misaligned).
struct LayerOwner {
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  std::vector<std::unique_ptr<float[]>> scales;
  std::vector<std::unique_ptr<std::byte[]>> copies;
};

// A published config.json has some kilobytes.
constexpr std::uint64_t kMostConfigBytes = std::uint64_t{16} << 20;
// The index of the largest models names a hundred thousand tensors and has 10 MB.
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{128} << 20;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", join(shape, ", "));
}

}  // namespace

struct Checkpoint::State {
  std::filesystem::path directory;
  ModelConfig config;
  DType dtype = DType::kBF16;
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  std::unordered_map<std::string_view, Located> tensors;

  Located find(std::string_view name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? Located{} : found->second;
  }
  bool has(std::string_view name) const { return find(name).info != nullptr; }

  [[noreturn]] void missing(const std::string& name) const {
    std::vector<std::string_view> names;
    names.reserve(tensors.size());
    for (const auto& [key, value] : tensors) names.push_back(key);
    throw Error(
        ErrorCode::kMissingTensor,
        fmt::format("{}: no tensor '{}'; download the missing shard or correct config.json{}",
                    printable(directory), printable(name), closest_names(name, names)));
  }

  void add(const std::shared_ptr<const SafetensorsFile>& file) {
    files.push_back(file);
    for (const TensorInfo& info : file->header().tensors) {
      const auto [existing, inserted] = tensors.try_emplace(info.name, Located{file.get(), &info});
      if (!inserted)
        throw Error(ErrorCode::kInvalidFile,
                    fmt::format("tensor '{}' is in both {} and {}; remove the copy that does not "
                                "belong to this checkpoint",
                                printable(info.name), printable(existing->second.file->path()),
                                printable(file->path())));
    }
  }

  void add_files() {
    const std::filesystem::path index = directory / "model.safetensors.index.json";
    if (!is_absent(index)) {
      const auto weight_map =
          parse_safetensors_index(read_text(index, kMostIndexBytes), index.string());
      std::set<std::string> shards;
      for (const auto& [tensor, shard] : weight_map) {
        if (!shards.insert(shard).second) continue;
        if (is_absent(directory / shard))
          throw Error(ErrorCode::kInvalidFile,
                      fmt::format("{}: names shard '{}' (for tensor '{}'), which is not there; "
                                  "download it",
                                  printable(index), printable(shard), printable(tensor)));
        add(SafetensorsFile::open(directory / shard));
      }
      for (const auto& [tensor, shard] : weight_map)
        if (!has(tensor))
          throw Error(ErrorCode::kInvalidFile,
                      fmt::format("{}: says that tensor '{}' is in '{}', which does not have it; "
                                  "download both again",
                                  printable(index), printable(tensor), printable(shard)));
      return;
    }
    std::set<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      if (entry.path().extension() == ".safetensors") paths.insert(entry.path());
    if (paths.empty())
      throw Error(
          ErrorCode::kInvalidFile,
          fmt::format("{}: has no *.safetensors file; convert the checkpoint to safetensors "
                      "(transformers' save_pretrained does)",
                      printable(directory)));
    for (const std::filesystem::path& path : paths) add(SafetensorsFile::open(path));
  }
};

namespace {

// Reads one layer of one checkpoint. State is a template parameter only because Checkpoint::State
// is private.
template <class State>
class LayerLoader {
 public:
  LayerLoader(const State& state, int layer, const LayerSpec& spec)
      : state_(state), layer_(layer), spec_(spec), owner_(std::make_shared<LayerOwner>()) {
    owner_->files = state.files;
  }

  // The dtype of the first expert's up projection, if the checkpoint has one that can be read.
  std::optional<DType> expert_dtype() {
    if (!locate()) return std::nullopt;
    for (const std::string& name : expert_candidates())
      if (const Located found = state_.find(name); found.info)
        return dtype_from_name(found.info->dtype);
    return std::nullopt;
  }

  MoeWeights load() {
    if (!locate())
      state_.missing(base(published_names(state_.config).stack, published_names(state_.config)) +
                     published_names(state_.config).router);
    MoeWeights weights;
    weights.router = matrix(base_ + names_->router, spec_.num_experts, spec_.hidden);
    prefetch(base_ + names_->router);
    if (spec_.router_bias)
      weights.router_bias = vector(base_ + names_->router_bias, spec_.num_experts);
    if (spec_.routing.has_correction_bias) weights.correction_bias = correction_bias();
    if (spec_.routing.method == RoutingMethod::kHash) weights.hash_table = hash_table();
    load_experts(weights);
    load_shared(weights);
    weights.owner = owner_;
    // A file that was cut meanwhile may have left zeros in what was copied from it.
    for (const SafetensorsFile* const file : checked_) file->require_whole();
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
      if (!state_.has(candidate + names.router)) return false;
      names_ = &names;
      base_ = candidate;
      return true;
    };
    for (const TensorNames* names : tensor_names(state_.config.family)) {
      const std::string_view stack = names->stack;
      const std::size_t dot = stack.rfind('.', stack.size() - 2);
      const std::string_view stem = dot == std::string_view::npos ? stack : stack.substr(dot + 1);
      for (const char* prefix : kPrefixes)
        if (try_stack(fmt::format("{}{}", prefix, stem), *names)) return true;
    }
    return false;
  }

  std::vector<std::string> expert_candidates() const {
    std::vector<std::string> names;
    if (names_->up) names.push_back(base_ + expert_name(names_->up, 0) + ".weight");
    names.push_back(base_ + names_->packed_gate_up);
    return names;
  }

  Located require(const std::string& name) const {
    const Located found = state_.find(name);
    if (!found.info) state_.missing(name);
    if (checked_.insert(found.file).second) found.file->require_whole();
    return found;
  }

  void prefetch(const std::string& name) const {
    const Located found = require(name);
    found.file->will_need(*found.info);
  }

  [[noreturn]] void bad_shape(const Located& tensor, const std::string& expected) const {
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("{}: tensor '{}' has shape {}, but config.json asks for {}; the config and "
                    "the weights are of different models",
                    printable(tensor.file->path()), printable(tensor.info->name),
                    shape_text(tensor.info->shape), expected));
  }

  // `tensor` as a weight or bias dtype.
  DType float_dtype(const Located& tensor) const {
    const std::string& name = tensor.info->dtype;
    const std::optional<DType> dtype = dtype_from_name(name);
    if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
        dtype == DType::kF8E4M3)
      return *dtype;
    if (name == "BOOL" || name == "I64" || name == "U64" || name == "I16" || name == "U16")
      throw Error(
          ErrorCode::kDTypeMismatch,
          fmt::format("{}: tensor '{}' has dtype {}, but a weight must be F32, F16, BF16 or "
                      "F8_E4M3; this is not the weight that config.json describes",
                      printable(tensor.file->path()), printable(tensor.info->name),
                      printable(name)));
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: tensor '{}' has dtype {}{}, which this build cannot compute with; "
                            "convert the checkpoint to bf16",
                            printable(tensor.file->path()), printable(tensor.info->name),
                            printable(name), method_text()));
  }

  std::string method_text() const {
    const std::string& method = state_.config.quantization.method;
    return method.empty() ? "" : fmt::format(" (quantization {})", printable(method));
  }

  static bool is_aligned(const Located& tensor, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(tensor.file->data(*tensor.info)) % alignment == 0;
  }

  // The tensor's data, aligned for its dtype: mapped if the file aligns it, else copied.
  const std::byte* aligned_data(const Located& tensor, std::size_t alignment) {
    const std::byte* data = tensor.file->data(*tensor.info);
    if (is_aligned(tensor, alignment)) return data;
    const std::size_t bytes = static_cast<std::size_t>(tensor.info->bytes());
    owner_->copies.emplace_back(new std::byte[bytes]);
    std::memcpy(owner_->copies.back().get(), data, bytes);
    return owner_->copies.back().get();
  }

  // Scales of FP8 weights, as fp32. `values` of them.
  const float* scale_values(const Located& tensor, std::size_t count) {
    const std::string& dtype = tensor.info->dtype;
    if (dtype == "F32" && is_aligned(tensor, alignof(float)))
      return reinterpret_cast<const float*>(tensor.file->data(*tensor.info));
    // Packed experts share one tensor of scales; it is converted for the first of them.
    if (const auto known = converted_.find(tensor.info); known != converted_.end())
      return known->second;
    owner_->scales.emplace_back(new float[count]);
    float* scales = owner_->scales.back().get();
    converted_[tensor.info] = scales;
    const std::byte* data = tensor.file->data(*tensor.info);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t half = 0;
      if (dtype == "BF16" || dtype == "F16") {
        std::memcpy(&half, data + i * sizeof(half), sizeof(half));
        scales[i] = dtype == "BF16" ? bf16_to_f32(half) : f16_to_f32(half);
      } else if (dtype == "F32") {
        std::memcpy(&scales[i], data + i * sizeof(float), sizeof(float));
      } else if (dtype == "F8_E8M0") {
        scales[i] = f8e8m0_to_f32(static_cast<std::uint8_t>(data[i]));
      } else {
        throw Error(ErrorCode::kDTypeMismatch,
                    fmt::format("{}: scale '{}' has dtype {}, expected F32, BF16, F16 or F8_E8M0; "
                                "convert it to F32",
                                printable(tensor.file->path()), printable(tensor.info->name),
                                printable(dtype)));
      }
    }
    return scales;
  }

  // The scale tensor of weight `name`; families differ in its suffix.
  Located find_scale(const std::string& name) const {
    std::string stem = name;
    constexpr std::string_view kWeight = ".weight";
    const bool is_module = stem.size() > kWeight.size() && stem.ends_with(kWeight);
    for (const char* suffix : {"_scale_inv", "_scale"})
      if (const Located found = state_.find(name + suffix); found.info) return found;
    if (is_module) {
      stem.resize(stem.size() - kWeight.size());
      if (const Located found = state_.find(stem + ".scale"); found.info) return found;
    }
    state_.missing(name + "_scale_inv");
  }

  // Attaches the scales of `matrices` consecutive [rows, cols] FP8 matrices stored as one tensor,
  // and returns the view of number `index`.
  void attach_scale(MatrixView& view, const std::string& name, std::int64_t matrices,
                    std::int64_t index) {
    const Located tensor = find_scale(name);
    std::vector<std::int64_t> shape = tensor.info->shape;
    if (matrices > 1 || (shape.size() == 3 && shape[0] == 1)) {
      if (shape.empty() || shape[0] != matrices)
        bad_shape(tensor, fmt::format("{} leading entries, one for each expert", matrices));
      shape.erase(shape.begin());
    }
    const Quantization& quantization = state_.config.quantization;
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    const std::int64_t block_rows = quantization.block_rows;
    const std::int64_t block_cols = quantization.block_cols;
    const bool is_blocked = block_rows > 0 && shape.size() == 2 &&
                            shape[0] == (view.rows + block_rows - 1) / block_rows &&
                            shape[1] == (view.cols + block_cols - 1) / block_cols;
    if (is_blocked) {
      view.scale_rows = block_rows;
      view.scale_cols = block_cols;
      view.scale_stride = shape[1];
    } else if (count == 1) {
      view.scale_rows = view.rows;
      view.scale_cols = view.cols;
      view.scale_stride = 1;
    } else if (count == view.rows && shape[0] == view.rows) {
      view.scale_rows = 1;
      view.scale_cols = view.cols;
      view.scale_stride = 1;
    } else {
      bad_shape(tensor,
                block_rows > 0
                    ? fmt::format("one scale for each {} x {} block of [{}, {}]", block_rows,
                                  block_cols, view.rows, view.cols)
                    : fmt::format("one scale for [{}, {}] or for each of its rows (there is no "
                                  "quantization_config.weight_block_size)",
                                  view.rows, view.cols));
    }
    view.scale = scale_values(tensor, static_cast<std::size_t>(matrices * count)) + index * count;
  }

  MatrixView matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const Located tensor = require(name);
    MatrixView view;
    view.dtype = float_dtype(tensor);
    if (tensor.info->shape != std::vector<std::int64_t>{rows, cols})
      bad_shape(tensor, fmt::format("[{}, {}]", rows, cols));
    view.data = aligned_data(tensor, size_of(view.dtype));
    view.rows = rows;
    view.cols = cols;
    view.row_stride = cols;
    if (view.dtype == DType::kF8E4M3) attach_scale(view, name, 1, 0);
    return view;
  }

  VectorView vector(const std::string& name, std::int64_t size) {
    const Located tensor = require(name);
    VectorView view;
    view.dtype = float_dtype(tensor);
    const std::vector<std::int64_t>& shape = tensor.info->shape;
    if (shape != std::vector<std::int64_t>{size} && shape != std::vector<std::int64_t>{1, size})
      bad_shape(tensor, fmt::format("[{}]", size));
    if (view.dtype == DType::kF8E4M3)
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("{}: tensor '{}' has dtype F8_E4M3, but a vector must be F32, F16 or "
                              "BF16; convert it",
                              printable(tensor.file->path()), name));
    view.data = aligned_data(tensor, size_of(view.dtype));
    view.size = size;
    prefetch(name);
    return view;
  }

  // MiniMax keeps the bias in the block, DeepSeek in the gate, re-saved checkpoints in either.
  VectorView correction_bias() {
    for (const char* name :
         {names_->correction_bias, "gate.e_score_correction_bias", "e_score_correction_bias"})
      if (state_.has(base_ + name)) return vector(base_ + name, spec_.num_experts);
    state_.missing(base_ + names_->correction_bias);
  }

  MatrixView hash_table() {
    const std::string name = base_ + names_->hash_table;
    const Located tensor = require(name);
    const std::optional<DType> dtype = dtype_from_name(tensor.info->dtype);
    if (dtype != DType::kI64 && dtype != DType::kI32)
      throw Error(
          ErrorCode::kDTypeMismatch,
          fmt::format("{}: tensor '{}' has dtype {}, expected I64 or I32 expert ids; download "
                      "the checkpoint again",
                      printable(tensor.file->path()), name, printable(tensor.info->dtype)));
    const std::vector<std::int64_t>& shape = tensor.info->shape;
    const int vocabulary = state_.config.vocab_size;
    if (shape.size() != 2 || shape[1] != spec_.top_k || (vocabulary > 0 && shape[0] != vocabulary))
      bad_shape(tensor, fmt::format("[{}, {}]",
                                    vocabulary > 0 ? fmt::format("{}", vocabulary) : "vocabulary",
                                    spec_.top_k));
    MatrixView view;
    view.dtype = *dtype;
    view.data = aligned_data(tensor, size_of(*dtype));
    view.rows = shape[0];
    view.cols = shape[1];
    view.row_stride = shape[1];
    prefetch(name);
    return view;
  }

  void load_experts(MoeWeights& weights) {
    weights.experts.resize(static_cast<std::size_t>(spec_.num_experts));
    if (names_->up && state_.has(base_ + expert_name(names_->up, 0) + ".weight")) {
      load_separate_experts(weights);
    } else if (state_.has(base_ + names_->packed_gate_up)) {
      names_->packing == Packing::kSeparateTransposed ? load_dbrx_experts(weights)
                                                      : load_packed_experts(weights);
    } else {
      refuse_quantized();
      state_.missing(expert_candidates().front());
    }
  }

  // Quantised formats rename the tensors, so they would otherwise look like missing ones.
  void refuse_quantized() const {
    std::vector<std::string> stems = {base_ + names_->packed_gate_up};
    if (names_->up) stems.push_back(base_ + expert_name(names_->up, 0));
    for (const std::string& stem : stems)
      for (const char* suffix :
           {"_blocks", ".weight_packed", ".qweight", "_packed", ".weight_blocks"})
        if (state_.has(stem + suffix))
          throw Error(
              ErrorCode::kUnsupported,
              fmt::format("{}: the experts are stored as '{}'{}, a 4-bit format that this build "
                          "cannot compute with; convert the checkpoint to bf16",
                          printable(state_.directory), stem + suffix, method_text()));
  }

  void load_separate_experts(MoeWeights& weights) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    for (int e = 0; e < spec_.num_experts; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      const std::string gate = base_ + expert_name(names_->gate, e);
      const std::string up = base_ + expert_name(names_->up, e);
      const std::string down = base_ + expert_name(names_->down, e);
      if (spec_.activation.gated) expert.gate = matrix(gate + ".weight", i, h);
      expert.up = matrix(up + ".weight", i, h);
      expert.down = matrix(down + ".weight", h, i);
      if (!spec_.expert_bias) continue;
      if (spec_.activation.gated) expert.gate_bias = vector(gate + ".bias", i);
      expert.up_bias = vector(up + ".bias", i);
      expert.down_bias = vector(down + ".bias", h);
    }
  }

  void load_packed_experts(MoeWeights& weights) {
    const std::int64_t e_count = spec_.num_experts;
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const bool by_rows = names_->packing == Packing::kRows;
    const bool interleaved = names_->packing == Packing::kInterleavedColumns;
    const std::string gate_up_name = base_ + names_->packed_gate_up;
    const std::string down_name = base_ + names_->packed_down;
    const Located gate_up = require(gate_up_name);
    const Located down = require(down_name);
    const DType dtype = float_dtype(gate_up);
    const DType down_dtype = float_dtype(down);
    using Shape = std::vector<std::int64_t>;
    if (gate_up.info->shape != (by_rows ? Shape{e_count, 2 * i, h} : Shape{e_count, h, 2 * i}))
      bad_shape(gate_up, by_rows ? fmt::format("[{}, {}, {}]", e_count, 2 * i, h)
                                 : fmt::format("[{}, {}, {}]", e_count, h, 2 * i));
    if (down.info->shape != (by_rows ? Shape{e_count, h, i} : Shape{e_count, i, h}))
      bad_shape(down, by_rows ? fmt::format("[{}, {}, {}]", e_count, h, i)
                              : fmt::format("[{}, {}, {}]", e_count, i, h));
    if (!by_rows && (dtype == DType::kF8E4M3 || down_dtype == DType::kF8E4M3))
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}: '{}' is FP8 packed by columns, whose scales have no fixed layout; "
                      "store the experts one by one or convert them to bf16",
                      printable(gate_up.file->path()), gate_up_name));
    const std::byte* gate_up_data = aligned_data(gate_up, size_of(dtype));
    const std::byte* down_data = aligned_data(down, size_of(down_dtype));

    for (std::int64_t e = 0; e < e_count; ++e) {
      FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
      MatrixView both;
      both.dtype = dtype;
      both.data = gate_up_data + static_cast<std::size_t>(e * 2 * i * h) * size_of(dtype);
      both.rows = 2 * i;
      both.cols = h;
      both.row_stride = by_rows ? h : 1;
      both.col_stride = by_rows ? 1 : 2 * i;
      if (dtype == DType::kF8E4M3) attach_scale(both, gate_up_name, e_count, e);
      expert.gate = half(both, 0, interleaved, gate_up);
      expert.up = half(both, 1, interleaved, gate_up);

      expert.down.dtype = down_dtype;
      expert.down.data = down_data + static_cast<std::size_t>(e * i * h) * size_of(down_dtype);
      expert.down.rows = h;
      expert.down.cols = i;
      expert.down.row_stride = by_rows ? i : 1;
      expert.down.col_stride = by_rows ? 1 : h;
      if (down_dtype == DType::kF8E4M3) attach_scale(expert.down, down_name, e_count, e);
    }
    if (spec_.expert_bias) load_packed_biases(weights, interleaved);
  }

  // Half 0 (gate) or 1 (up) of the rows of a packed gate_up matrix.
  MatrixView half(const MatrixView& both, int which, bool interleaved,
                  const Located& tensor) const {
    MatrixView view = both;
    view.rows = both.rows / 2;
    const std::int64_t first_row = which * (interleaved ? 1 : view.rows);
    view.data = both.row(first_row);
    if (interleaved) view.row_stride = 2 * both.row_stride;
    if (!both.scale) return view;
    if (both.scale_rows == both.rows) {
      view.scale_rows = view.rows;
    } else if (which == 1) {
      if (view.rows % both.scale_rows != 0)
        throw Error(
            ErrorCode::kUnsupported,
            fmt::format("{}: '{}' has scale blocks of {} rows that straddle gate and up ({} "
                        "rows each); store the experts one by one",
                        printable(tensor.file->path()), printable(tensor.info->name),
                        both.scale_rows, view.rows));
      view.scale += view.rows / both.scale_rows * both.scale_stride;
    }
    return view;
  }

  void load_packed_biases(MoeWeights& weights, bool interleaved) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const Located gate_up = require(base_ + names_->packed_gate_up + "_bias");
    const Located down = require(base_ + names_->packed_down + "_bias");
    const std::int64_t e_count = spec_.num_experts;
    if (gate_up.info->shape != std::vector<std::int64_t>{e_count, 2 * i})
      bad_shape(gate_up, fmt::format("[{}, {}]", e_count, 2 * i));
    if (down.info->shape != std::vector<std::int64_t>{e_count, h})
      bad_shape(down, fmt::format("[{}, {}]", e_count, h));
    const DType dtype = float_dtype(gate_up);
    const DType down_dtype = float_dtype(down);
    const std::byte* gate_up_data = aligned_data(gate_up, size_of(dtype));
    const std::byte* down_data = aligned_data(down, size_of(down_dtype));
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

  // A matrix that will be sliced by expert, which block scales would not survive.
  MatrixView packed_matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const Located tensor = require(name);
    if (float_dtype(tensor) == DType::kF8E4M3)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: '{}' packs all experts in FP8, which has no published layout of "
                              "scales; convert it to bf16",
                              printable(tensor.file->path()), name));
    return matrix(name, rows, cols);
  }

  void load_shared(MoeWeights& weights) {
    if (spec_.shared_intermediate == 0) return;
    const std::string gate = shared_name(names_->shared_gate);
    const std::string up = shared_name(names_->shared_up);
    const std::string down = shared_name(names_->shared_down);
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.shared_intermediate;
    const std::string gate_up = shared_name(names_->packed_shared_gate_up);
    if (spec_.activation.gated && !state_.has(up) && state_.has(gate_up)) {
      const MatrixView both = matrix(gate_up, 2 * i, h);
      weights.shared.gate = half(both, 0, false, require(gate_up));
      weights.shared.up = half(both, 1, false, require(gate_up));
      prefetch(gate_up);
    } else {
      if (spec_.activation.gated) {
        weights.shared.gate = matrix(gate, i, h);
        prefetch(gate);
      }
      weights.shared.up = matrix(up, i, h);
      prefetch(up);
    }
    weights.shared.down = matrix(down, h, i);
    prefetch(down);
    if (spec_.shared_sigmoid_gate)
      weights.shared_gate = vector(base_ + names_->shared_sigmoid_gate, spec_.hidden);
  }

  std::string shared_name(const char* name) const { return base_ + name + ".weight"; }

  const State& state_;
  const int layer_;
  const LayerSpec& spec_;
  const std::shared_ptr<LayerOwner> owner_;
  const TensorNames* names_ = nullptr;
  std::string base_;
  std::unordered_map<const TensorInfo*, const float*> converted_;
  mutable std::set<const SafetensorsFile*> checked_;  // that have not become shorter
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
  state->directory = directory;
  require_directory(directory);
  const std::filesystem::path config = directory / "config.json";
  if (is_absent(config))
    throw Error(ErrorCode::kInvalidConfig,
                fmt::format("{}: there is no config.json; download it with the weights",
                            printable(directory)));
  state->config = parse_config(read_text(config, kMostConfigBytes), config.string());
  try {
    state->add_files();
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(ErrorCode::kSystem, fmt::format("{}: cannot be listed: {}; check the permissions",
                                                printable(directory), error.code().message()));
  }
  const int first = state->config.moe_layers().front();
  const LayerSpec& spec = *state->config.layers[static_cast<std::size_t>(first)];
  state->dtype = LayerLoader(*state, first, spec).expert_dtype().value_or(state->config.dtype);

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
  return LayerLoader(*state_, layer, spec).load();
}

}  // namespace switchyard
