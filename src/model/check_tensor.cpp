#include "model/check_tensor.h"

#include <fmt/core.h>

#include "switchyard/error.h"

namespace switchyard {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
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
  if (view.dtype == DType::kF8E4M3) {
    if (!view.scale)
      throw Error(
          ErrorCode::kMissingTensor,
          fmt::format("{} is f8_e4m3 without scales; provide them (1.0 per tensor if there are "
                      "none)",
                      name));
    if (view.scale_rows < 1 || view.scale_cols < 1)
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("{} has scale blocks of {} x {}; both must be at least 1", name,
                              view.scale_rows, view.scale_cols));
  } else if (!is_float(view.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} is {}; a weight must be f32, f16, bf16 or f8_e4m3, convert it",
                            name, to_string(view.dtype)));
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
