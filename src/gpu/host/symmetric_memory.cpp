#include "gpu/host/symmetric_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <span>
#include <utility>

#include "fabric/collective.h"
#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/driver_function.h"
#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

// The driver's functions for physical memory.
struct Driver {
#define SWITCHYARD_DRIVER(name, version) \
  PFN_##name##_v##version name = driver_function<PFN_##name##_v##version>(#name)
  SWITCHYARD_DRIVER(cuGetErrorName, 6000);
  SWITCHYARD_DRIVER(cuMemGetAllocationGranularity, 10020);
  SWITCHYARD_DRIVER(cuMemCreate, 10020);
  SWITCHYARD_DRIVER(cuMemRelease, 10020);
  SWITCHYARD_DRIVER(cuMemAddressReserve, 10020);
  SWITCHYARD_DRIVER(cuMemAddressFree, 10020);
  SWITCHYARD_DRIVER(cuMemMap, 10020);
  SWITCHYARD_DRIVER(cuMemUnmap, 10020);
  SWITCHYARD_DRIVER(cuMemSetAccess, 10020);
  SWITCHYARD_DRIVER(cuMemExportToShareableHandle, 10020);
  SWITCHYARD_DRIVER(cuMemImportFromShareableHandle, 10020);
#undef SWITCHYARD_DRIVER
};
const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check_driver(CUresult result, const char* what, std::size_t bytes) {
  if (result == CUDA_SUCCESS) return;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    check_allocation(cudaErrorMemoryAllocation, what, bytes);
  }
  const char* name = nullptr;
  if (driver().cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "?";
  throw Error(ErrorCode::kSystem,
              fmt::format("{} failed with {} ({})", what, static_cast<int>(result), name));
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

std::size_t granularity(int device) {
  const CUmemAllocationProp prop = properties(device);
  std::size_t bytes = 0;
  check_driver(
      driver().cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "cuMemGetAllocationGranularity", 0);
  return bytes;
}

// An address range of this process and, while it is mapped, physical memory, made here or imported.
// Physical memory lives as long as its last mapping in any process.
class MappedPart final : public SymmetricMemory::Part {
 public:
  MappedPart(CUmemGenericAllocationHandle handle, std::size_t bytes) : bytes_(bytes) {
    CUdeviceptr address = 0;
    check_driver(driver().cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve",
                 bytes);
    data = reinterpret_cast<std::byte*>(address);
    try {
      map(handle);
    } catch (...) {
      (void)driver().cuMemAddressFree(address, bytes_);
      throw;
    }
  }
  ~MappedPart() override {
    // A destructor can do nothing about failures of these calls.
    unmap();
    (void)driver().cuMemAddressFree(address(), bytes_);
  }
  MappedPart(const MappedPart&) = delete;
  MappedPart& operator=(const MappedPart&) = delete;

  void map(CUmemGenericAllocationHandle handle) {
    check_driver(driver().cuMemMap(address(), bytes_, 0, handle, 0), "cuMemMap", bytes_);
    mapped_ = true;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = current_device();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    try {
      check_driver(driver().cuMemSetAccess(address(), bytes_, &access, 1), "cuMemSetAccess",
                   bytes_);
    } catch (...) {
      unmap();
      throw;
    }
  }
  void unmap() {
    if (mapped_) (void)driver().cuMemUnmap(address(), bytes_);
    mapped_ = false;
  }

 private:
  CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(data); }

  std::size_t bytes_;
  bool mapped_ = false;
};

// A handle to physical memory, held while the memory is exported and mapped.
class PhysicalMemory {
 public:
  explicit PhysicalMemory(std::size_t bytes) {
    const CUmemAllocationProp prop = properties(current_device());
    check_driver(driver().cuMemCreate(&handle_, bytes, &prop, 0), "cuMemCreate", bytes);
  }
  explicit PhysicalMemory(const UniqueFd& file) {
    void* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(file.get()));
    check_driver(driver().cuMemImportFromShareableHandle(&handle_, descriptor,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "cuMemImportFromShareableHandle", 0);
  }
  ~PhysicalMemory() { (void)driver().cuMemRelease(handle_); }
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  UniqueFd to_file() const {
    int descriptor = -1;
    check_driver(driver().cuMemExportToShareableHandle(&descriptor, handle_,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "cuMemExportToShareableHandle", 0);
    return UniqueFd(descriptor);
  }
  // Maps it into a new range, or into that of a part that was unmapped.
  void map(std::shared_ptr<SymmetricMemory::Part>& part, std::size_t bytes) const {
    if (part == nullptr) {
      part = std::make_shared<MappedPart>(handle_, bytes);
    } else {
      static_cast<MappedPart&>(*part).map(handle_);
    }
  }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
};

// Memory from the caller's allocator. It starts at a multiple of what layouts are aligned to.
struct AllocatedPart final : SymmetricMemory::Part {
  static constexpr std::size_t kAlignment = 1024;

  AllocatedPart(std::size_t size, const DeviceAllocator& from) : allocator(from), bytes(size) {
    allocate();
  }
  ~AllocatedPart() override { free(); }
  AllocatedPart(const AllocatedPart&) = delete;
  AllocatedPart& operator=(const AllocatedPart&) = delete;

