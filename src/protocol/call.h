// Whether a forward call can be served, decided before anything is sent.
#pragma once

#include "switchyard/layer.h"

namespace switchyard::protocol {

// The arithmetic and wire type of a layer whose options name none (LayerOptions::compute).
inline DType default_compute(DType weights) {
  return weights == DType::kF32 || weights == DType::kF16 ? DType::kF32 : DType::kBF16;
}

// Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch, kCapacityExceeded} naming the
// first value that is wrong and the remedy. `rank` is for the message only.
void check_call(const LayerSpec& spec, const MoeWeights& weights, int max_tokens, int rank,
                const ForwardInput& input, const ForwardOutput& output);

}  // namespace switchyard::protocol
