// The element-wise work around the tile GEMM. Compiled once per instruction set, chosen at run
// time.
//
// GEMM results are [m][n] fp32: output rows of the weight by tokens. Activations and cells are
// row-major by token, so epilogues transpose.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

struct Kernels {
  const char* name;  // of the instruction set

  // out[i] = scale * in[i], converted between fp32, bf16 and fp16.
  void (*convert)(const void* in, DType in_dtype, void* out, DType out_dtype, std::int64_t count,
                  float scale);

  // One row of an FP8 matrix with a scale per `scale_cols` columns.
  void (*dequantize)(const std::uint8_t* in, const float* scales, std::int64_t scale_cols,
                     void* out, DType out_dtype, std::int64_t count);

  // `groups` groups of a row of a four-bit matrix, which begin with the matrix's first column:
  // out[i] = value of the element, as MatrixView has it. `scales` and `zero`: of the row.
  void (*dequantize_four_bit)(const MatrixView& matrix, const void* codes, const void* scales,
                              const std::uint8_t* zero, std::int64_t groups, void* out,
                              DType out_dtype);

  // One row in groups of kQuantGroup, the last of which may be shorter: a scale for each, and for
  // each value its FP8 code.
  void (*quantize)(const std::uint16_t* in_bf16, std::uint8_t* codes, float* scales,
                   std::int64_t count);

  // out[j][i] = activation(gate[i][j] + gate_bias[i], up[i][j] + up_bias[i]) for i < m, j < n.
  // gate is null for a plain FFN; biases may be null. n is a multiple of 16.
  void (*activate)(const Activation& activation, const float* gate, const float* up,
                   const float* gate_bias, const float* up_bias, int m, int n, void* out,
                   DType out_dtype, std::int64_t out_stride);

  // out[j][i] = in[i][j] + bias[i] for i < m, j < rows; out[j] is any address. in is [m][n] with n
  // a multiple of 16; bias may be null.
  void (*scatter)(const float* in, const float* bias, int m, int n, int rows, void* const* out,
                  DType out_dtype);

  // out[i] = scale * sum over k of weights[k] * cells[k][i], in the order of k, in fp32; with
  // `accumulate` out[i] + that.
  void (*combine)(const void* const* cells, const float* weights, int count, DType cell_dtype,
                  void* out, DType out_dtype, std::int64_t size, float scale, bool accumulate);

  // sum of a[i] * b[i], in fp32, in an order that depends on nothing but size.
  float (*dot)(const void* a, DType a_dtype, const float* b, std::int64_t size);
};

// A set for each of the instruction sets.
namespace baseline {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

// The best set that this processor runs.
const Kernels& kernels();

}  // namespace switchyard::cpu
