// Chooses the GPU that runs a layer. This is in builds without CUDA, too: there device_info()
// throws.
#include <fmt/core.h>

#include "gpu/device.h"
#include "layer/engine.h"

namespace switchyard::gpu {

int choose_device(const LayerOptions& options) {
  const int device = options.cuda.device >= 0 ? options.cuda.device : current_device();
  const DeviceInfo info = device_info(device);
  if (!info.runs_our_kernels()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("device {} is an {} of compute capability {}.{}; the kernels are "
                            "compiled for 9.0 (H100, H200)",
                            device, info.name, info.compute_major, info.compute_minor));
  }
  if (options.cuda.reserved_sms >= info.num_sms) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("reserved_sms is {}, but device {} has {} SMs; leave at least 1 to the "
                            "layer",
                            options.cuda.reserved_sms, device, info.num_sms));
  }
  return device;
}

}  // namespace switchyard::gpu
