// TileGemm in plain C++, built instead of tile_gemm.cpp for runs under ThreadSanitizer. The
// sanitizer cannot see into generated code; here it checks every read of a shared row and every
// write of a result.
#include "base/convert.h"
#include "cpu/tile_gemm.h"

namespace switchyard::cpu {

struct TileGemm::State {
  DType dtype;
};

TileGemm::TileGemm(DType dtype) : state_(std::make_unique<State>(State{dtype})) {}

void TileGemm::multiply(int m, int n, int k, const void* a, std::int64_t a_row_stride,
                        std::int64_t a_col_stride, const void* x, std::int64_t x_stride, float* c) {
  const auto load = [this](const void* p, std::int64_t i) {
    return state_->dtype == DType::kF32 ? static_cast<const float*>(p)[i]
                                        : bf16_to_f32(static_cast<const std::uint16_t*>(p)[i]);
  };
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int p = 0; p < k; ++p) {
        sum += load(a, i * a_row_stride + p * a_col_stride) * load(x, j * x_stride + p);
      }
      c[static_cast<std::int64_t>(i) * n + j] = sum;
    }
  }
}

DType TileGemm::dtype() const { return state_->dtype; }

TileGemm::~TileGemm() = default;
TileGemm::TileGemm(TileGemm&&) noexcept = default;

}  // namespace switchyard::cpu
