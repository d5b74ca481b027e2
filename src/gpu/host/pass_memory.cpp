#include "gpu/host/pass_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <optional>
#include <system_error>
#include <thread>

#include "base/quantize.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/tensor_map.h"
#include "gpu/host/weights.h"
#include "gpu/schedule/rules.h"
#include "layer/engine.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

// Sizes within one allocation.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 1024;

  std::size_t place(std::size_t bytes) {
    const std::size_t at = size_;
    size_ += protocol::round_up(bytes, kAlignment);
    return at;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

// The most rows of routed experts on this rank.
std::int64_t most_rows(const PassSizes& sizes) {
  return std::int64_t{sizes.max_tokens} * sizes.num_ranks * std::min(sizes.top_k, sizes.own_places);
}
// Returns the most tiles of so many rows. Each of two rounds may end in a tile that is not full.
std::size_t most_tiles(const PassSizes& sizes, std::int64_t rows, int height) {
  const int rounds = sizes.num_ranks > 1 ? 2 : 1;
  const int shared = sizes.has_shared ? protocol::ceil_div(sizes.max_tokens, height) : 0;
  return static_cast<std::size_t>(rounds * std::max(1, sizes.own_places) + rows / height + shared);
}

protocol::Heap::Shape heap_shape(const PassSizes& sizes) {
  const auto tokens = static_cast<std::size_t>(sizes.max_tokens);
  // Small passes may have several cells for a slot.
  const std::size_t cell_tokens =
      sizes.num_ranks > 1
          ? tokens
          : std::max(tokens, std::min(tokens, static_cast<std::size_t>(sizes.policy.small_tokens))
                                 << kMaxLog2Splits);
  protocol::Heap::Shape shape;
  shape.num_ranks = sizes.num_ranks;
  shape.num_experts = sizes.num_places;
  shape.hidden = sizes.hidden;
  shape.max_tokens = sizes.max_tokens;
  shape.element_bytes = sizes.policy.numerics.token_bytes();
  shape.scaled = sizes.policy.numerics.scaled();
  shape.weighs_input = sizes.weighs_input;
  shape.cell_bytes = cell_tokens * static_cast<std::size_t>(sizes.cells_per_token()) *
                     static_cast<std::size_t>(sizes.hidden) * 2;
  if (sizes.num_ranks > 1 && sizes.num_ranks <= protocol::kMostFewRows) {
    shape.few_hidden = sizes.hidden;
  }
  return shape;
}

}  // namespace

TileOrder tile_order(const PolicyFacts& policy, const Schedule& schedule, unsigned blocks,
                     std::uint32_t routed_rows, std::uint32_t shared_rows, int depth) {
  constexpr std::uint32_t kLeastBandRows = 32 * kTileRows;
  const std::uint32_t rows = routed_rows == 0 || (shared_rows != 0 && shared_rows < routed_rows)
                                 ? shared_rows
                                 : routed_rows;
  const int stages = protocol::ceil_div(depth * policy.numerics.token_bytes(),
                                        policy.stage_parts * kStageRowBytes);
  return choose_order(schedule, {blocks, rows, static_cast<std::uint32_t>(policy.tile.weight_rows),
                                 static_cast<std::uint32_t>(policy.tile.max_height()),
                                 kLeastBandRows, static_cast<std::uint32_t>(stages),
                                 policy.numerics.makes_codes() ? kRoundsWithCodes : kRounds});
}

MemoryNeeds MemoryNeeds::largest(const MemoryNeeds& a, const MemoryNeeds& b) {
  return {protocol::Heap::largest(a.heap, b.heap), std::max(a.words, b.words),
          std::max(a.data, b.data)};
}

