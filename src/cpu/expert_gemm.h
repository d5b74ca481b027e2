// Products of rows of an expert's weight with rows of tokens, in the forms that checkpoints and
// callers have them in. The layer and the operator GroupedGemm share it, and so have the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/quantize.h"
#include "cpu/kernels.h"
#include "cpu/tile_gemm.h"
#include "protocol/partition.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Rows of a weight with `cols` columns that one task takes: about a megabyte of it, which streams
// long enough to hide the cost of taking a task, but never so few rows that the matrix unit runs
// dry or so many that the fp32 product of a full token tile leaves the second-level cache.
inline int rows_per_task(int cols) {
  constexpr int kElements = 512 * 1024;
  return std::clamp(protocol::round_up(kElements / std::max(cols, 1), 64), 128, 512);
}
// The same for a weight whose products an activation is applied to. In FP8 a task takes whole
// groups of columns of h, so that it can quantise what it made.
inline int rows_per_activated_task(int cols, bool quantised) {
  const int rows = rows_per_task(cols);
  return quantised ? protocol::round_up(rows, kQuantGroup) : rows;
}

// Values first, first + step, ... of a vector, `count` of them: where they are if they are f32 that
// stand one behind the other, and else converted into `scratch`. Null for an empty vector. Callers
// ask for them in every pass, so that the vector's owner may change it between passes.
const float* floats_of(const VectorView& vector, int first, int count, int step,
                       std::vector<float>& scratch);

// Rows first, first + step, ... of a weight.
struct WeightBlock {
  int first = 0;
  int rows = 0;
  int step = 1;
};

// A thread's tile GEMM and its scratch.
class ExpertGemm {
 public:
  explicit ExpertGemm(DType gemm) : kernels_(kernels()), gemm_(gemm) {}

  DType dtype() const { return gemm_.dtype(); }  // of both operands of the tile GEMM
  std::size_t row_bytes(std::int64_t cols) const {
    return static_cast<std::size_t>(cols) * size_of(dtype());
  }

  // result[i][j] = row i of the block times row j < n of x. Rows of x are of dtype(), contiguous,
  // and x_stride elements apart. `result` is [block.rows][n].
  void multiply(const MatrixView& weight, const WeightBlock& block, int n, const void* x,
                std::int64_t x_stride, float* result);

  // How the rows of a weight are strided when they are multiplied: as they are given, or, where
  // they are converted first, contiguous.
  struct Strides {
    std::int64_t row, col;
    bool operator==(const Strides&) const = default;
  };
  Strides strides_of(const MatrixView& weight, int step = 1) const {
    return is_direct(weight, step) ? Strides{weight.row_stride * step, weight.col_stride}
                                   : Strides{weight.cols, 1};
  }

  // One row of FP8 codes with a scale for every kQuantGroup columns, times `factor`, in dtype().
  void unpack(const std::uint8_t* codes, const float* scales, std::int64_t cols, float factor,
              void* to);
  // The quantised form of one row of bf16, as values again, in dtype().
  void requantize(const std::uint16_t* row, std::int64_t cols, void* to);

  std::size_t scratch_bytes() const;

 private:
  // Rows of a weight in dtype(), converted into scratch unless they already are.
  struct WeightRows {
    const void* data;
    std::int64_t row_stride, col_stride;
  };
  WeightRows weight_rows(const MatrixView& weight, const WeightBlock& block);
  // oneDNN takes neither rows that overlap nor those that go backwards.
  bool is_direct(const MatrixView& weight, int step) const {
    const auto apart = [](std::int64_t stride, std::int64_t count) {
      return stride == 0 || stride >= count;
    };
    return weight.dtype == dtype() && weight.scale == nullptr &&
           ((weight.col_stride == 1 && apart(weight.row_stride, weight.cols)) ||
            (weight.row_stride == 1 && step == 1 && apart(weight.col_stride, weight.rows)));
  }

  const Kernels& kernels_;
  TileGemm gemm_;
  std::vector<std::byte> converted_;  // rows of a weight in dtype()
  std::vector<std::byte> column_;     // one strided row on its way there
  std::vector<std::uint8_t> codes_;   // one row of a block of h or of activations
  std::vector<float> scales_;
};

}  // namespace switchyard::cpu
