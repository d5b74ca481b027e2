// The work of a pass, and its distribution over experts.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/gpu_facts.h"
#include "switchyard/layer_spec.h"
#include "switchyard/weights.h"

namespace switchyard::bench {

using machine::Load;

// Returns the largest work of any of `ranks` ranks. Each number is a maximum by itself, so two
// numbers may come from different ranks. tokens_per_expert [E] counts the tokens of all ranks. A
// rank computes its own experts, and the shared expert for its tokens_per_rank tokens. The bytes
// that it sends are not set here, because the layer counts them.
Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks);

// Returns the experts' loads as multiples of their mean, in ascending order. There is one number
// per expert. More than 64 experts are described by 64 quantiles (nearest rank), from the least
// loaded to the most loaded. The result is empty if there were no tokens.
std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert);

// The value below which `share` of the values lie (nearest rank). Throws Error{kInvalidArgument} if
// there are no values.
double percentile(std::vector<double> values, double share);

}  // namespace switchyard::bench
