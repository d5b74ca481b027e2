// Checks that a tensor is what a spec needs.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard {

// True for f32, f16 and bf16.
bool is_float(DType dtype);

// Checks a weight: it must be there, of that shape, of a floating type, with scales if it is FP8.
// Throws Error{kMissingTensor, kShapeMismatch, kDTypeMismatch} with the tensor's name.
void check_matrix(const std::string& name, const MatrixView& view, std::int64_t rows,
                  std::int64_t cols);
// Checks a bias: it must be there, of that size, of a floating type. Throws as check_matrix() does.
void check_vector(const std::string& name, const VectorView& view, std::int64_t size);

}  // namespace switchyard
