// Whether a measurement has a floor, and whose.
#pragma once

#include <optional>
#include <string>

#include "machine/gpu_facts.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

struct FloorChoice {
  std::optional<machine::GpuFacts> facts;  // with every roof that the floor needs
  std::string why_not;                     // where there are none: the reason, and the remedy
};

// For `ranks` ranks on a machine with `num_gpus` of `gpu`, as CUDA names it. `given`: facts that
// were given for this run, in place of those in this build. Throws Error{kInvalidArgument} where
// they are of another model.
FloorChoice choose_floor(const std::string& gpu, int num_gpus, int ranks, DType compute,
                         std::optional<machine::GpuFacts> given);

}  // namespace switchyard::bench
