#include "model/tensor_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/convert.h"
#include "base/join.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", join(shape, ", "));
}

Located TensorReader::require(const std::string& name) const {
  const Located found = index_.find(name);
  if (!found.info) index_.missing(name);
  if (checked_.insert(found.file).second) found.file->mapping().require_size();
  return found;
}

void TensorReader::prefetch(const std::string& name) const {
  const Located found = require(name);
  found.file->will_need(*found.info);
}

void TensorReader::require_whole_files() const {
  for (const SafetensorsFile* const file : checked_) file->mapping().require_size();
}

void TensorReader::bad_shape(const Located& tensor, const std::string& expected) const {
  throw Error(
      ErrorCode::kShapeMismatch,
      fmt::format("{}: tensor '{}' has shape {}, but config.json asks for {}; the config and "
                  "the weights are of different models",
                  printable(tensor.file->path()), printable(tensor.info->name),
                  shape_text(tensor.info->shape), expected));
}

DType TensorReader::float_dtype(const Located& tensor) const {
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
                    printable(tensor.file->path()), printable(tensor.info->name), printable(name)));
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: tensor '{}' has dtype {}{}, which this build cannot compute with; "
                          "convert the checkpoint to bf16",
                          printable(tensor.file->path()), printable(tensor.info->name),
                          printable(name), method_text()));
}

std::string TensorReader::method_text() const {
  const std::string& method = quantization_.method;
  return method.empty() ? "" : fmt::format(" (quantization {})", printable(method));
}

bool TensorReader::is_aligned(const Located& tensor, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(tensor.file->data(*tensor.info)) % alignment == 0;
}

const std::byte* TensorReader::aligned_data(const Located& tensor, std::size_t alignment) {
  const std::byte* data = tensor.file->data(*tensor.info);
  if (is_aligned(tensor, alignment)) return data;
  const std::size_t bytes = static_cast<std::size_t>(tensor.info->bytes());
  owner_->copies.emplace_back(new std::byte[bytes]);
  std::memcpy(owner_->copies.back().get(), data, bytes);
  return owner_->copies.back().get();
}

