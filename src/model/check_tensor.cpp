#include "model/check_tensor.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>

#include "base/convert.h"
#include "base/quantize.h"
#include "switchyard/error.h"

namespace switchyard {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

namespace {

// The scales that a four-bit type has.
struct FourBitRules {
  std::string_view format;
  std::initializer_list<DType> scales;
  std::initializer_list<std::int64_t> groups;
};

FourBitRules rules_of(DType dtype) {
  static constexpr auto kMxScales = {DType::kF8E8M0};
  static constexpr auto kIntScales = {DType::kF32, DType::kBF16, DType::kF16};
  static constexpr std::initializer_list<std::int64_t> kMxGroups = {kMxGroup};
  static constexpr std::initializer_list<std::int64_t> kIntGroups = {32, 128};
  if (dtype == DType::kF4E2M1) return {"MXFP4", kMxScales, kMxGroups};
  return {"INT4", kIntScales, kIntGroups};
}

bool has(const auto& list, auto value) { return std::ranges::find(list, value) != list.end(); }

std::string names_of(std::initializer_list<DType> types) {
  std::string names;
  for (const DType type : types)
    names += fmt::format("{}{}", names.empty() ? "" : " or ", to_string(type));
  return names;
}

void check_four_bit(const std::string& name, const MatrixView& view) {
  const FourBitRules rules = rules_of(view.dtype);
  const auto refuse = [&](ErrorCode code, const std::string& why) {
    throw Error(code,
                fmt::format("{} is {} ({}), {}", name, to_string(view.dtype), rules.format, why));
  };
  if (view.scale == nullptr) refuse(ErrorCode::kMissingTensor, "without scales; provide them");
  if (!has(rules.scales, view.scale_dtype)) {
    refuse(ErrorCode::kDTypeMismatch,
           fmt::format("with scales of {}; they must be {}", to_string(view.scale_dtype),
                       names_of(rules.scales)));
  }
  if (view.scale_rows != 1 || !has(rules.groups, view.scale_cols)) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("with a scale for {} x {} elements; groups are of {} columns of one row",
                       view.scale_rows, view.scale_cols, fmt::join(rules.groups, " or ")));
  }
  if (view.cols % view.scale_cols != 0) {
    refuse(ErrorCode::kShapeMismatch,
           fmt::format("with {} columns, which is no multiple of its groups of {}", view.cols,
                       view.scale_cols));
  }
  const std::int64_t groups = view.cols / view.scale_cols;
  if (view.rows > 1 && view.scale_stride < groups) {
    refuse(ErrorCode::kShapeMismatch,
           fmt::format("with scales {} apart from row to row, but a row of {} columns has {}",
                       view.scale_stride, view.cols, groups));
  }
  if (view.col_stride != 1) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("with columns {} elements apart; two neighbours share a byte, so pass rows "
                       "that are contiguous",
                       view.col_stride));
  }
  if (view.row_stride < 0) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("with rows {} elements apart, in reverse; pass them in their order",
                       view.row_stride));
  }
  if (view.row_stride % 2 != 0) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("with rows {} elements apart; a row must begin at a whole byte",
                       view.row_stride));
  }
  if (reinterpret_cast<std::uintptr_t>(view.scale) % size_of(view.scale_dtype) != 0) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("with scales at an address that is no multiple of {} bytes; copy them",
                       size_of(view.scale_dtype)));
  }
  if (view.zero != nullptr && view.dtype != DType::kU4) {
    refuse(ErrorCode::kInvalidArgument, "with zero points, which only u4 has; leave them out");
  }
}

}  // namespace

std::string four_bit_form(const MatrixView& view) {
  return fmt::format("{} with a scale of {} per {} columns{}", to_string(view.dtype),
                     to_string(view.scale_dtype), view.scale_cols,
                     view.zero == nullptr ? "" : " and zero points");
}

void check_four_bit_values(const std::string& name, const MatrixView& view) {
  if (!is_four_bit(view.dtype)) return;
  const std::int64_t groups = view.cols / view.scale_cols;
  for (std::int64_t r = 0; r < view.rows; ++r) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t at = r * view.scale_stride + g;
      const auto place = [&] {
        return fmt::format("row {}, columns {} to {}", r, g * view.scale_cols,
                           (g + 1) * view.scale_cols - 1);
      };
      if (std::isnan(scale_to_f32(view.scale, view.scale_dtype, at))) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}'s scale of {} is NaN ({}); it must be a number. A checkpoint "
                                "that has it is damaged: download it again",
                                name, place(), to_string(view.scale_dtype)));
      }
      if (view.zero != nullptr && view.zero[at] > 15) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}'s zero point of {} is {}; it must be 0 to 15", name, place(),
                                view.zero[at]));
      }
    }
  }
}

void check_matrix(const std::string& name, const MatrixView& view, std::int64_t rows,
                  std::int64_t cols) {
  if (view.empty())
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("{} is empty, but the spec needs a [{}, {}] matrix; provide it", name,
                            rows, cols));
  if (view.rows != rows || view.cols != cols)
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("{} is [{}, {}], but the spec needs [{}, {}]; use the weights that belong "
                    "to this spec",
                    name, view.rows, view.cols, rows, cols));
  if (is_four_bit(view.dtype)) return check_four_bit(name, view);
  if (view.dtype == DType::kF8E4M3) {
    if (!view.scale)
      throw Error(
          ErrorCode::kMissingTensor,
          fmt::format("{} is f8_e4m3 without scales; provide them (1.0 per tensor if there are "
                      "none)",
                      name));
    if (view.scale_dtype != DType::kF32)
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("{} is f8_e4m3 with scales of {}; convert them to f32", name,
                              to_string(view.scale_dtype)));
    if (view.scale_rows < 1 || view.scale_cols < 1)
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("{} has scale blocks of {} x {}; both must be at least 1", name,
                              view.scale_rows, view.scale_cols));
  } else if (!is_float(view.dtype)) {
    throw Error(
        ErrorCode::kDTypeMismatch,
        fmt::format("{} is {}; a weight must be f32, f16, bf16, f8_e4m3, f4_e2m1 or u4, convert it",
                    name, to_string(view.dtype)));
  }
}

void check_row_scales(const char* these_are, const MatrixView& view) {
  const std::int64_t groups = (view.cols + kQuantGroup - 1) / kQuantGroup;
  if (view.scale == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} f8_e4m3, but the scale is null; pass [{}, {}] scales, one for {} "
                            "columns of a row",
                            these_are, view.rows, groups, kQuantGroup));
  }
  if (view.scale_dtype != DType::kF32) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} f8_e4m3 with scales of {}; convert them to f32", these_are,
                            to_string(view.scale_dtype)));
  }
  if (view.scale_rows != 1 || view.scale_cols != kQuantGroup ||
      (view.rows > 1 && view.scale_stride < groups)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} f8_e4m3 with a scale per {} x {}, with stride {}; use scale_rows "
                            "1, scale_cols {} and a scale_stride of at least {}",
                            these_are, view.scale_rows, view.scale_cols, view.scale_stride,
                            kQuantGroup, groups));
  }
}

void check_vector(const std::string& name, const VectorView& view, std::int64_t size) {
  if (view.empty())
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("{} is empty, but the spec needs {} values; provide them", name, size));
  if (view.size != size)
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("{} has {} values, but the spec needs {}; use the weights that belong to "
                    "this spec",
                    name, view.size, size));
  if (!is_float(view.dtype))
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} is {}; it must be f32, f16 or bf16, convert it", name,
                            to_string(view.dtype)));
}

}  // namespace switchyard
