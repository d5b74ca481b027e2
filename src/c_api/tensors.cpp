#include "c_api/tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "base/convert.h"
#include "base/limits.h"
#include "switchyard/error.h"

namespace switchyard::c_api {
namespace {

const char* name_of(sy_device_type type) {
  switch (type) {
    case SY_CPU: return "host";
    case SY_CUDA: return "CUDA";
    default: return "unknown";
  }
}

bool is_four_bit(const sy_tensor& tensor) {
  return tensor.dtype == SY_F4_E2M1 || tensor.dtype == SY_U4;
}

std::span<const std::int64_t> shape_of(const sy_tensor& tensor) {
  return {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a == 0 ? 0 : (a - 1) / b + 1; }

// [n, rows, cols] of one expert.
MatrixView slice(const sy_tensor& tensor, DType dtype, std::int64_t expert) {
  MatrixView view;
  // Elements that are not there have no address, and an empty view would mean an absent tensor.
  view.data =
      static_cast<const std::byte*>(tensor.data) + bytes_of(dtype, expert * tensor.strides[0]);
  view.dtype = dtype;
  view.rows = tensor.shape[1];
  view.cols = tensor.shape[2];
  view.row_stride = tensor.strides[1];
  view.col_stride = tensor.strides[2];
  return view;
}

// Two elements of a four-bit matrix share a byte, so only columns may be at odd places.
void require_whole_bytes(const std::string& name, const sy_tensor& weight) {
  const auto refuse = [&](const char* of, std::int64_t stride, const char* must) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} {} has {} {} elements apart, but two elements share a byte; {}",
                            name, shape_text(weight), of, stride, must));
  };
  if (weight.shape[2] > 1 && weight.strides[2] != 1) {
    refuse("columns", weight.strides[2], "pass rows that are contiguous");
  }
  if (weight.shape[1] > 1 && weight.strides[1] % 2 != 0) {
    refuse("rows", weight.strides[1], "use an even number of columns");
  }
  if (weight.shape[0] > 1 && weight.strides[0] % 2 != 0) {
    refuse("experts", weight.strides[0], "let each begin at a whole byte");
  }
}

