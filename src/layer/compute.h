// The type that a layer computes in. It follows from its weights and its options.
#pragma once

#include <optional>
#include <span>

#include "switchyard/layer.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard {

// The two forms of FP8 matrices that FP8 arithmetic takes as they are. Both may hold, e.g. if one
// scale serves all.
//
// Block form: a scale never changes within 128 rows or columns that start at a multiple of 128, so
// that it multiplies the sums of whole groups of products (128 x 128, per tensor).
bool is_block_form(const MatrixView& matrix);
// Row form, and not block form: one scale serves all columns of a row, so that it multiplies
// results (per channel).
bool is_row_form(const MatrixView& matrix);

// Throws Error{kInvalidArgument} unless layers compute in that type: kBF16, kF32 or kF8E4M3.
void check_compute_type(DType compute);

// Returns LayerOptions::compute or, if that is empty, a choice by the weights: kF8E4M3 if every
// expert's matrices, the shared expert's included, are of block or row form; else kF32 for f32 and
// f16 weights, else kBF16. The weights have passed validate(), and may be of some experts only.
// Throws Error{kInvalidArgument} if kF8E4M3 is asked for and a matrix is not FP8, if another type
// is asked for that no engine computes in, or if there are no weights to choose by; {kUnsupported}
// if an FP8 matrix has neither form.
DType resolve_compute(const MoeWeights& weights, std::optional<DType> asked);
// The type of the routed experts' weights; none if there are none.
std::optional<DType> type_of_routed(const MoeWeights& weights);

// The same for the weights of a grouped GEMM, one matrix an expert, at least one; but with kCuda,
// where f32 must be asked for, kF16 for f16 weights and kBF16 for f32 ones. Only there kF16 may be
// asked for: throws Error{kUnsupported} for it with kCpu.
DType resolve_compute(std::span<const MatrixView> matrices, std::optional<DType> asked,
                      Backend backend);

// The type of all values that are never quantised in a layer that computes in `compute`: the gates'
// activations, experts' outputs, and by default the caller's activations.
constexpr DType value_type(DType compute) {
  return compute == DType::kF8E4M3 ? DType::kBF16 : compute;
}

}  // namespace switchyard
