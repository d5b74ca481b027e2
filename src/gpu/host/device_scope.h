// Makes a device current for the calling thread while it lives.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/device.h"

namespace switchyard::gpu {

class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(current_device()) {
    if (device != before_) set_device(device);
    changed_ = device != before_;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
  bool changed_;
};

}  // namespace switchyard::gpu
