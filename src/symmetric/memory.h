// What SymmetricHeap asks of an engine: memory of all ranks. Each engine is made by its own
// make_heap_memory(); neither knows the other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "switchyard/peer_map.h"
#include "switchyard/world.h"

namespace switchyard {

class HeapMemory {
 public:
  virtual ~HeapMemory() = default;

  // The start of a rank's memory, all of which was 0 at first; a multiple of
  // PeerControl::kBytes, which is what its control takes there.
  virtual std::byte* start(int rank) const = 0;
  virtual std::size_t reserved() const = 0;  // bytes of this rank
  virtual int device() const = 0;            // of this rank; -1: the host
  // A rank's control, as it is now.
  virtual PeerControl control(int rank) const = 0;
  // Sets the abort words of all ranks; on the CPU those only that are 0. Any thread may call it; it
  // does not wait.
  virtual void raise(std::uint64_t word) noexcept = 0;
};

// Collective: returns when all ranks have mapped it.
namespace cpu {
std::unique_ptr<HeapMemory> make_heap_memory(const World& world, std::size_t bytes);
}
namespace gpu {
// `device` may be -1: the current one. `deadline`: how long the end of the memory waits for the
// device. Throws Error{kUnsupported} in a build without CUDA.
std::unique_ptr<HeapMemory> make_heap_memory(const World& world, std::size_t bytes, int device,
                                             std::chrono::milliseconds deadline);
}  // namespace gpu

}  // namespace switchyard
