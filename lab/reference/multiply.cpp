#include "reference/multiply.h"

#include <cstring>

namespace switchyard::reference {
namespace {

#define SWITCHYARD_ALWAYS_INLINE __attribute__((always_inline)) inline

// A vector of kBytes bytes. The compiler splits it if the machine's vectors are narrower.
template <typename Real, int kBytes>
struct VectorOf {
  typedef Real Type __attribute__((vector_size(kBytes)));
};

// kRows x kTokens inner products at once: each loaded vector serves several of them, and their
// independent sums hide the latency of the additions.
template <typename Real, int kBytes, int kRows, int kTokens>
SWITCHYARD_ALWAYS_INLINE void multiply_tile(const Real* x, const Real* w, std::int64_t length,
                                            Real* out, std::int64_t out_stride) {
  using Vector = typename VectorOf<Real, kBytes>::Type;
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(Real));
  Vector sums[kRows][kTokens] = {};
  std::int64_t c = 0;
  for (; c + kLanes <= length; c += kLanes) {
    Vector xs[kTokens];
    for (int t = 0; t < kTokens; ++t) std::memcpy(&xs[t], x + t * length + c, kBytes);
    for (int r = 0; r < kRows; ++r) {
      Vector ws;
      std::memcpy(&ws, w + r * length + c, kBytes);
      for (int t = 0; t < kTokens; ++t) sums[r][t] += ws * xs[t];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      Real sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[r][t][lane];
      for (std::int64_t i = c; i < length; ++i) sum += x[t * length + i] * w[r * length + i];
      out[t * out_stride + r] = sum;
    }
  }
}

template <typename Real, int kBytes>
SWITCHYARD_ALWAYS_INLINE void multiply_all(const Real* x, std::int64_t num_tokens, const Real* w,
                                           std::int64_t num_rows, std::int64_t length, Real* out,
                                           std::int64_t out_stride) {
  constexpr int kRows = 4;
  constexpr int kTokens = kBytes == 64 ? 4 : 2;
  for (std::int64_t t = 0; t < num_tokens;) {
    const bool several_tokens = t + kTokens <= num_tokens;
    for (std::int64_t r = 0; r < num_rows;) {
      const bool several_rows = r + kRows <= num_rows;
      const Real* tile_x = x + t * length;
      const Real* tile_w = w + r * length;
      Real* tile_out = out + t * out_stride + r;
      if (several_tokens && several_rows) {
        multiply_tile<Real, kBytes, kRows, kTokens>(tile_x, tile_w, length, tile_out, out_stride);
      } else if (several_tokens) {
        multiply_tile<Real, kBytes, 1, kTokens>(tile_x, tile_w, length, tile_out, out_stride);
      } else if (several_rows) {
        multiply_tile<Real, kBytes, kRows, 1>(tile_x, tile_w, length, tile_out, out_stride);
      } else {
        multiply_tile<Real, kBytes, 1, 1>(tile_x, tile_w, length, tile_out, out_stride);
      }
      r += several_rows ? kRows : 1;
    }
    t += several_tokens ? kTokens : 1;
  }
}

#if defined(__x86_64__)
template <typename Real>
__attribute__((target("avx512f"))) void multiply_avx512(const Real* x, std::int64_t num_tokens,
                                                        const Real* w, std::int64_t num_rows,
                                                        std::int64_t length, Real* out,
                                                        std::int64_t out_stride) {
  multiply_all<Real, 64>(x, num_tokens, w, num_rows, length, out, out_stride);
}

template <typename Real>
__attribute__((target("avx2,fma"))) void multiply_avx2(const Real* x, std::int64_t num_tokens,
                                                       const Real* w, std::int64_t num_rows,
                                                       std::int64_t length, Real* out,
                                                       std::int64_t out_stride) {
  multiply_all<Real, 32>(x, num_tokens, w, num_rows, length, out, out_stride);
}
#endif

template <typename Real>
void multiply_any(const Real* x, std::int64_t num_tokens, const Real* w, std::int64_t num_rows,
                  std::int64_t length, Real* out, std::int64_t out_stride) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512) return multiply_avx512(x, num_tokens, w, num_rows, length, out, out_stride);
  if (has_avx2) return multiply_avx2(x, num_tokens, w, num_rows, length, out, out_stride);
#endif
  multiply_all<Real, 16>(x, num_tokens, w, num_rows, length, out, out_stride);
}

}  // namespace

void multiply(const double* x, std::int64_t num_tokens, const double* w, std::int64_t num_rows,
              std::int64_t length, double* out, std::int64_t out_stride) {
  multiply_any(x, num_tokens, w, num_rows, length, out, out_stride);
}

void multiply(const float* x, std::int64_t num_tokens, const float* w, std::int64_t num_rows,
              std::int64_t length, float* out, std::int64_t out_stride) {
  multiply_any(x, num_tokens, w, num_rows, length, out, out_stride);
}

}  // namespace switchyard::reference
