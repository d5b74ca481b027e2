#include "switchyard/checkpoint.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <numeric>
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

// The memory behind MoeWeights::owner: the mapped files, and the few small tensors that had to be
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
    // transformers' name for a checkpoint in one file. Others beside it, such as
    // consolidated.safetensors, hold the same tensors once more.
    if (const std::filesystem::path whole = directory / "model.safetensors"; !is_absent(whole))
      return add(SafetensorsFile::open(whole));
    std::set<std::filesystem::path> paths;
    std::set<std::string> others;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      const std::filesystem::path extension = entry.path().extension();
      if (extension == ".safetensors") paths.insert(entry.path());
      for (const char* const other : {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"})
        if (extension == other) others.insert(entry.path().filename().string());
    }
    if (paths.empty()) throw_no_weights(others);
    for (const std::filesystem::path& path : paths) add(SafetensorsFile::open(path));
  }

  [[noreturn]] void throw_no_weights(const std::set<std::string>& others) const {
    if (others.empty())
      throw Error(
          ErrorCode::kInvalidFile,
          fmt::format("{}: has no *.safetensors file; download the weights", printable(directory)));
    throw Error(
        ErrorCode::kInvalidFile,
        fmt::format("{}: has no *.safetensors file, only {}{}, which is another format; download "
                    "the safetensors files, or load the model in transformers and save it with "
                    "save_pretrained()",
                    printable(directory), printable(*others.begin()),
                    others.size() > 1 ? fmt::format(" and {} more", others.size() - 1) : ""));
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

  bool has_shared_experts() {
    return locate() && (state_.has(shared_name(names_->shared_up)) ||
                        state_.has(shared_name(names_->packed_shared_gate_up)));
  }
  bool has_correction_bias() { return locate() && find_correction_bias().has_value(); }

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
    for (const SafetensorsFile* const file : checked_) file->mapping().require_size();
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
    if (checked_.insert(found.file).second) found.file->mapping().require_size();
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

  // Attaches the scales of `matrices` consecutive FP8 matrices stored as one tensor, to the view of
  // number `index`. A view whose col_stride is not 1 is stored transposed, as are its scales.
  void attach_scale(MatrixView& view, const std::string& name, std::int64_t matrices,
                    std::int64_t index) {
    const Quantization& quantization = state_.config.quantization;
    if (!quantization.problem.empty())
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}; tensor '{}' is FP8", quantization.problem, printable(name)));
    const Located tensor = find_scale(name);
    std::vector<std::int64_t> shape = tensor.info->shape;
    if (matrices > 1 || (shape.size() == 3 && shape[0] == 1)) {
      if (shape.empty() || shape[0] != matrices)
        bad_shape(tensor, fmt::format("{} leading entries, one for each expert", matrices));
      shape.erase(shape.begin());
    }
    const bool transposed = view.col_stride != 1;
    const std::int64_t rows = transposed ? view.cols : view.rows;  // as stored
    const std::int64_t cols = transposed ? view.rows : view.cols;
    const ScaleGrid grid = scale_grid(tensor, shape, rows, cols, transposed);
    view.scale_rows = transposed ? grid.block_cols : grid.block_rows;
    view.scale_cols = transposed ? grid.block_rows : grid.block_cols;
    view.scale_stride = transposed ? grid.rows : grid.cols;
    const float* scales =
        scale_values(tensor, static_cast<std::size_t>(matrices * grid.rows * grid.cols));
    if (transposed && grid.rows > 1 && grid.cols > 1)
      scales = transposed_scales(tensor, scales, matrices, grid);
    view.scale = scales + index * grid.rows * grid.cols;
  }

  // How the scales of a matrix are laid out: rows x cols of them, each of a block of the matrix.
  struct ScaleGrid {
    std::int64_t rows, cols, block_rows, block_cols;
  };

  // `shape` is that of the scales of one matrix, which is stored as [rows, cols].
  ScaleGrid scale_grid(const Located& tensor, const std::vector<std::int64_t>& shape,
                       std::int64_t rows, std::int64_t cols, bool transposed) const {
    using Shape = std::vector<std::int64_t>;
    const std::int64_t block_rows = state_.config.quantization.block_rows;
    const std::int64_t block_cols = state_.config.quantization.block_cols;
    if (block_rows > 0) {
      const std::int64_t down = (rows + block_rows - 1) / block_rows;
      const std::int64_t across = (cols + block_cols - 1) / block_cols;
      if (shape == Shape{down, across}) return {down, across, block_rows, block_cols};
    }
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    if (count == 1) return {1, 1, rows, cols};
    // A scale for each output of the matrix, which is a row unless it is stored transposed.
    if (!transposed && (shape == Shape{rows} || shape == Shape{rows, 1})) return {rows, 1, 1, cols};
    if (transposed && (shape == Shape{cols} || shape == Shape{1, cols})) return {1, cols, rows, 1};
    bad_shape(tensor,
              block_rows > 0
                  ? fmt::format("one scale for each {} x {} block of [{}, {}]", block_rows,
                                block_cols, rows, cols)
                  : fmt::format("one scale for [{}, {}] or for each of its {} (config.json tells "
                                "no size of blocks)",
                                rows, cols, transposed ? "columns" : "rows"));
  }

  const float* transposed_scales(const Located& tensor, const float* scales, std::int64_t matrices,
                                 const ScaleGrid& grid) {
    if (const auto known = transposed_.find(tensor.info); known != transposed_.end())
      return known->second;
    const std::int64_t count = grid.rows * grid.cols;
    owner_->scales.emplace_back(new float[static_cast<std::size_t>(matrices * count)]);
    float* const result = owner_->scales.back().get();
    for (std::int64_t m = 0; m < matrices; ++m)
      for (std::int64_t r = 0; r < grid.rows; ++r)
        for (std::int64_t c = 0; c < grid.cols; ++c)
          result[m * count + c * grid.rows + r] = scales[m * count + r * grid.cols + c];
    transposed_[tensor.info] = result;
    return result;
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
  std::optional<std::string> find_correction_bias() const {
    for (const char* name :
         {names_->correction_bias, "gate.e_score_correction_bias", "e_score_correction_bias"})
      if (state_.has(base_ + name)) return base_ + name;
    return std::nullopt;
  }

  VectorView correction_bias() {
    const std::optional<std::string> name = find_correction_bias();
    if (!name) state_.missing(base_ + names_->correction_bias);
    return vector(*name, spec_.num_experts);
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
    const bool interleaved = names_->packing == Packing::kInterleavedColumns;
    const std::string gate_up_name = base_ + names_->packed_gate_up;
    const std::string down_name = base_ + names_->packed_down;
    const Located gate_up = require(gate_up_name);
    const Located down = require(down_name);
    const DType dtype = float_dtype(gate_up);
    const DType down_dtype = float_dtype(down);
    const bool by_rows = is_packed_by_rows(gate_up, down);
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
      expert.gate = half(both, 0, interleaved);
      expert.up = half(both, 1, interleaved);

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
      bad_shape(gate_up, fmt::format("[{0}, {1}, {2}] or [{0}, {2}, {1}]", e, 2 * i, h));
    if (!second_fits) bad_shape(down, fmt::format("[{0}, {1}, {2}] or [{0}, {2}, {1}]", e, h, i));
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{}: tensor '{}' has shape {}, but '{}' has {}: one of them is "
                            "transposed; save both as [{}, {}, {}] and [{}, {}, {}]",
                            printable(gate_up.file->path()), printable(gate_up.info->name),
                            shape_text(first), printable(down.info->name), shape_text(second), e,
                            2 * i, h, e, h, i));
  }

  // Returns half 0 (gate) or 1 (up) of the rows of a packed gate_up matrix.
  MatrixView half(const MatrixView& both, int which, bool interleaved) {
    MatrixView view = both;
    view.rows = both.rows / 2;
    const std::int64_t first = which * (interleaved ? 1 : view.rows);
    const std::int64_t step = interleaved ? 2 : 1;
    view.data = both.row(first);
    view.row_stride = step * both.row_stride;
    if (both.scale) take_scales(view, both, first, step);
    return view;
  }

  // Gives `view`, the rows first, first + step, ... of `both`, its part of the scales. They are
  // copied where a block of `both` begins in the middle of one of the view.
  void take_scales(MatrixView& view, const MatrixView& both, std::int64_t first,
                   std::int64_t step) {
    const std::int64_t block = both.scale_rows;
    if (block >= both.rows) {
      view.scale_rows = view.rows;
      return;
    }
    if (block == 1 || (step == 1 && first % block == 0)) {
      view.scale = both.row_scale(first);
      if (block == 1) view.scale_stride = step * both.scale_stride;
      return;
    }
    if (step == 2 && block % 2 == 0) {
      view.scale_rows = block / 2;
      return;
    }
    // So many rows share a block in `both` wherever they begin.
    view.scale_rows = step == 1 ? std::gcd(block, first) : 1;
    const std::int64_t count = (view.rows + view.scale_rows - 1) / view.scale_rows;
    const std::int64_t columns = (both.cols + both.scale_cols - 1) / both.scale_cols;
    owner_->scales.emplace_back(new float[static_cast<std::size_t>(count * columns)]);
    float* const copied = owner_->scales.back().get();
    for (std::int64_t r = 0; r < count; ++r)
      std::copy_n(
          both.f32_scale() + (first + r * view.scale_rows * step) / block * both.scale_stride,
          columns, copied + r * columns);
    view.scale = copied;
    view.scale_stride = columns;
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

  // Returns a matrix that will be sliced by expert, which block scales would not survive.
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
      weights.shared.gate = half(both, 0, false);
      weights.shared.up = half(both, 1, false);
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
  std::unordered_map<const TensorInfo*, const float*> converted_, transposed_;  // scales
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
  const LayerSpec spec = *state->config.layers[static_cast<std::size_t>(first)];
  LayerLoader loader(*state, first, spec);
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
  return LayerLoader(*state_, layer, spec).load();
}

}  // namespace switchyard
