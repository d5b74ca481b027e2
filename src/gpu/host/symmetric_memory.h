// Device memory of the same size on the GPUs of all ranks, which every rank's kernels can read and
// write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/fabric.h"
#include "switchyard/workspace.h"

namespace switchyard::gpu {

// The place of a rank's memory.
struct DeviceSite {
  std::int64_t process;
  char bus_id[24];  // the device's PCI address
};
// Collective: gathers the site of every rank, which is the current device of its thread.
std::vector<DeviceSite> gather_device_sites(Fabric& fabric);

// The mechanism by which ranks map each other's memory.
enum class Sharing {
  kFileDescriptors,  // physical memory exported as POSIX file descriptors
  kIpc,              // CUDA IPC handles, a fallback where file descriptors fail
};

class SymmetricMemory {
 public:
  SymmetricMemory() = default;
  // Collective over the ranks of `fabric`. Each rank allocates on the current device of its thread;
  // several ranks may use the same device. Contents are undefined. Throws the same on all ranks:
  // Error{kUnsupported} naming the devices if one cannot reach another's memory,
  // {kCapacityExceeded} if memory is short.
  SymmetricMemory(Fabric& fabric, std::size_t bytes, Sharing sharing = Sharing::kFileDescriptors);

  // Does the same, but the pages can be given back. Collective, too. In a world of one rank they
  // come from `allocator`, if there is one.
  static SymmetricMemory releasable(Fabric& fabric, std::size_t bytes,
                                    const DeviceAllocator& allocator);

  // Null between release() and restore() if the allocator has it.
  std::byte* base(int rank) const { return part(rank)->data; }
  std::size_t bytes() const { return bytes_; }

  // Gives back this rank's pages and lets go of the others', whose ranks have to do the same. Only
  // for releasable memory. Does nothing if that was done.
  void release();
  // Collective. Takes pages again, at the same addresses unless the allocator chooses others.
  // Contents are undefined. Throws as the constructor does, and is released then.
  void restore(Fabric& fabric);

  // One rank's memory as this rank maps it.
  struct Part {
    virtual ~Part() = default;
    std::byte* data = nullptr;
  };

 private:
  Part* part(int rank) const { return parts_[static_cast<std::size_t>(rank)].get(); }
  void map(Fabric& fabric);

  std::vector<std::shared_ptr<Part>> parts_;
  std::size_t bytes_ = 0;
};

}  // namespace switchyard::gpu
