// Why there is no GPU to run on, for messages of all commands.
#pragma once

#include <string>

namespace switchyard::cli {

// Completes "... needs a GPU, and": that CUDA finds none, or how this build came to be without the
// engine.
std::string why_no_gpu();

}  // namespace switchyard::cli
