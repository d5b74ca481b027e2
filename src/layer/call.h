// Whether a forward call can be served, decided before anything is sent.
#pragma once

#include "switchyard/layer.h"

namespace switchyard {

// What can be told without reading through an address. `compute` is what the layer computes in.
// Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch, kCapacityExceeded} naming the
// first value that is wrong and the remedy. `rank` is for the message only.
void check_call(const LayerSpec& spec, const MoeWeights& weights, int max_tokens, int rank,
                const ForwardInput& input, const ForwardOutput& output,
                DType compute = DType::kBF16);

// The expert ids or token ids themselves, for a call that passed check_call() and whose memory the
// host can read. Throws Error{kInvalidArgument} naming the first that is wrong.
void check_ids(const LayerSpec& spec, const MoeWeights& weights, const ForwardInput& input);

}  // namespace switchyard
