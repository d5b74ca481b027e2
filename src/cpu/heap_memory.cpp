// Memory of a SymmetricHeap on the CPU: a segment of the fabric, whatever that is.
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "protocol/atomics.h"
#include "symmetric/memory.h"

namespace switchyard::cpu {
namespace {

class SegmentMemory final : public HeapMemory {
 public:
  explicit SegmentMemory(const World& world, std::size_t bytes)
      : rank_count_(world.size()), segment_(world.fabric().allocate(bytes)) {}

  std::byte* start(int rank) const override { return segment_->base(rank); }
  std::size_t reserved() const override { return segment_->bytes(); }
  int device() const override { return -1; }
  PeerControl control(int rank) const override {
    const PeerControl& there = *at(rank);
    PeerControl copy{};
    copy.abort = protocol::load_acquire(&there.abort);
    // The record is complete where a word says so, and may be half written elsewhere.
    if (protocol::load_acquire(&at(0)->verdict) == static_cast<std::uint64_t>(rank) + 1) {
      copy.failure = there.failure;
    }
    return copy;
  }
  void raise(std::uint64_t word) noexcept override {
    for (int r = 0; r < rank_count_; ++r) {
      protocol::compare_exchange(&at(r)->abort, std::uint64_t{0}, word);
    }
  }

 private:
  PeerControl* at(int rank) const { return reinterpret_cast<PeerControl*>(start(rank)); }

  int rank_count_;
  std::shared_ptr<SymmetricSegment> segment_;
};

}  // namespace

std::unique_ptr<HeapMemory> make_heap_memory(const World& world, std::size_t bytes) {
  auto memory = std::make_unique<SegmentMemory>(world, bytes);
  // Nobody writes into memory before all ranks have mapped it.
  attempt_together(world.fabric(), [] {});
  return memory;
}

}  // namespace switchyard::cpu
