// The work of a pass, and its distribution over experts.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/gpu_facts.h"
#include "switchyard/layer_spec.h"
#include "switchyard/weights.h"

namespace switchyard::bench {

using machine::Load;

// The largest work of any of `ranks` ranks; each number is a maximum by itself. tokens_per_expert
// [E] counts the tokens of all ranks. A rank has its own experts, and the shared expert for its
// tokens_per_rank tokens. The bytes it sends are not set here: the layer counts them.
Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks);

// The load of experts that got `tokens_per_expert` tokens, sorted, as multiples of their mean. It
// has a number for each expert or, for more than 64 experts, the quantiles from the least to the
// most (nearest rank). Empty if there were no tokens.
std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert);

// The value below which `share` of the values lie (nearest rank). Throws Error{kInvalidArgument} if
// there are no values.
double percentile(std::vector<double> values, double share);

}  // namespace switchyard::bench
