// Inner products of a few weight rows with many token rows, on any vector unit.
#pragma once

#include <cstdint>

namespace switchyard::reference {

// out[t * out_stride + r] = sum_c x[t * length + c] * w[r * length + c]
// for t in [0, num_tokens), r in [0, num_rows). The order of the sum depends on `length` and the
// machine only.
void multiply(const double* x, std::int64_t num_tokens, const double* w, std::int64_t num_rows,
              std::int64_t length, double* out, std::int64_t out_stride);
void multiply(const float* x, std::int64_t num_tokens, const float* w, std::int64_t num_rows,
              std::int64_t length, float* out, std::int64_t out_stride);

}  // namespace switchyard::reference
