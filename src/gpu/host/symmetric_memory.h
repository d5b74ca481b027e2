// Device memory of the same size on the GPUs of all ranks, which every rank's kernels can read and
// write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/fabric.h"

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

  std::byte* base(int rank) const { return part(rank)->data; }
  std::size_t bytes() const { return bytes_; }

  // One rank's memory as this rank maps it.
  struct Part {
    virtual ~Part() = default;
    std::byte* data = nullptr;
  };

 private:
  Part* part(int rank) const { return parts_[static_cast<std::size_t>(rank)].get(); }

  std::vector<std::shared_ptr<Part>> parts_;
  std::size_t bytes_ = 0;
};

}  // namespace switchyard::gpu
