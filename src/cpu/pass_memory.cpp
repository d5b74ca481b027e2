#include "cpu/pass_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "base/posix.h"
#include "fabric/collective.h"
#include "protocol/atomics.h"
#include "switchyard/error.h"

namespace switchyard::cpu {
namespace {

// Pages that are given back read as zeros when they are touched again.
void give_back(std::byte* memory, std::size_t bytes) {
  if (bytes == 0) return;
  // MADV_REMOVE is for memory that other processes map, too; private memory refuses it.
  if (madvise(memory, bytes, MADV_REMOVE) == 0) return;
  if (madvise(memory, bytes, MADV_DONTNEED) != 0)
    throw_errno("cannot give back the memory of a workspace (madvise)");
}

}  // namespace

MemoryNeeds MemoryNeeds::largest(const MemoryNeeds& a, const MemoryNeeds& b) {
  return {protocol::Heap::largest(a.heap, b.heap),
          protocol::HostSums::Shape::largest(a.sums, b.sums), std::max(a.converted, b.converted),
          std::max(a.quantised, b.quantised), std::max(a.intermediate, b.intermediate)};
}

PassMemory::PassMemory(const World& world, const MemoryNeeds& needs, std::uint64_t id)
    : switchyard::PassMemory(world, Backend::kCpu, id),
      needs_(needs),
      heap_(world.fabric().allocate_heap(needs.heap_bytes())) {
  attempt_together(world.fabric(), [&] {
    converted_ = Mapping::anonymous(needs.converted);
    quantised_ = Mapping::anonymous(needs.quantised);
    intermediate_ = Mapping::anonymous(needs.intermediate);
  });
}

void PassMemory::require_room(const MemoryNeeds& needs) const {
  if (MemoryNeeds::largest(needs_, needs) == needs_) return;
  const auto bytes = [](const MemoryNeeds& of) {
    return of.heap_bytes() + of.converted + of.quantised + of.intermediate;
  };
  throw_no_room(bytes(MemoryNeeds::largest(needs_, needs)), bytes(needs_));
}

PassMemory::Use::Use(PassMemory& memory) : memory_(memory) {
  if (memory.in_use_.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorCode::kInvalidArgument,
                "another pass is under way in the same memory; call forward() of layers that share "
                "it one after the other, or give them slots of their own");
  }
  try {
    require_restored(memory);
  } catch (...) {
    memory.in_use_.store(false, std::memory_order_release);
    throw;
  }
  ++memory.epoch_;
}

void PassMemory::end_passes() {
  if (in_use_.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a pass is under way in the workspace; release it when forward() has returned");
  }
  if (released()) return;
  const auto* const control = reinterpret_cast<const protocol::Control*>(mine());
  if (protocol::load_acquire(&control->abort) != 0) throw_given_up();
}

void PassMemory::release() {
  if (released_) return;
  give_back(mine(), heap_->bytes());
  for (const Mapping* const buffer : {&converted_, &quantised_, &intermediate_}) {
    give_back(buffer->data(), buffer->bytes());
  }
  released_ = true;
}

// All flags are down, so passes may be numbered from 1 again.
void PassMemory::restore() {
  // Nobody sends before all ranks have given their pages back.
  attempt_together(world().fabric(), [] {});
  epoch_ = 0;
  released_ = false;
}

}  // namespace switchyard::cpu