// Scales of a projection. Those of four-bit weights are used where they are, in their own type;
// those of others where they are if they are f32 with contiguous rows, else copied.
class Scales {
 public:
  Scales(const std::string& name, const sy_matrices& matrices, sy_device_type device_type,
         ScaleCopies& copies)
      : matrices_(matrices) {
    const sy_tensor& scale = matrices.scale;
    if (!is_given(scale)) return;
    check_tensor(name.c_str(), scale, 3, device_type);
    const bool four_bit = is_four_bit(matrices.weight);
    require_type(name, scale.dtype, four_bit);
    if (matrices.scale_rows < 1 || matrices.scale_cols < 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is for blocks of {} x {}; both must be at least 1", name,
                              matrices.scale_rows, matrices.scale_cols));
    }
    const std::int64_t rows = ceil_div(matrices.weight.shape[1], matrices.scale_rows);
    const std::int64_t cols = ceil_div(matrices.weight.shape[2], matrices.scale_cols);
    if (scale.shape[0] != matrices.weight.shape[0] || scale.shape[1] != rows ||
        scale.shape[2] != cols) {
      throw Error(
          ErrorCode::kShapeMismatch,
          fmt::format("{} is {}, but weights {} in blocks of {} x {} need [{}, {}, {}]", name,
                      shape_text(scale), shape_text(matrices.weight), matrices.scale_rows,
                      matrices.scale_cols, matrices.weight.shape[0], rows, cols));
    }
    const bool contiguous = scale.strides[2] == 1 || cols <= 1;
    if (four_bit) {
      dtype_ = scale.dtype == SY_F8_E8M0 ? DType::kF8E8M0 : dtype_of(name.c_str(), scale.dtype);
      if (contiguous) return;
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{} has columns {} elements apart, but scales of four-bit weights are "
                      "read in place; pass rows that are contiguous",
                      name, scale.strides[2]));
    }
    if (scale.dtype == SY_F32 && contiguous) return;
    if (scale.device_type != SY_CPU) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} is in device memory and not f32 with contiguous rows; convert it "
                              "to that",
                              name));
    }
    std::vector<float>& copy =
        copies.emplace_back(static_cast<std::size_t>(scale.shape[0] * rows * cols));
    const DType dtype = scale.dtype == SY_F32 ? DType::kF32 : DType::kF8E8M0;
    auto next = copy.begin();
    for (std::int64_t e = 0; e < scale.shape[0]; ++e) {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          *next++ =
              scale_to_f32(scale.data, dtype,
                           e * scale.strides[0] + r * scale.strides[1] + c * scale.strides[2]);
        }
      }
    }
    copy_ = copy.data();
    copy_rows_ = rows;
    copy_cols_ = cols;
  }

  void put(MatrixView& view, std::int64_t expert) const {
    const sy_tensor& scale = matrices_.scale;
    if (!is_given(scale)) return;
    view.scale_rows = matrices_.scale_rows;
    view.scale_cols = matrices_.scale_cols;
    if (copy_ != nullptr) {
      view.scale = copy_ + expert * copy_rows_ * copy_cols_;
      view.scale_stride = copy_cols_;
    } else {
      view.scale =
          static_cast<const std::byte*>(scale.data) + bytes_of(dtype_, expert * scale.strides[0]);
      view.scale_dtype = dtype_;
      view.scale_stride = scale.strides[1];
    }
  }

 private:
  static void require_type(const std::string& name, sy_dtype dtype, bool four_bit) {
    if (dtype == SY_F32 || dtype == SY_F8_E8M0) return;
    if (four_bit && (dtype == SY_BF16 || dtype == SY_F16)) return;
    throw Error(
        ErrorCode::kDTypeMismatch,
        fmt::format(
            "{} has dtype {}; scales are f32 ({}) or f8_e8m0 ({}){}", name, dtype, +SY_F32,
            +SY_F8_E8M0,
            four_bit ? fmt::format(", of u4 also bf16 ({}) or f16 ({})", +SY_BF16, +SY_F16) : ""));
  }

  const sy_matrices& matrices_;
  DType dtype_ = DType::kF32;
  const float* copy_ = nullptr;
  std::int64_t copy_rows_ = 0, copy_cols_ = 0;
};

// Throws unless these are zero points of the projection, one beside each of its scales.
void check_zero(const std::string& name, const sy_tensor& zero, const sy_matrices& matrices,
                sy_device_type device_type) {
  if (matrices.weight.dtype != SY_U4) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is given, but only weights of u4 ({}) have zero points; these have "
                            "dtype {}; leave it absent",
                            name, +SY_U4, matrices.weight.dtype));
  }
  const sy_tensor& scale = matrices.scale;
  if (!is_given(scale)) {
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("{} is given without scales; pass both", name));
  }
  check_tensor(name.c_str(), zero, 3, device_type);
  if (zero.dtype != SY_U8) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} has dtype {}; zero points are u8 ({}), one in a byte", name,
                            zero.dtype, +SY_U8));
  }
  if (!std::equal(zero.shape, zero.shape + 3, scale.shape)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is {}, but the scales are {}; pass one for each of them", name,
                            shape_text(zero), shape_text(scale)));
  }
  if (zero.shape[2] > 1 && zero.strides[2] != 1) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} has columns {} elements apart; pass rows that are contiguous", name,
                            zero.strides[2]));
  }
  if (zero.shape[1] > 1 && zero.strides[1] != scale.strides[1]) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} has rows {} elements apart, and the scales {}; pass both contiguous", name,
                    zero.strides[1], scale.strides[1]));
  }
}

constexpr sy_tensor kAbsent{};