// Scales of FP8 weights, as fp32. `values` of them.
const float* TensorReader::scale_values(const Located& tensor, std::size_t count) {
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

// True for bytes of two codes each, as DeepSeek-V4 has them.
bool TensorReader::is_bytes(const Located& tensor) {
  return tensor.info && (tensor.info->dtype == "I8" || tensor.info->dtype == "U8");
}

// The scale tensor of weight `name`; families differ in its suffix.
Located TensorReader::find_scale(const std::string& name) const {
  std::string stem = name;
  constexpr std::string_view kWeight = ".weight";
  const bool is_module = stem.size() > kWeight.size() && stem.ends_with(kWeight);
  for (const char* suffix : {"_scale_inv", "_scale"})
    if (const Located found = index_.find(name + suffix); found.info) return found;
  if (is_module) {
    stem.resize(stem.size() - kWeight.size());
    if (const Located found = index_.find(stem + ".scale"); found.info) return found;
  }
  // Modules of bytes are DeepSeek-V4's, which has no other name.
  index_.missing(is_module && is_bytes(index_.find(name)) ? stem + ".scale" : name + "_scale_inv");
}

void TensorReader::attach_scale(MatrixView& view, const std::string& name, std::int64_t matrices,
                                std::int64_t index) {
  if (!quantization_.problem.empty())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}; tensor '{}' is FP8", quantization_.problem, printable(name)));
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

// `shape` is that of the scales of one matrix, which is stored as [rows, cols].
TensorReader::ScaleGrid TensorReader::scale_grid(const Located& tensor,
                                                 const std::vector<std::int64_t>& shape,
                                                 std::int64_t rows, std::int64_t cols,
                                                 bool transposed) const {
  using Shape = std::vector<std::int64_t>;
  const std::int64_t block_rows = quantization_.block_rows;
  const std::int64_t block_cols = quantization_.block_cols;
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

const float* TensorReader::transposed_scales(const Located& tensor, const float* scales,
                                             std::int64_t matrices, const ScaleGrid& grid) {
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

MatrixView TensorReader::matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
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

VectorView TensorReader::vector(const std::string& name, std::int64_t size) {
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

MatrixView TensorReader::half(const MatrixView& both, int which, bool interleaved) {
  MatrixView view = both;
  view.rows = both.rows / 2;
  const std::int64_t first = which * (interleaved ? 1 : view.rows);
  const std::int64_t step = interleaved ? 2 : 1;
  view.data = both.row(first);
  view.row_stride = step * both.row_stride;
  if (both.scale) take_scales(view, both, first, step);
  return view;
}

// Gives `view`, the rows first, first + step, ... of `both`, its part of the scales and zero
// points. Scales are copied where a block of `both` begins in the middle of one of the view.
void TensorReader::take_scales(MatrixView& view, const MatrixView& both, std::int64_t first,
                               std::int64_t step) {
  const std::int64_t block = both.scale_rows;
  if (block >= both.rows) {
    view.scale_rows = view.rows;
    return;
  }
  if (block == 1 || (step == 1 && first % block == 0)) {
    view.scale = both.row_scale(first);
    if (both.zero != nullptr) view.zero = both.zero + first / block * both.scale_stride;
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
    std::copy_n(both.f32_scale() + (first + r * view.scale_rows * step) / block * both.scale_stride,
                columns, copied + r * columns);
  view.scale = copied;
  view.scale_stride = columns;
}

// ------------------------------------------------------------------------------- four-bit weights

const FourBitFormat& TensorReader::four_bit_format(const std::string& name) const {
  if (!quantization_.problem.empty())
    throw Error(ErrorCode::kUnsupported, fmt::format("{}; tensor '{}' is of four bits",
                                                     quantization_.problem, printable(name)));
  if (quantization_.four_bit) return *quantization_.four_bit;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format(
          "{}: tensor '{}' looks like weights of four bits{}, of which "
          "config.json says nothing; use the config.json of the same checkpoint, or convert "
          "the weights to bf16",
          printable(index_.directory()), printable(name), method_text()));
}

const FourBitFormat& TensorReader::mxfp4_format(const std::string& name) const {
  const FourBitFormat& format = four_bit_format(name);
  if (format == FourBitFormat{}) return format;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: tensor '{}' is in a layout of MXFP4, but config.json tells of {} in "
                          "groups of {}{}; use the config.json of the same checkpoint",
                          printable(index_.directory()), printable(name), to_string(format.dtype),
                          format.group, format.has_zero ? " with zero points" : ""));
}

void TensorReader::require_shape(const Located& tensor,
                                 const std::vector<std::int64_t>& shape) const {
  if (tensor.info->shape != shape) bad_shape(tensor, shape_text(shape));
}

void TensorReader::require_type(const Located& tensor,
                                std::initializer_list<std::string_view> types) const {
  if (std::find(types.begin(), types.end(), tensor.info->dtype) != types.end()) return;
  throw Error(
      ErrorCode::kDTypeMismatch,
      fmt::format("{}: tensor '{}' has dtype {}{}; expected {}; this is not the weight that "
                  "config.json describes",
                  printable(tensor.file->path()), printable(tensor.info->name),
                  printable(tensor.info->dtype), method_text(), join(types, " or ")));
}

MatrixView TensorReader::four_bit_view(std::int64_t rows, std::int64_t cols,
                                       const FourBitFormat& format) const {
  if (cols % format.group != 0)
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{}: weights [{}, {}] have {} columns, which is no multiple of the "
                            "groups of {} that config.json tells",
                            printable(index_.directory()), rows, cols, cols, format.group));
  MatrixView view;
  view.dtype = format.dtype;
  view.rows = rows;
  view.cols = cols;
  view.row_stride = cols;
  view.scale_rows = 1;
  view.scale_cols = format.group;
  view.scale_stride = cols / format.group;
  view.scale_dtype = format.dtype == DType::kF4E2M1 ? DType::kF8E8M0 : DType::kBF16;
  return view;
}

// DeepSeek-V4: "<module>.weight" holds two columns a byte, and "<module>.scale" exponents.
MatrixView TensorReader::native_mxfp4(const std::string& module, std::int64_t rows,
                                      std::int64_t cols) {
  const std::string name = module + ".weight";
  MatrixView view = four_bit_view(rows, cols, mxfp4_format(name));
  const Located codes = require(name);
  require_shape(codes, {rows, cols / 2});
  view.data = codes.file->data(*codes.info);
  const Located scales = find_scale(name);
  require_type(scales, {"F8_E8M0", "U8"});
  require_shape(scales, {rows, view.scale_stride});
  view.scale = scales.file->data(*scales.info);
  return view;
}

// compressed-tensors: "<module>.weight_packed" holds MXFP4 two columns a byte, or INT4 eight
// columns a word, which in memory is the same.
MatrixView TensorReader::compressed(const std::string& module, std::int64_t rows,
                                    std::int64_t cols) {
  const std::string name = module + ".weight_packed";
  const FourBitFormat& format = four_bit_format(name);
  MatrixView view = four_bit_view(rows, cols, format);
  const bool is_float = format.dtype == DType::kF4E2M1;
  if (index_.has(module + ".weight_g_idx"))
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: there is '{}.weight_g_idx': columns in the order of activations "
                            "are not supported; quantise without actorder",
                            printable(index_.directory()), printable(module)));
  require_stored_shape(module + ".weight_shape", rows, cols);
  const Located codes = require(name);
  require_type(codes, is_float ? std::initializer_list<std::string_view>{"U8"}
                               : std::initializer_list<std::string_view>{"I32"});
  require_shape(codes, {rows, is_float ? cols / 2 : cols / 8});
  view.data = codes.file->data(*codes.info);
  const Located scales = require(module + ".weight_scale");
  if (is_float) {
    require_type(scales, {"U8", "F8_E8M0"});
  } else {
    require_type(scales, {"BF16", "F16", "F32"});
    view.scale_dtype = *dtype_from_name(scales.info->dtype);
  }
  require_shape(scales, {rows, view.scale_stride});
  view.scale = aligned_data(scales, size_of(view.scale_dtype));
  const std::string zeros = module + ".weight_zero_point";
  if (format.has_zero) {
    view.zero = zero_points(zeros, rows, view.scale_stride);
  } else if (index_.has(zeros)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: there is '{}', but config.json says that weights are symmetric; "
                            "use the config.json of the same checkpoint",
                            printable(index_.directory()), printable(zeros)));
  }
  return view;
}

