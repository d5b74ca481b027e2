// A layer with its weights in place, and where they came from.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard::run {

struct Source {
  std::string name;    // "olmoe, layer 0"
  std::string origin;  // "generated with seed 0"
  LayerSpec spec;
  MoeWeights weights;
  DType dtype = DType::kBF16;  // of the expert weights
  std::uint64_t bytes = 0;     // of the expert weights, all experts
};

}  // namespace switchyard::run