// Fills `matrix` and `bias` of experts[first + i] with the i-th of the tensors. `name` is that of
// the struct that has them; empty where a caller has one only.
void spread(const std::string& name, const sy_matrices& matrices, std::span<FfnWeights> experts,
            MatrixView FfnWeights::*matrix, VectorView FfnWeights::*bias, ExpertRange own,
            sy_device_type device_type, ScaleCopies& copies, const sy_tensor& zero = kAbsent) {
  const auto part = [&](const char* tensor) {
    return name.empty() ? std::string(tensor) : name + "." + tensor;
  };
  const std::string zero_name = name.empty() ? "zero" : name + "_zero";
  if (!is_given(matrices.weight)) {
    if (is_given(matrices.bias)) {
      throw Error(ErrorCode::kMissingTensor,
                  fmt::format("{} is given without {}; pass both", part("bias"), part("weight")));
    }
    if (is_given(zero)) {
      throw Error(ErrorCode::kMissingTensor,
                  fmt::format("{} is given without {}; pass both", zero_name, part("weight")));
    }
    return;
  }
  check_tensor(part("weight").c_str(), matrices.weight, 3, device_type);
  const std::int64_t count = matrices.weight.shape[0];
  const auto all = static_cast<std::int64_t>(experts.size());
  if (count != all && count != own.end - own.begin) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is {}; its first dimension must be all {} experts, or the {} "
                            "that this rank has ({} to {})",
                            part("weight"), shape_text(matrices.weight), all, own.end - own.begin,
                            own.begin, own.end - 1));
  }
  const auto first = static_cast<std::size_t>(count == all ? 0 : own.begin);
  const DType dtype = dtype_of(part("weight").c_str(), matrices.weight.dtype);
  if (is_four_bit(matrices.weight)) require_whole_bytes(part("weight"), matrices.weight);
  const Scales scales(part("scale"), matrices, device_type, copies);
  if (is_given(zero)) check_zero(zero_name, zero, matrices, device_type);
  DType bias_dtype{};
  if (is_given(matrices.bias)) {
    check_tensor(part("bias").c_str(), matrices.bias, 2, device_type);
    bias_dtype = dtype_of(part("bias").c_str(), matrices.bias.dtype);
    if (matrices.bias.shape[0] != count || matrices.bias.shape[1] != matrices.weight.shape[1]) {
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("{} is {}, but weights {} need [{}, {}]", part("bias"),
                              shape_text(matrices.bias), shape_text(matrices.weight), count,
                              matrices.weight.shape[1]));
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    FfnWeights& expert = experts[first + static_cast<std::size_t>(i)];
    expert.*matrix = slice(matrices.weight, dtype, i);
    scales.put(expert.*matrix, i);
    if (is_given(zero)) {
      (expert.*matrix).zero = static_cast<const std::uint8_t*>(zero.data) + i * zero.strides[0];
    }
    if (!is_given(matrices.bias)) continue;
    expert.*
        bias = {static_cast<const std::byte*>(matrices.bias.data) +
                    i * matrices.bias.strides[0] * static_cast<std::int64_t>(size_of(bias_dtype)),
                bias_dtype, matrices.bias.shape[1], matrices.bias.strides[1]};
  }
}

}  // namespace

void copy_into(const ScaleCopies& fresh, ScaleCopies& older) {
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    std::copy(fresh[i].begin(), fresh[i].end(), older[i].begin());
  }
}

std::string shape_text(const sy_tensor& tensor) {
  return fmt::format("[{}]", fmt::join(shape_of(tensor), ", "));
}

DType dtype_of(const char* name, sy_dtype dtype) {
  switch (dtype) {
    case SY_F32: return DType::kF32;
    case SY_F16: return DType::kF16;
    case SY_BF16: return DType::kBF16;
    case SY_F8_E4M3: return DType::kF8E4M3;
    case SY_I32: return DType::kI32;
    case SY_I64: return DType::kI64;
    case SY_U8: return DType::kU8;
    case SY_F4_E2M1: return DType::kF4E2M1;
    case SY_U4: return DType::kU4;
    case SY_F8_E8M0:
      throw Error(
          ErrorCode::kDTypeMismatch,
          fmt::format("{} is f8_e8m0, which only scales of weights may be; pass another type",
                      name));
    default:
      throw Error(
          ErrorCode::kDTypeMismatch,
          fmt::format("{} has the dtype {}, which is none; use SY_F32 and its kin", name, dtype));
  }
}