void TensorReader::require_stored_shape(const std::string& name, std::int64_t rows,
                                        std::int64_t cols) const {
  if (!index_.has(name)) return;
  const Located tensor = require(name);
  require_type(tensor, {"I64", "I32"});
  require_shape(tensor, {2});
  std::vector<std::int64_t> stored(2);
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const std::byte* const data = tensor.file->data(*tensor.info);
    if (tensor.info->dtype == "I64") {
      std::memcpy(&stored[i], data + i * sizeof(std::int64_t), sizeof(std::int64_t));
    } else {
      std::int32_t value = 0;
      std::memcpy(&value, data + i * sizeof value, sizeof value);
      stored[i] = value;
    }
  }
  if (stored == std::vector<std::int64_t>{rows, cols}) return;
  throw Error(
      ErrorCode::kShapeMismatch,
      fmt::format("{}: tensor '{}' says that the weights are {}, but config.json asks for "
                  "[{}, {}]; the config and the weights are of different models",
                  printable(tensor.file->path()), printable(name), shape_text(stored), rows, cols));
}

const std::uint8_t* TensorReader::zero_points(const std::string& name, std::int64_t rows,
                                              std::int64_t groups) {
  const Located tensor = require(name);
  require_type(tensor, {"I32"});
  require_shape(tensor, {(rows + 7) / 8, groups});
  owner_->copies.emplace_back(new std::byte[static_cast<std::size_t>(rows * groups)]);
  std::byte* const copy = owner_->copies.back().get();
  const std::byte* const words = tensor.file->data(*tensor.info);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t g = 0; g < groups; ++g) {
      // Row r is in bits 4 (r % 8) of a word, which is little-endian.
      const auto byte = static_cast<int>(words[(r / 8 * groups + g) * 4 + r % 8 / 2]);
      copy[r * groups + g] = static_cast<std::byte>(r % 2 == 0 ? byte & 15 : byte >> 4);
    }
  }
  return reinterpret_cast<const std::uint8_t*>(copy);
}

bool TensorReader::has_module(const std::string& module) const {
  return index_.has(module + ".weight") || index_.has(module + ".weight_packed");
}

void TensorReader::prefetch_module(const std::string& module) const {
  const std::string packed = module + ".weight_packed";
  prefetch(index_.has(packed) ? packed : module + ".weight");
}

MatrixView TensorReader::module(const std::string& module, std::int64_t rows, std::int64_t cols) {
  if (index_.has(module + ".weight_packed")) return compressed(module, rows, cols);
  const std::string name = module + ".weight";
  if (is_bytes(require(name))) return native_mxfp4(module, rows, cols);
  return matrix(name, rows, cols);
}

MatrixView TensorReader::blocks(const std::string& name, std::int64_t count, std::int64_t index,
                                std::int64_t rows, std::int64_t cols) {
  MatrixView view = four_bit_view(rows, cols, mxfp4_format(name + "_blocks"));
  const Located codes = require(name + "_blocks");
  require_type(codes, {"U8"});
  const std::int64_t groups = view.scale_stride;
  require_shape(codes, {count, rows, groups, kMxGroup / 2});
  view.data = codes.file->data(*codes.info) + index * rows * cols / 2;
  const Located scales = require(name + "_scales");
  require_type(scales, {"U8", "F8_E8M0"});
  require_shape(scales, {count, rows, groups});
  view.scale = scales.file->data(*scales.info) + index * rows * groups;
  return view;
}

std::optional<DType> TensorReader::type_of_module(const std::string& module) const {
  const Located weight = index_.find(module + ".weight");
  if (is_bytes(weight) || index_.has(module + ".weight_packed")) {
    return quantization_.four_bit ? std::optional(quantization_.four_bit->dtype) : std::nullopt;
  }
  return weight.info ? dtype_from_name(weight.info->dtype) : std::nullopt;
}

std::optional<DType> TensorReader::type_of_packed(const std::string& name) const {
  if (has_blocks(name)) return DType::kF4E2M1;
  const Located tensor = index_.find(name);
  return tensor.info ? dtype_from_name(tensor.info->dtype) : std::nullopt;
}

}  // namespace switchyard
