// Decides if a measurement has a floor, and by which GPU's facts.
#pragma once

#include <optional>
#include <string>

#include "machine/gpu_facts.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

struct FloorChoice {
  std::optional<machine::GpuFacts> facts;  // with every roof that the floor needs
  std::string why_not;                     // if there are no facts: the reason, and the remedy
};

// Chooses the facts for `ranks` ranks on a machine with `num_gpus` of `gpu`, as CUDA names it.
// `given`: facts that replace this build's facts for this run. Throws Error{kInvalidArgument} if
// they are of another model.
FloorChoice choose_floor(const std::string& gpu, int num_gpus, int ranks, DType compute,
                         std::optional<machine::GpuFacts> given);

}  // namespace switchyard::bench