PassLayout::PassLayout(const PassSizes& sizes) : sizes_(sizes) {
  const auto tokens = static_cast<std::size_t>(sizes.max_tokens);
  const auto experts = static_cast<std::size_t>(sizes.num_places);
  const auto hidden = static_cast<std::size_t>(sizes.hidden);
  const std::size_t slots = tokens * static_cast<std::size_t>(sizes.top_k);
  const auto height = static_cast<std::size_t>(sizes.policy.tile.max_height());
  const Numerics& numerics = sizes.policy.numerics;
  const std::size_t tiles = most_tiles(sizes, most_rows(sizes), static_cast<int>(height));
  const std::size_t low_tiles =
      most_tiles(sizes, std::min(most_rows(sizes), sizes.low_rows), kLowRows);
  max_tiles_ = static_cast<std::uint32_t>(sizes.low_rows == 0 ? tiles : std::max(tiles, low_tiles));
  h_slots_ = static_cast<std::uint32_t>(h_slots(sizes.order, tiles));
  h_stride_ = static_cast<std::uint32_t>(std::max(sizes.intermediate, sizes.shared_intermediate));

  // Logits of kNominalBlocks slices of tiles at most, or of one slice; see route/gate.cuh.
  const auto logits_columns = static_cast<std::size_t>(sizes.gate_columns);
  const std::size_t logits_tokens = std::max(
      tokens,
      std::min<std::size_t>(tokens * kMaxGateSlices, std::size_t{kNominalBlocks} * kGateBoxRows));
  const auto groups = [&](std::int64_t columns) {
    return numerics.scaled()
               ? static_cast<std::uint32_t>(protocol::ceil_div<std::int64_t>(columns, kQuantGroup))
               : 0;
  };
  x_groups_ = groups(sizes.hidden);
  h_groups_ = groups(h_stride_);
  // Blocks of a pair count up to a block past the last group.
  const bool counts_parts = numerics.makes_codes() || sizes.num_ranks == 1;
  group_words_ = counts_parts ? protocol::ceil_div(h_groups_ + 1, PassWords::kGroupsOfWord) : 0;
  // Rows that are packed together wait together. So none may wait for a slot that another one's
  // tile has.
  packed_slots_ = static_cast<std::uint32_t>(
      std::max<std::size_t>(h_slots_, std::min<std::size_t>(tiles, kPackedTogether)));
  const auto element = static_cast<std::size_t>(numerics.token_bytes());
  Arena arena;
  logits_ = arena.place(logits_tokens * logits_columns * sizeof(float));
  ids_ = arena.place(slots * 4);
  weights_ = arena.place(tokens * static_cast<std::size_t>(sizes.cells_per_token()) * 4);
  positions_ = arena.place(slots * 4);
  lists_ = arena.place(experts * tokens * 4);
  converted_ = arena.place(tokens * hidden * 2);
  packed_ = arena.place(packed_slots_ * height * hidden * element);
  const auto stretch = static_cast<std::size_t>(sizes.policy.hidden_stretch);
  h_ = arena.place(h_slots_ * height * stretch * h_stride_ * element);
  packed_scales_ = arena.place(packed_slots_ * x_groups_ * height * sizeof(float));
  h_scales_ = arena.place(h_slots_ * h_groups_ * height * sizeof(float));
  quantized_ = arena.place(numerics.scaled() ? tokens * hidden : 0);
  quantized_scales_ = arena.place(tokens * x_groups_ * sizeof(float));
  needs_ = {heap_shape(sizes),
            PassWords::count(static_cast<std::uint32_t>(experts), max_tiles_, group_words_),
            arena.size()};
}

void PassLayout::describe(const PassMemory& memory, LayerParams& params) const {
  params.max_tiles = max_tiles_;
  params.h_slots = h_slots_;
  params.h_stride = h_stride_;
  params.x_groups = x_groups_;
  params.h_groups = h_groups_;
  params.group_words = group_words_;
  params.packed_slots = packed_slots_;

  params.heap = protocol::Heap::within(memory.needs().heap, needs_.heap);
  const World& world = memory.world();
  params.heaps.experts = {sizes_.num_places, world.size()};
  params.heaps.rank = world.rank();
  for (int r = 0; r < world.size(); ++r) params.heaps.base[r] = memory.heap().base(r);
  params.mine = memory.heap().base(world.rank());
  params.cells = reinterpret_cast<std::uint16_t*>(params.heap.cells().in(params.mine));

  params.epoch_word = memory.epoch_word();
  params.readers = memory.readers();
  for (const bool odd : {false, true}) params.pass_words[odd ? 1 : 0] = {memory.words(odd)};
  params.num_pass_words = static_cast<std::uint32_t>(memory.needs().words);
  const auto at = [&]<typename T>(std::size_t offset, T*& pointer) {
    pointer = reinterpret_cast<T*>(memory.data() + offset);
  };
  at(logits_, params.partial_logits);
  at(ids_, params.ids);
  at(weights_, params.weights);
  at(positions_, params.positions);
  at(lists_, params.lists);
  at(converted_, params.converted);
  at(packed_, params.packed);
  at(packed_scales_, params.packed_scales);
  at(h_, params.h);
  at(h_scales_, params.h_scales);
  at(quantized_, params.quantized);
  at(quantized_scales_, params.quantized_scales);
  map_slots(params, kUsualTokenBoxes);
}

