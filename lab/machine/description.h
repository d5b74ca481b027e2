// The description of the machine that rows of results were measured on.
#pragma once

#include <string>
#include <string_view>

#include "switchyard/layer.h"

namespace switchyard::machine {

// The GPUs that the ranks use, e.g. "2 x NVIDIA H200, 132 SMs, CUDA 13.0", or the processor's name
// and its threads.
std::string describe_machine(Backend backend, int ranks);

// The name of the GPU or the processor in such a description: "NVIDIA H200".
std::string_view processor_of(std::string_view description);

}  // namespace switchyard::machine
