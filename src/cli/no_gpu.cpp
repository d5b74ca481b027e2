#include "cli/no_gpu.h"

#include "gpu/device.h"

namespace switchyard::cli {

std::string why_no_gpu() {
  if (gpu::built_with_cuda())
    return "there is none that CUDA can use ('switchyard doctor' tells more)";
  return "this build has no engine for one: it " SWITCHYARD_WHY_NO_CUDA;
}

}  // namespace switchyard::cli