sy_dtype to_c(DType dtype) {
  switch (dtype) {
    case DType::kF32: return SY_F32;
    case DType::kF16: return SY_F16;
    case DType::kBF16: return SY_BF16;
    case DType::kF8E4M3: return SY_F8_E4M3;
    case DType::kI32: return SY_I32;
    case DType::kI64: return SY_I64;
    case DType::kU8: return SY_U8;
    case DType::kF4E2M1: return SY_F4_E2M1;
    case DType::kU4: return SY_U4;
    case DType::kF8E8M0: return SY_F8_E8M0;
  }
  return SY_DTYPE_NONE;
}

void check_tensor(const char* name, const sy_tensor& tensor, int ndim, sy_device_type device_type) {
  if (tensor.ndim != ndim) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} has {} dimensions; it needs {}", name, tensor.ndim, ndim));
  }
  std::int64_t elements = 1;
  for (const std::int64_t size : shape_of(tensor)) {
    if (size < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is {}; sizes are 0 or more", name, shape_text(tensor)));
    }
    constexpr std::int64_t kMost = std::int64_t{1} << 60;  // bytes of them fit in 64 bits
    if (__builtin_mul_overflow(elements, size, &elements) || elements > kMost) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is {}, which is more than there can be memory for", name,
                              shape_text(tensor)));
    }
  }
  if (elements > 0 && tensor.data == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is {}, but its address is null", name, shape_text(tensor)));
  }
  if (device_type != kAnyDevice && tensor.device_type != device_type) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is in {} memory, but must be in {} memory; move it there", name,
                            name_of(tensor.device_type), name_of(device_type)));
  }
}

MatrixView matrix(const char* name, const sy_tensor& tensor, sy_device_type device_type) {
  check_tensor(name, tensor, 2, device_type);
  const DType dtype = dtype_of(name, tensor.dtype);
  if (is_four_bit(dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} is {}, which only weights of experts may be; convert it", name,
                            to_string(dtype)));
  }
  return {tensor.data,      dtype, tensor.shape[0], tensor.shape[1], tensor.strides[0],
          tensor.strides[1]};
}

VectorView vector(const char* name, const sy_tensor& tensor, sy_device_type device_type) {
  check_tensor(name, tensor, 1, device_type);
  return {tensor.data, dtype_of(name, tensor.dtype), tensor.shape[0], tensor.strides[0]};
}

int whole(const char* name, std::int64_t value) {
  require_within(name, value, 0, std::numeric_limits<std::int32_t>::max());
  return static_cast<int>(value);
}

void require_columns(const char* name, const sy_tensor& tensor, std::int64_t rows, int cols) {
  if (tensor.shape[1] != cols || (rows >= 0 && tensor.shape[0] < rows)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is {}; it must be [{}, {}]", name, shape_text(tensor),
                            rows < 0 ? "rows" : std::to_string(rows), cols));
  }
  if (tensor.shape[1] > 1 && tensor.strides[1] != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}'s columns are {} elements apart; pass rows that are contiguous",
                            name, tensor.strides[1]));
  }
}

void require_rows_apart(const char* name, const sy_tensor& tensor) {
  if (!is_given(tensor) || tensor.shape[0] <= 1 || tensor.strides[0] != 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}'s rows are all the same one (stride 0); pass memory for each", name));
}

ExpertPlacement placement_of(const sy_tensor& given) {
  ExpertPlacement placement;
  if (!is_given(given)) return placement;
  check_tensor("placement", given, 1, SY_CPU);
  if (given.dtype != SY_I32 || (given.shape[0] > 1 && given.strides[0] != 1)) {
    throw Error(ErrorCode::kDTypeMismatch, "placement must be i32 and contiguous; convert it");
  }
  constexpr std::int64_t kMostPlaces = 4096;
  require_within("the number of places", given.shape[0], 1, kMostPlaces);
  const auto* experts = static_cast<const std::int32_t*>(given.data);
  placement.expert_at.assign(experts, experts + given.shape[0]);
  return placement;
}

