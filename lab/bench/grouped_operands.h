// The operands of a grouped GEMM on the host, and its result compared with fp64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::bench {

// Matrices [experts, n, k] with values of about N(0, 1 / k), and rows [rows, k] of about N(0, 1).
// No two matrices and no two rows are equal. Scales of matrices are those of RandomTensor. Rows
// have the type of the matrices, or bf16 where that has four bits; FP8 rows have a scale per 128
// columns, quantised as layers quantise their tokens.
struct GroupedOperands {
  GroupedOperands(int experts, int n, int k, std::int64_t rows, DType dtype, std::uint64_t seed);

  // Where the operands are, here or elsewhere.
  struct Addresses {
    const std::byte *weights = nullptr, *x = nullptr, *weight_scales = nullptr;
    const float* x_scales = nullptr;
  };
  Addresses here() const;
  std::vector<MatrixView> matrices(const Addresses& at) const;  // [experts]
  MatrixView first_rows(const Addresses& at, std::int64_t rows) const;
  std::uint64_t matrix_bytes() const;  // of one expert, with its scales
  DType rows_dtype() const { return is_four_bit(dtype) ? DType::kBF16 : dtype; }
  DType output_dtype() const { return dtype == DType::kF8E4M3 ? DType::kBF16 : rows_dtype(); }

  int experts, n, k;
  std::int64_t rows;
  DType dtype;  // of the matrices
  std::vector<std::byte> weights, x, weight_scales;
  std::vector<float> x_scales;
};

struct GroupedAccuracy {
  double error = 0, bound = 0;
};

// Compares up to 16 rows of a packed output, of up to 4 experts, with fp64. The error is relative,
// in the Frobenius norm. The bound is twice the error of a straightforward program, which
// multiplies the same values in fp32 and rounds once, to the output's type. For an fp32 output it
// is 1e-5.
GroupedAccuracy check_rows(const GroupedOperands& operands, std::span<const std::int32_t> ends,
                           bool swiglu, const std::byte* output);

}  // namespace switchyard::bench
