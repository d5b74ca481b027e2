// The caller's tensors as the C++ interface takes them.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include "switchyard/c.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard::c_api {

inline bool is_given(const sy_tensor& tensor) { return tensor.ndim != 0; }

// Throws Error{kDTypeMismatch} for a number that is none, and for SY_F8_E8M0.
DType dtype_of(const char* name, sy_dtype dtype);
sy_dtype to_c(DType dtype);

// "[2, 3, 4]".
std::string shape_text(const sy_tensor& tensor);

// Throws Error{kShapeMismatch} for another number of dimensions, {kInvalidArgument} for a negative
// one, for elements without an address, or for memory of another kind of device than `device_type`,
// which kAnyDevice leaves open.
inline constexpr sy_device_type kAnyDevice = 0;
void check_tensor(const char* name, const sy_tensor& tensor, int ndim, sy_device_type device_type);

// [rows, cols].
MatrixView matrix(const char* name, const sy_tensor& tensor, sy_device_type device_type);
// [size].
VectorView vector(const char* name, const sy_tensor& tensor, sy_device_type device_type);

// A size of a tensor that the C++ interface has as an int. Throws Error{kInvalidArgument} for one
// that is none.
int whole(const char* name, std::int64_t value);

// Throws Error{kShapeMismatch} unless a matrix has that many columns, and at least `rows` rows
// where that is not -1; {kInvalidArgument} unless its rows are contiguous.
void require_columns(const char* name, const sy_tensor& tensor, std::int64_t rows, int cols);
// Throws Error{kInvalidArgument} where all rows of an output are the same memory (stride 0, which
// would mean contiguous rows in the C++ interface).
void require_rows_apart(const char* name, const sy_tensor& tensor);

// The elements of a contiguous tensor, one of those types.
SlotView elements(const char* name, const sy_tensor& tensor, int ndim, sy_device_type device_type,
                  std::initializer_list<DType> types);

// The table of experts' places, [places] i32 in host memory; absent: none.
ExpertPlacement placement_of(const sy_tensor& given);

// Scales in the form that MatrixView refers to, where the caller's have another.
using ScaleCopies = std::deque<std::vector<float>>;
// Puts fresh copies where the older ones are, whose addresses are in use. They are of the same
// tensors, so their sizes are the same.
void copy_into(const ScaleCopies& fresh, ScaleCopies& older);

// The weights of a layer with `num_experts` experts, of which this rank has `own`.
MoeWeights weights_of(const sy_layer_weights& given, int num_experts, ExpertRange own, bool gated,
                      sy_device_type device_type, ScaleCopies& copies);

// The weights of a grouped GEMM, [E, N, K].
GroupedGemmWeights weights_of(const sy_grouped_gemm_spec& given, sy_device_type device_type,
                              ScaleCopies& copies);

}  // namespace switchyard::c_api
