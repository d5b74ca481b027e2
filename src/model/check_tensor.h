// Checks that a tensor is what a spec needs.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard {

// True for f32, f16 and bf16.
bool is_float(DType dtype);

// Checks a weight: it must be there, of that shape, of a floating type, with scales if it is of FP8
// or four bits. Throws Error{kMissingTensor, kShapeMismatch, kDTypeMismatch, kUnsupported} with the
// tensor's name.
void check_matrix(const std::string& name, const MatrixView& view, std::int64_t rows,
                  std::int64_t cols);
// Checks the scales of FP8 activations: f32, one for kQuantGroup columns of a row. `these_are`
// begins the message: "x is", "tokens are". Throws Error{kInvalidArgument, kDTypeMismatch}.
void check_row_scales(const char* these_are, const MatrixView& view);
// Throws Error{kInvalidArgument} naming the place of a four-bit matrix's first scale that is NaN,
// or kInvalidArgument for a zero point above 15. The memory is the host's, and the matrix has
// passed check_matrix().
void check_four_bit_values(const std::string& name, const MatrixView& view);
// "f4_e2m1 with an f8_e8m0 scale per 32 columns": what all experts of a layer have in common.
std::string four_bit_form(const MatrixView& view);

// Checks a bias: it must be there, of that size, of a floating type. Throws as check_matrix() does.
void check_vector(const std::string& name, const VectorView& view, std::int64_t size);

}  // namespace switchyard
