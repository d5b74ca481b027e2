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

// Chooses the facts for `ranks` ranks on a machine that has `num_gpus` GPUs. `gpu` is their model,
// as CUDA names it. `given` replaces this build's own facts for this run. Throws
// Error{kInvalidArgument} if `given` is of another model.
FloorChoice choose_floor(const std::string& gpu, int num_gpus, int ranks, DType compute,
                         std::optional<machine::GpuFacts> given);

// The least time in which rows cross NVLink to another rank and back, or one way if the reader also
// says that it is done: two flags of 1.37 us, and `bytes` of the busiest rank at 330 GB/s, which is
// what each of eight H200s gets out while it writes to the seven others. Empty without GPUs, on
// one rank, and where ranks share GPUs: their rows do not cross.
std::optional<double> links_floor_us(double bytes, int ranks, int num_gpus);

}  // namespace switchyard::bench
