// The work of a pass, and how its experts share it.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/gpu_facts.h"
#include "switchyard/layer_spec.h"
#include "switchyard/weights.h"

namespace switchyard::bench {

using machine::Load;

// The most that any of `ranks` ranks has to do, in each respect by itself, when tokens_per_expert
// [E] counts the tokens of all of them: the experts that are the rank's, and the shared expert for
// its tokens_per_rank tokens. The bytes it sends are for the layer to tell.
Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks);

// The load of experts that got `tokens_per_expert` tokens, sorted, as multiples of their mean: of
// each expert, or of more than 64 the quantiles from the least to the most (nearest rank). Empty
// where no token came.
std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert);

// The value below which `share` of the values lie (nearest rank). Throws Error{kInvalidArgument}
// for no values.
double percentile(std::vector<double> values, double share);

}  // namespace switchyard::bench