void PassLayout::map_slots(LayerParams& params, const TokenBoxes& boxes) const {
  const auto rows_of = [&](std::uint32_t slots) {
    return std::int64_t{slots} * sizes_.policy.tile.max_height();
  };
  const int element = sizes_.policy.numerics.token_bytes();
  params.x_maps = token_maps(params.packed, element, rows_of(packed_slots_), sizes_.hidden,
                             sizes_.hidden, boxes);
  for (FfnParams* ffn : {&params.routed, &params.shared}) {
    if (ffn->intermediate == 0) continue;
    ffn->h_maps = token_maps(params.h, element, sizes_.policy.hidden_stretch * rows_of(h_slots_),
                             ffn->intermediate, h_stride_, boxes);
  }
}

void PassLayout::cut_slots(LayerParams& params, int rows) const {
  const auto slots = static_cast<std::uint32_t>(sizes_.policy.tile.max_height() / rows);
  params.h_slots = h_slots_ * slots;
  params.packed_slots = packed_slots_ * slots;
  map_slots(params, kLowTokenBoxes);
}

// --- The memory: first words at fixed places, which are zero when the first pass begins.

namespace {
constexpr std::size_t kEpochOffset = 0, kReadersOffset = Arena::kAlignment,
                      kWordsOffset = 2 * Arena::kAlignment;
}

std::size_t PassMemory::words_offset(bool odd) const {
  return kWordsOffset + (odd ? protocol::round_up(needs_.words * 4, Arena::kAlignment) : 0);
}
std::size_t PassMemory::data_offset() const {
  return kWordsOffset + 2 * protocol::round_up(needs_.words * 4, Arena::kAlignment);
}
std::uint64_t* PassMemory::epoch_word() const {
  return reinterpret_cast<std::uint64_t*>(at(kEpochOffset));
}
std::uint32_t* PassMemory::readers() const {
  return reinterpret_cast<std::uint32_t*>(at(kReadersOffset));
}
std::uint32_t* PassMemory::words(bool odd) const {
  return reinterpret_cast<std::uint32_t*>(at(words_offset(odd)));
}
std::byte* PassMemory::data() const { return at(data_offset()); }

PassMemory::PassMemory(const World& world, int device, const MemoryNeeds& needs, std::uint64_t id,
                       Lasting lasting, const DeviceAllocator& allocator)
    : switchyard::PassMemory(world, Backend::kCuda, id), device_(device), needs_(needs) {
  const std::size_t heap_bytes = protocol::Heap(needs.heap).bytes();
  const std::size_t private_bytes = data_offset() + needs.data;
  if (lasting == Lasting::kUntilReleased) {
    heap_ = SymmetricMemory::releasable(world.fabric(), heap_bytes, allocator);
  } else {
    heap_ = SymmetricMemory(world.fabric(), heap_bytes);
  }
  // This is a barrier: nobody writes into a heap before its owner has zeroed its flags.
  attempt_together(world.fabric(), [&] {
    private_ = lasting == Lasting::kUntilReleased
                   ? SymmetricMemory::releasable(alone_.fabric(), private_bytes, allocator)
                   : SymmetricMemory(alone_.fabric(), private_bytes);
    clear();
  });
}

// Fills all but flags with NaN, so that no pass can get away with reading what nobody wrote.
void PassMemory::clear() const {
  const auto fill = [](std::byte* memory, std::size_t zeroed, std::size_t bytes) {
    SWITCHYARD_CUDA(cudaMemset(memory, 0, zeroed));
    SWITCHYARD_CUDA(cudaMemset(memory + zeroed, 0xff, bytes - zeroed));
  };
  const protocol::Heap heap(needs_.heap);
  fill(heap_.base(world().rank()), heap.flag_bytes(), heap.bytes());
  fill(private_.base(0), data_offset(), data_offset() + needs_.data);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
}

void PassMemory::require_room(const MemoryNeeds& needs, int device) const {
  if (device != device_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the layer is on device {}, and the memory that it is given on {}; use "
                            "the same",
                            device, device_));
  }
  if (MemoryNeeds::largest(needs_, needs) == needs_) return;
  const auto bytes = [](const MemoryNeeds& of) {
    return protocol::Heap(of.heap).bytes() + 8 * of.words + of.data;
  };
  throw_no_room(bytes(MemoryNeeds::largest(needs_, needs)), bytes(needs_));
}

void PassMemory::end_passes() {
  if (released()) return;
  const DeviceScope scope(device_);
  if (!device_is_idle(device_, world().deadline())) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("device {} still works after {} ms; end what it was given before the "
                            "workspace is released",
                            device_, world().deadline().count()));
  }
  protocol::Control control;
  SWITCHYARD_CUDA(
      cudaMemcpy(&control, heap_.base(world().rank()), sizeof control, cudaMemcpyDeviceToHost));
  if (control.abort != 0) throw_given_up();
}

