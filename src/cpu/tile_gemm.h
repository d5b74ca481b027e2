// The tile product on the vendor's small-GEMM library. Weights are on M and tokens on N, so that
// weights are read straight from the mapped checkpoint, in whatever orientation it has them.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Keeps the library from instructions that this processor claims but does not have. It must run
// before any use of the library. It acts once, and everything here calls it.
void prepare_gemm_library();

// True if this processor multiplies bf16 natively (AMX or AVX-512-BF16). Otherwise bf16 layers
// convert tiles to fp32.
bool has_native_bf16();

// The element type that tiles are multiplied in when a layer computes in `compute`.
DType gemm_dtype(DType compute);

// The instruction set that the library will use, e.g. "amx_bf16", "avx2".
const char* gemm_instruction_set();

// The tile product for one thread. It keeps a generated kernel per shape.
class TileGemm {
 public:
  explicit TileGemm(DType dtype);  // of a and x: kBF16 or kF32
  ~TileGemm();
  TileGemm(TileGemm&&) noexcept;

  DType dtype() const;

  // Computes c[m][n] = a[m][k] x[n][k]^T in fp32. Element (i, p) of a is at i * a_row_stride + p *
  // a_col_stride, one of which must be 1; rows of x are contiguous and x_stride apart.
  void multiply(int m, int n, int k, const void* a, std::int64_t a_row_stride,
                std::int64_t a_col_stride, const void* x, std::int64_t x_stride, float* c);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// While an object of this class exists, library calls of this thread stay on this thread.
class SingleThreadedLibrary {
 public:
  SingleThreadedLibrary();
  ~SingleThreadedLibrary();
  SingleThreadedLibrary(const SingleThreadedLibrary&) = delete;
  SingleThreadedLibrary& operator=(const SingleThreadedLibrary&) = delete;

 private:
  int threads_before_;
};

}  // namespace switchyard::cpu
