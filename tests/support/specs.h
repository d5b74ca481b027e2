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

// The same with all that a layer copies beside its matrices.
inline LayerSpec with_everything(LayerSpec spec, int shared_intermediate) {
  spec.expert_bias = true;
  spec.router_bias = true;
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  spec.shared_intermediate = shared_intermediate;
  spec.shared_sigmoid_gate = true;
  return spec;
}

}  // namespace switchyard::testing
