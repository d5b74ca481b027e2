// Memory that passes on the CPU work in: of one layer, or of several whose passes follow one
// another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/mapping.h"
#include "fabric/fabric.h"
#include "layer/pass_memory.h"
#include "protocol/heap.h"
#include "protocol/host_sums.h"

namespace switchyard::cpu {

// The sizes of the memory that a pass works in.
struct MemoryNeeds {
  protocol::Heap::Shape heap;
  protocol::HostSums::Shape sums;
  std::size_t converted = 0;     // bytes of activations in the type of the arithmetic
  std::size_t quantised = 0;     // bytes of activations as they travel in FP8
  std::size_t intermediate = 0;  // bytes of all slots for tiles of h

  // The host sums stand behind the heap, in the same memory.
  protocol::HostSums host_sums() const {
    return protocol::HostSums(sums, protocol::Heap(heap).bytes());
  }
  std::uint64_t heap_bytes() const { return host_sums().end(); }
  static MemoryNeeds largest(const MemoryNeeds& a, const MemoryNeeds& b);
  bool operator==(const MemoryNeeds&) const = default;
};

class PassMemory final : public switchyard::PassMemory {
 public:
  // Collective.
  PassMemory(const World& world, const MemoryNeeds& needs, std::uint64_t id);

  std::uint64_t bytes() const override {
    return heap_->bytes() + converted_.bytes() + quantised_.bytes() + intermediate_.bytes();
  }
  void end_passes() override;
  void release() override;
  void restore() override;

  // Throws Error{kInvalidArgument} if there is too little.
  void require_room(const MemoryNeeds& needs) const;
  const MemoryNeeds& needs() const { return needs_; }
  std::shared_ptr<const SymmetricSegment> heap() const { return heap_; }
  std::byte* converted() const { return converted_.data(); }
  std::byte* quantised() const { return quantised_.data(); }
  std::byte* intermediate() const { return intermediate_.data(); }

  // A pass of this rank, which ends with the scope. Throws Error{kInvalidArgument} if another is
  // under way, or if the memory was released.
  class Use {
   public:
    explicit Use(PassMemory& memory);
    ~Use() { memory_.in_use_.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    std::uint64_t epoch() const { return memory_.epoch_; }  // its number, from 1

   private:
    PassMemory& memory_;
  };

 private:
  std::byte* mine() const { return heap_->base(world().rank()); }

  MemoryNeeds needs_;
  std::shared_ptr<SymmetricSegment> heap_;
  Mapping converted_, quantised_, intermediate_;
  std::uint64_t epoch_ = 0;
  std::atomic<bool> in_use_ = false;
};

}  // namespace switchyard::cpu
