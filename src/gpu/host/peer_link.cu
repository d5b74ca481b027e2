#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/peer_link.h"

namespace switchyard::gpu {
namespace {

__global__ void copy_all(uint4* to, const uint4* from, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

// Returns "NVLink", "PCIe" or "unknown". The CUDA runtime does not tell; the management library
// does. That library comes with the driver, and we do not link with it.
std::string kind_of_link(int from, int to) {
  constexpr int kNvlinkCapability = 2, kOk = 0;  // NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return "unknown";
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto by_bus_id = reinterpret_cast<int (*)(const char*, void**)>(
      dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
  const auto status_of =
      reinterpret_cast<int (*)(void*, void*, int, int*)>(dlsym(library, "nvmlDeviceGetP2PStatus"));
  const auto shutdown = reinterpret_cast<int (*)()>(dlsym(library, "nvmlShutdown"));
  std::string kind = "unknown";
  if (init != nullptr && by_bus_id != nullptr && status_of != nullptr && shutdown != nullptr &&
      init() == 0) {
    void* handles[2] = {};
    bool found = true;
    for (int i = 0; i < 2; ++i) {
      char bus_id[24];
      SWITCHYARD_CUDA(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, i == 0 ? from : to));
      found &= by_bus_id(bus_id, &handles[i]) == 0;
    }
    int status = -1;
    if (found && status_of(handles[0], handles[1], kNvlinkCapability, &status) == 0) {
      kind = status == kOk ? "NVLink" : "PCIe";
    }
    shutdown();
  }
  dlclose(library);
  return kind;
}

}  // namespace

PeerLink peer_link(int from, int to) {
  int reachable = 0, atomics = 0;
  SWITCHYARD_CUDA(cudaDeviceCanAccessPeer(&reachable, from, to));
  SWITCHYARD_CUDA(
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to));
  return {reachable != 0, atomics != 0, kind_of_link(from, to)};
}

double peer_write_rate(int from, int to) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  constexpr int kThreads = 512, kRepeats = 5;
  const int before = current_device();
  set_device(to);
  const DeviceBuffer target(kBytes);
  set_device(from);
  const DeviceBuffer source(kBytes);
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    check(enabled, "cudaDeviceEnablePeerAccess");
  }
  SWITCHYARD_CUDA(cudaMemset(source.data(), 0x5a, kBytes));
  const int blocks = device_info(from).num_sms;
  const Stream stream;
  double best_us = 0;
  for (int i = 0; i < kRepeats; ++i) {
    Event start, end;
    start.record(stream);
    copy_all<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle())>>>(
        reinterpret_cast<uint4*>(target.data()), reinterpret_cast<const uint4*>(source.data()),
        kBytes / sizeof(uint4));
    SWITCHYARD_CUDA(cudaGetLastError());
    end.record(stream);
    const double us = Event::elapsed_us(start, end);
    if (i == 0 || us < best_us) best_us = us;
  }
  set_device(before);
  return static_cast<double>(kBytes) / best_us * 1e6;
}

}  // namespace switchyard::gpu