SlotView elements(const char* name, const sy_tensor& tensor, int ndim, sy_device_type device_type,
                  std::initializer_list<DType> types) {
  check_tensor(name, tensor, ndim, device_type);
  const DType dtype = dtype_of(name, tensor.dtype);
  if (std::find(types.begin(), types.end(), dtype) == types.end()) {
    std::string allowed;
    for (const DType type : types) {
      allowed += fmt::format("{}{}", allowed.empty() ? "" : " or ", to_string(type));
    }
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} is {}; it must be {}", name, to_string(dtype), allowed));
  }
  std::int64_t size = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] > 1 && tensor.strides[d] != size) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is not contiguous; pass a contiguous copy", name));
    }
    size *= tensor.shape[d];
  }
  return {tensor.data, dtype, static_cast<std::size_t>(size)};
}

MoeWeights weights_of(const sy_layer_weights& given, int num_experts, ExpertRange own, bool gated,
                      sy_device_type device_type, ScaleCopies& copies) {
  MoeWeights weights;
  weights.experts.resize(static_cast<std::size_t>(num_experts));
  const auto experts = std::span(weights.experts);
  if (gated) {
    spread("gate", given.gate, experts, &FfnWeights::gate, &FfnWeights::gate_bias, own, device_type,
           copies, given.gate_zero);
  } else if (is_given(given.gate_zero)) {
    throw Error(ErrorCode::kInvalidArgument,
                "gate_zero is given, but the activation is plain (gated is 0); leave it absent");
  } else if (is_given(given.gate.weight)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("gate.weight is {}, but the activation is plain (gated is 0); leave "
                            "gate absent, or set gated",
                            shape_text(given.gate.weight)));
  }
  spread("up", given.up, experts, &FfnWeights::up, &FfnWeights::up_bias, own, device_type, copies,
         given.up_zero);
  spread("down", given.down, experts, &FfnWeights::down, &FfnWeights::down_bias, own, device_type,
         copies, given.down_zero);
  const auto shared = std::span(&weights.shared, 1);
  const ExpertRange one{0, 1};
  spread("shared_gate", given.shared_gate, shared, &FfnWeights::gate, &FfnWeights::gate_bias, one,
         device_type, copies);
  spread("shared_up", given.shared_up, shared, &FfnWeights::up, &FfnWeights::up_bias, one,
         device_type, copies);
  spread("shared_down", given.shared_down, shared, &FfnWeights::down, &FfnWeights::down_bias, one,
         device_type, copies);
  if (is_given(given.router)) weights.router = matrix("router", given.router, device_type);
  if (is_given(given.router_bias)) {
    weights.router_bias = vector("router_bias", given.router_bias, device_type);
  }
  if (is_given(given.correction_bias)) {
    weights.correction_bias = vector("correction_bias", given.correction_bias, device_type);
  }
  if (is_given(given.hash_table)) {
    weights.hash_table = matrix("hash_table", given.hash_table, device_type);
  }
  if (is_given(given.shared_sigmoid)) {
    weights.shared_gate = vector("shared_sigmoid", given.shared_sigmoid, device_type);
  }
  return weights;
}

GroupedGemmWeights weights_of(const sy_grouped_gemm_spec& given, sy_device_type device_type,
                              ScaleCopies& copies) {
  const sy_tensor& weight = given.weights.weight;
  check_tensor("weight", weight, 3, device_type);
  require_within("num_experts", weight.shape[0], 1, kMostGroupedExperts);
  const auto num_experts = static_cast<std::size_t>(weight.shape[0]);
  std::vector<FfnWeights> experts(num_experts);
  spread("", given.weights, experts, &FfnWeights::up, &FfnWeights::up_bias,
         {0, static_cast<int>(num_experts)}, device_type, copies, given.zero);
  GroupedGemmWeights weights;
  for (const FfnWeights& expert : experts) {
    weights.matrices.push_back(expert.up);
    if (!expert.up_bias.empty()) weights.biases.push_back(expert.up_bias);
  }
  return weights;
}

}  // namespace switchyard::c_api
