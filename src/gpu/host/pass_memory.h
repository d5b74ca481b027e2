// The memory that passes on the GPU work in: of one layer, or of several whose passes follow one
// another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpu/host/symmetric_memory.h"
#include "gpu/layer/params.h"
#include "layer/pass_memory.h"
#include "protocol/heap.h"
#include "switchyard/layer_spec.h"
#include "switchyard/schedule.h"

namespace switchyard::gpu {

// The numbers that the memory of a layer's passes follows from.
struct PassSizes {
  PolicyFacts policy;
  TileOrder order;
  int num_ranks = 1;
  int num_places = 0, own_places = 0;  // of experts, on all ranks and on this one
  int hidden = 0;
  int intermediate = 0, shared_intermediate = 0;  // as matrices have it; 0: none on this rank
  int top_k = 0, max_tokens = 0, gate_columns = 0;
  bool weighs_input = false, has_shared = false;
  std::int64_t low_rows = 0;  // the most rows that a low pass has here; 0: there is none

  int cells_per_token() const { return top_k + (has_shared ? 1 : 0); }
};

// The order of tiles of a layer whose FFNs have so many rows of first weights; 0: no such FFN here.
TileOrder tile_order(const PolicyFacts& policy, const Schedule& schedule, unsigned blocks,
                     std::uint32_t routed_rows, std::uint32_t shared_rows, int depth);

struct MemoryNeeds {
  protocol::Heap::Shape heap;
  std::size_t words = 0;  // of PassWords
  std::size_t data = 0;   // bytes of all that passes keep to themselves

  static MemoryNeeds largest(const MemoryNeeds& a, const MemoryNeeds& b);
  bool operator==(const MemoryNeeds&) const = default;
};

class PassMemory;

// The places in that memory that a layer's passes use.
class PassLayout {
 public:
  explicit PassLayout(const PassSizes& sizes);

  const MemoryNeeds& needs() const { return needs_; }
  // Fills in addresses, maps and what they follow from. `params` has its weights already.
  void describe(const PassMemory& memory, LayerParams& params) const;
  // Makes `params`, which are described, those of low passes: slots are cut into low ones, of so
  // many rows.
  void cut_slots(LayerParams& params, int rows) const;

 private:
  // The maps over packed rows and h, by boxes of so many rows.
  void map_slots(LayerParams& params, const TokenBoxes& boxes) const;

  PassSizes sizes_;
  MemoryNeeds needs_;
  std::uint32_t max_tiles_ = 0, h_slots_ = 0, h_stride_ = 0, x_groups_ = 0, h_groups_ = 0,
                group_words_ = 0, packed_slots_ = 0;
  // Offsets in the data.
  std::size_t logits_ = 0, ids_ = 0, weights_ = 0, positions_ = 0, lists_ = 0, converted_ = 0,
              packed_ = 0, h_ = 0, packed_scales_ = 0, h_scales_ = 0, quantized_ = 0,
              quantized_scales_ = 0;
};

class PassMemory final : public switchyard::PassMemory {
 public:
  // Whether release() may be called: pages are then taken so that they can be given back.
  enum class Lasting { kAsLongAsItLives, kUntilReleased };

  // Collective. Uses the device, which must be current.
  PassMemory(const World& world, int device, const MemoryNeeds& needs, std::uint64_t id,
             Lasting lasting = Lasting::kAsLongAsItLives, const DeviceAllocator& allocator = {});

  std::uint64_t bytes() const override { return heap_.bytes() + private_.bytes(); }
  void end_passes() override;
  void release() override;
  void restore() override;

  // Throws Error{kInvalidArgument} if there is too little, or if the device is another.
  void require_room(const MemoryNeeds& needs, int device) const;
  const MemoryNeeds& needs() const { return needs_; }
  const SymmetricMemory& heap() const { return heap_; }
  std::uint64_t private_bytes() const { return private_.bytes(); }
  // Counts the times that addresses changed.
  unsigned version() const { return version_; }

  // All layers find these words at the same places.
  std::uint64_t* epoch_word() const;
  std::uint32_t* readers() const;
  std::uint32_t* words(bool odd) const;
  std::byte* data() const;

 private:
  std::byte* at(std::size_t offset) const { return private_.base(0) + offset; }
  std::size_t words_offset(bool odd) const;
  std::size_t data_offset() const;
  void clear() const;

  int device_;
  MemoryNeeds needs_;
  World alone_ = World::single();
  SymmetricMemory heap_, private_;
  unsigned version_ = 0;
};

// Returns whether the device finishes all that it was given within that time.
bool device_is_idle(int device, std::chrono::milliseconds limit);

}  // namespace switchyard::gpu
