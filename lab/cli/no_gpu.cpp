#include "cli/no_gpu.h"

#include "gpu/device.h"

namespace switchyard::cli {

namespace {

// How this build was configured, in words: CMake writes the file.
constexpr const char* kWhyNoCuda =
#include "cli/why_no_cuda.inc"
    ;

}  // namespace

std::string why_no_gpu() {
  if (gpu::built_with_cuda())
    return "there is none that CUDA can use ('switchyard doctor' tells more)";
  return std::string("this build has no engine for one: it ") + kWhyNoCuda;
}

}  // namespace switchyard::cli
