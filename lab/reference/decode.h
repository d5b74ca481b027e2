// Decodes stored elements to doubles, with one scalar decoder per dtype.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::reference {

double bf16_to_double(std::uint16_t bits);
double f16_to_double(std::uint16_t bits);
double f8e4m3_to_double(
    std::uint8_t bits);  // the "fn" format: no infinities, 0x7f and 0xff are NaN

double f4e2m1_to_double(std::uint8_t code);  // of the lower four bits

// The code of the f8_e4m3 value nearest to `value`, ties to the even code; +-448 beyond that.
std::uint8_t nearest_f8e4m3(double value);

// The bf16 nearest to `value`, ties to even.
float round_to_bf16(float value);

// Decodes row r of a matrix with block scales applied; `out` has matrix.cols elements. Throws
// Error{kDTypeMismatch} for integer matrices.
void decode_row(const MatrixView& matrix, std::int64_t r, double* out);
// Decodes a whole vector; `out` has vector.size elements. Throws as decode_row() does.
void decode_vector(const VectorView& vector, double* out);

}  // namespace switchyard::reference