void PassMemory::release() {
  if (released_) return;
  const DeviceScope scope(device_);
  heap_.release();
  private_.release();
  released_ = true;
}

// Takes memory again. All flags are down, so passes are numbered anew.
void PassMemory::restore() {
  if (!released_) return;
  const DeviceScope scope(device_);
  const std::byte* const before[] = {heap_.base(world().rank()), private_.base(0)};
  heap_.restore(world().fabric());
  try {
    attempt_together(world().fabric(), [&] {
      private_.restore(alone_.fabric());
      clear();
    });
  } catch (...) {
    heap_.release();
    private_.release();
    throw;
  }
  if (before[0] != heap_.base(world().rank()) || before[1] != private_.base(0)) ++version_;
  released_ = false;
}

bool device_is_idle(int device, std::chrono::milliseconds limit) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> future = done->get_future();
  try {
    std::thread([done, device] {
      // The next caller who asks the device gets any error.
      if (cudaSetDevice(device) == cudaSuccess) (void)cudaDeviceSynchronize();
      done->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return true;  // no thread could be started: the next caller waits
  }
  return future.wait_for(limit) == std::future_status::ready;
}

// The layers of a workspace may be smaller than its specs. Most of what a pass needs is less then,
// but slots for h need not be: with fewer weight rows a block has more tiles under way. So there is
// room for FFNs of every width up to the spec's.
std::shared_ptr<switchyard::PassMemory> make_memory(const World& world,
                                                    std::span<const LayerSpec> specs,
                                                    const WorkspaceOptions& options,
                                                    std::uint64_t id) {
  LayerOptions of_layer;
  of_layer.backend = Backend::kCuda;
  of_layer.cuda.device = options.device;
  of_layer.cuda.reserved_sms = options.reserved_sms;
  std::optional<MemoryNeeds> needs;
  int device = 0;
  attempt_together(world.fabric(), [&] {
    device = choose_device(of_layer);
    const auto blocks = static_cast<unsigned>(device_info(device).num_sms - options.reserved_sms);
    const auto add = [&](const LayerSpec& spec, DType weights) {
      const protocol::ExpertPartition experts{spec.num_experts, world.size()};
      PassSizes sizes;
      const KernelEntry kernel = find_kernel(spec.activation, weights, options.compute, false);
      sizes.policy = kernel.policy;
      sizes.num_ranks = world.size();
      sizes.num_places = spec.num_experts;
      sizes.own_places = experts.count(world.rank());
      sizes.hidden = spec.hidden;
      sizes.top_k = spec.top_k;
      sizes.max_tokens = options.max_tokens;
      sizes.gate_columns = gate_columns(spec);
      sizes.weighs_input = spec.weight_on_input;
      sizes.has_shared = spec.shared_intermediate > 0;
      // (In bf16 that is all that kernels for weights of four bits want beside those of others.)
      if (kernel.low.large != nullptr || options.compute == DType::kBF16) {
        const int tall = kernel.low.large != nullptr ? kernel.low.tall_rows : kTallLowRows;
        sizes.low_rows = low_rows_here({}, tall, spec.num_experts, world.size());
      }
      const auto padded = [&](int rows) {
        return protocol::round_up(rows, sizes.policy.numerics.alignment());
      };
      const auto first_rows = [&](int width) {
        return static_cast<std::uint32_t>(spec.activation.gated ? 2 * width : width);
      };
      const int routed = padded(spec.intermediate), shared = padded(spec.shared_intermediate);
      constexpr int kSteps = 64;
      for (int step = 1; step <= kSteps; ++step) {
        sizes.intermediate = padded(routed * step / kSteps);
        sizes.shared_intermediate = padded(shared * step / kSteps);
        const int depth = sizes.has_shared ? std::min(sizes.intermediate, sizes.shared_intermediate)
                                           : sizes.intermediate;
        sizes.order = tile_order(sizes.policy, {}, blocks, first_rows(sizes.intermediate),
                                 first_rows(sizes.shared_intermediate), std::max(1, depth));
        const MemoryNeeds its = PassLayout(sizes).needs();
        needs = needs ? MemoryNeeds::largest(*needs, its) : its;
      }
    };
    for (const LayerSpec& spec : specs) {
      add(spec, options.compute);
      if (options.weights) add(spec, *options.weights);
    }
  });
  const DeviceScope scope(device);
  return std::make_shared<PassMemory>(world, device, needs.value(), id,
                                      PassMemory::Lasting::kUntilReleased, options.allocator);
}

}  // namespace switchyard::gpu
