// The problem that validate(LayerSpec) finds, for messages to people who never wrote a LayerSpec.
#pragma once

#include <string>

#include "switchyard/layer_spec.h"

namespace switchyard {

// The first problem, e.g. "top_k is 9: set it to a value in [1, 8]"; empty if the spec is valid.
std::string layer_problem(const LayerSpec& spec);
// The same for an activation alone.
std::string activation_problem(const Activation& activation);

}  // namespace switchyard
