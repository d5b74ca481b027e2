// Checks whether a forward call can be served, before anything is sent.
#pragma once

#include "layer/ids.h"
#include "switchyard/layer.h"

namespace switchyard {

// Checks a call without reading through an address. `compute` is the type that the layer computes
// in. Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch, kCapacityExceeded} naming the
// first value that is wrong and the remedy. `rank` is for the message only.
void check_call(const LayerSpec& spec, const MoeWeights& weights, int max_tokens, int rank,
                const ForwardInput& input, const ForwardOutput& output,
                DType compute = DType::kBF16);

// Checks whether a layer that has `old` weights can be given `fresh` ones, which fit its spec and
// are computed in `fresh_compute`. Throws Error{kMissingTensor} if only one of them has a router,
// or a tensor that belongs to it, {kDTypeMismatch} for another compute type.
void require_same_weights(const MoeWeights& old, const MoeWeights& fresh, DType old_compute,
                          DType fresh_compute);

// Throws Error{kInvalidArgument} unless a new placement has as many places as the old one.
void require_as_many_places(int now, int before);

// Checks the expert ids or token ids themselves, for a call that passed check_call() and whose
// memory the host can read. Throws Error{kInvalidArgument} naming the first that is wrong, with
// BadIds::kRaise.
void check_ids(const LayerSpec& spec, const MoeWeights& weights, const ForwardInput& input,
               const IdRules& rules = {});

// Reads given routing into `ids` and `weights`, [T, K], for a call that passed check_ids(); ids
// become those of experts or kNoExpert. Returns the number of bad ones.
std::int64_t read_routing(const LayerSpec& spec, const ForwardInput& input, const IdRules& rules,
                          std::span<std::int32_t> ids, std::span<float> weights);

// Takes slots from experts that have more than expert_capacity() of this rank's: in the order of
// tokens, they become kNoExpert with weight 0. Returns their number.
std::int64_t drop_over_capacity(const LayerSpec& spec, std::int64_t tokens,
                                std::span<std::int32_t> ids, std::span<float> weights);

// Checks rows that a device reads or writes 16 bytes at a time. Throws Error{kInvalidArgument}.
void require_aligned(const char* what, const void* data, std::int64_t row_stride, DType dtype,
                     std::int64_t rows);

}  // namespace switchyard
