#include "gpu/host/dmabuf.h"

#include <cstdint>

#include "gpu/device.h"
#include "gpu/host/driver_function.h"

namespace switchyard::gpu {

bool exports_dmabuf(int device) {
  const auto get_device = find_driver_function<PFN_cuDeviceGet_v2000>("cuDeviceGet");
  const auto get_attribute =
      find_driver_function<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute");
  CUdevice handle = 0;
  int supported = 0;
  return get_device != nullptr && get_attribute != nullptr &&
         get_device(&handle, device) == CUDA_SUCCESS &&
         get_attribute(&supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, handle) == CUDA_SUCCESS &&
         supported != 0;
}

UniqueFd export_dmabuf(const void* memory, std::size_t bytes) {
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  const auto get_handle = find_driver_function<PFN_cuMemGetHandleForAddressRange_v11070>(
      "cuMemGetHandleForAddressRange");
  int descriptor = -1;
  if (get_handle == nullptr || address % kDmabufPages != 0 || bytes % kDmabufPages != 0 ||
      get_handle(&descriptor, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) !=
          CUDA_SUCCESS) {
    return {};
  }
  return UniqueFd(descriptor);
}

}  // namespace switchyard::gpu
