// Layer specs for tests.
#pragma once

#include "switchyard/layer_spec.h"

namespace switchyard::testing {

// A layer of gated experts, with nothing beside.
inline LayerSpec spec_of(int hidden, int intermediate, int experts, int top_k) {
  LayerSpec spec;
  spec.hidden = hidden;
  spec.intermediate = intermediate;
  spec.num_experts = experts;
  spec.top_k = top_k;
  return spec;
}

}  // namespace switchyard::testing
