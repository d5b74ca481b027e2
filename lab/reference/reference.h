// A second, plain implementation of the MoE layer, in fp64. Engines are tested against it, and
// `switchyard run --verify` compares with it. It shares no code with the engines or with
// src/routing.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard::reference {

struct Routing {
  std::vector<std::int32_t> ids;  // [T, K], kNoExpert where no expert was left
  std::vector<double> weights;    // [T, K]
};

// Does what switchyard::route() does, in fp64; arguments and NaN have the same meaning. Throws
// Error{kInvalidArgument} if a span's size does not match or a hashed id is out of range.
Routing route(const LayerSpec& spec, std::span<const double> logits,
              std::span<const float> correction_bias, std::span<const std::int32_t> hashed_ids);

// Returns, for each token, the distance of its routing from one with other ids or another order of
// them. It is the smallest gap that decides one of the K choices. Each choice has a gap to the next
// best, and the K-th to the best expert that is not chosen. With groups there is also the gap
// between the last group that is in and the first that is out. With the sparsemixer there is also
// the distance from the masking threshold. A gap is relative to the largest magnitude among the
// numbers that entered it. 0 is an exact tie, and infinity means that nothing competed. Routings of
// the same logits in lower precision may differ where the distance is near that precision.
std::vector<double> routing_margin(const LayerSpec& spec, std::span<const double> logits,
                                   std::span<const float> correction_bias);

// Computes x Wr^T (+ router bias), [T, E].
std::vector<double> router_logits(const LayerSpec& spec, const MoeWeights& weights,
                                  const MatrixView& activations);

inline constexpr std::int64_t kWholeRow = std::numeric_limits<std::int64_t>::max();

struct ReferenceInput {
  MatrixView activations;                   // [T, H]
  std::span<const std::int32_t> token_ids;  // [T]; needed if the gate runs and routes by hash
  // Routing from outside, [T, K] each; the gate is then skipped. kNoExpert skips a slot.
  std::span<const std::int32_t> topk_ids;
  std::span<const float> topk_weights;
  // True for the problem of an FP8 layer, whose experts have quantised operands. The activations
  // (rounded to bf16) and h are both quantised, in groups of scale_columns columns of a token, or
  // of 128 for the shared expert:
  //   scale = max(amax, 2^-100) / 448,  value = scale * f8_e4m3(x * 448 / max(amax, 2^-100))
  // The gates see the activations rounded to bf16. Activations that are f8_e4m3 already, with
  // scales, are taken as they are, and no gate may run.
  bool quantised = false;
  std::int64_t scale_columns = 128;  // kWholeRow: one scale for all columns
  // The number of consecutive tokens that each rank holds, for the capacity rule; empty: one rank
  // holds all.
  std::span<const std::int64_t> tokens_per_rank;
};

struct ReferenceOutput {
  std::vector<double> output;     // [T, H]
  std::vector<std::int32_t> ids;  // [T, K], as routed, before drops
  std::vector<double> weights;    // [T, K], as routed
  std::int64_t num_dropped = 0;   // slots beyond an expert's capacity
};

// Computes the layer. h is in fp64 even where it is quantised: its scales and codes are those of
// the unrounded values. Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch} for inputs
// that do not fit together.
ReferenceOutput forward(const LayerSpec& spec, const MoeWeights& weights,
                        const ReferenceInput& input);

// Computes the same layer as a plain bf16 program would. Activations, weights, h and the outputs of
// each expert and of the shared expert are rounded to bf16. Products are accumulated in fp32. The
// weighted sum is in fp32, and the output is rounded to bf16. If the gate runs, it runs in fp64.
// The error of the result against forward() is the yardstick for an engine's error.
std::vector<float> straightforward_bf16(const LayerSpec& spec, const MoeWeights& weights,
                                        const ReferenceInput& input);

// Computes the quantised problem as a plain FP8 program would. Quantised values are multiplied with
// the weights as they are, and products are accumulated in fp32. h is rounded to bf16 before it is
// quantised. The outputs of each expert and of the shared expert are rounded to bf16. The weighted
// sum is in fp32, and the output is rounded to bf16. `input.quantised` is taken to be set. The
// error of the result against forward() of the quantised problem is the yardstick for an engine's
// error.
std::vector<float> straightforward_fp8(const LayerSpec& spec, const MoeWeights& weights,
                                       const ReferenceInput& input);

// ||actual - expected|| / ||expected|| in the Frobenius norm; 0 if both are zero, infinity if only
// `expected` is. Throws Error{kInvalidArgument} if the sizes differ.
double relative_error(std::span<const float> actual, std::span<const double> expected);
double relative_error(std::span<const double> actual, std::span<const double> expected);

}  // namespace switchyard::reference