  void allocate() {
    memory = allocator.allocate(bytes + kAlignment);
    if (memory == nullptr) {
      throw Error(
          ErrorCode::kCapacityExceeded,
          fmt::format("the workspace's allocator has no {} bytes; make a smaller workspace, "
                      "or free some memory",
                      bytes + kAlignment));
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    data = static_cast<std::byte*>(memory) +
           (protocol::round_up<std::uintptr_t>(address, kAlignment) - address);
  }
  void free() {
    if (memory != nullptr) allocator.free(memory);
    memory = nullptr;
    data = nullptr;
  }

  DeviceAllocator allocator;
  std::size_t bytes;
  void* memory = nullptr;
};
struct OwnedPart final : SymmetricMemory::Part {
  explicit OwnedPart(std::size_t bytes) : memory(bytes) { data = memory.data(); }
  DeviceBuffer memory;
};
struct OpenedPart final : SymmetricMemory::Part {
  explicit OpenedPart(const cudaIpcMemHandle_t& handle) {
    void* memory = nullptr;
    SWITCHYARD_CUDA(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess));
    data = static_cast<std::byte*>(memory);
  }
  ~OpenedPart() override { (void)cudaIpcCloseMemHandle(data); }
  OpenedPart(const OpenedPart&) = delete;
  OpenedPart& operator=(const OpenedPart&) = delete;
};

void require_reach(std::span<const DeviceSite> ranks, int me) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    int theirs = 0;
    // This process may not see the device at all. Mapping its memory will then report that.
    if (cudaDeviceGetByPCIBusId(&theirs, ranks[r].bus_id) != cudaSuccess) {
      (void)cudaGetLastError();
      continue;
    }
    if (theirs == current_device()) continue;
    int can = 0;
    SWITCHYARD_CUDA(cudaDeviceCanAccessPeer(&can, current_device(), theirs));
    if (can != 0) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the GPU of rank {} ({}) cannot access that of rank {} ({}); choose "
                            "GPUs that are linked by NVLink or PCIe peer access",
                            me, ranks[static_cast<std::size_t>(me)].bus_id, r, ranks[r].bus_id));
  }
}

}  // namespace

std::vector<DeviceSite> gather_device_sites(Fabric& fabric) {
  DeviceSite here{::getpid(), {}};
  attempt_together(fabric, [&] {
    SWITCHYARD_CUDA(cudaDeviceGetPCIBusId(here.bus_id, sizeof here.bus_id, current_device()));
  });
  return gather(fabric, here);
}

SymmetricMemory::SymmetricMemory(Fabric& fabric, std::size_t bytes, Sharing sharing) {
  const auto me = static_cast<std::size_t>(fabric.rank());
  parts_.resize(static_cast<std::size_t>(fabric.size()));
  bytes_ = bytes;
  if (parts_.size() == 1) {
    parts_[0] = std::make_shared<OwnedPart>(bytes);
    return;
  }
  const std::vector<DeviceSite> everybody = gather_device_sites(fabric);
  attempt_together(fabric, [&] { require_reach(everybody, fabric.rank()); });

  if (sharing == Sharing::kFileDescriptors) {
    map(fabric);
    return;
  }

  struct Memory {
    const std::shared_ptr<Part>* part;  // for threads of the same process
    cudaIpcMemHandle_t handle;
    int device;
  };
  Memory mine{};
  attempt_together(fabric, [&] {
    parts_[me] = std::make_shared<OwnedPart>(bytes);
    mine = {&parts_[me], {}, current_device()};
    SWITCHYARD_CUDA(cudaIpcGetMemHandle(&mine.handle, parts_[me]->data));
  });
  const std::vector<Memory> theirs = gather(fabric, mine);
  attempt_together(fabric, [&] {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      if (r == me) continue;
      if (everybody[r].process != everybody[me].process) {
        parts_[r] = std::make_shared<OpenedPart>(theirs[r].handle);
        continue;
      }
      // A process cannot open its own handles, so ranks of the same process share the mapping.
      parts_[r] = *theirs[r].part;
      if (theirs[r].device == mine.device) continue;
      const cudaError_t result = cudaDeviceEnablePeerAccess(theirs[r].device, 0);
      if (result == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        check(result, "cudaDeviceEnablePeerAccess");
      }
    }
  });
}

// Makes physical memory and maps that of all ranks, at the earlier addresses if there are any.
void SymmetricMemory::map(Fabric& fabric) {
  const auto me = static_cast<std::size_t>(fabric.rank());
  UniqueFd file;
  attempt_together(fabric, [&] {
    bytes_ = protocol::round_up(bytes_, granularity(current_device()));
    const PhysicalMemory memory(bytes_);
    memory.map(parts_[me], bytes_);
    if (parts_.size() > 1) file = memory.to_file();
  });
  if (parts_.size() == 1) return;
  const std::vector<UniqueFd> files = fabric.exchange_fds(file.get());
  attempt_together(fabric, [&] {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      if (r != me) PhysicalMemory(files[r]).map(parts_[r], bytes_);
    }
  });
}

SymmetricMemory SymmetricMemory::releasable(Fabric& fabric, std::size_t bytes,
                                            const DeviceAllocator& allocator) {
  if (fabric.size() > 1) return {fabric, bytes};
  SymmetricMemory memory;
  memory.parts_.resize(1);
  memory.bytes_ = bytes;
  if (allocator) {
    memory.parts_[0] = std::make_shared<AllocatedPart>(bytes, allocator);
  } else {
    memory.map(fabric);
  }
  return memory;
}

void SymmetricMemory::release() {
  for (const std::shared_ptr<Part>& part : parts_) {
    if (auto* const allocated = dynamic_cast<AllocatedPart*>(part.get())) {
      allocated->free();
    } else {
      static_cast<MappedPart&>(*part).unmap();
    }
  }
}

void SymmetricMemory::restore(Fabric& fabric) {
  try {
    if (auto* const allocated = dynamic_cast<AllocatedPart*>(parts_[0].get())) {
      attempt_together(fabric, [&] { allocated->allocate(); });
    } else {
      map(fabric);
    }
  } catch (...) {
    release();
    throw;
  }
}

}  // namespace switchyard::gpu
