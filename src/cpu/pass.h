// The state that the actors of one rank share: the layer, which stays, and the pass, which is new
// for every forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/host_sum.h"
#include "cpu/rank_link.h"
#include "model/mapped_weights.h"
#include "protocol/heap.h"
#include "protocol/host_sums.h"
#include "protocol/placement.h"
#include "protocol/task.h"
#include "protocol/wait.h"
#include "switchyard/layer.h"

namespace switchyard::cpu {

// One expert's network, ready to multiply.
struct Ffn {
  const FfnWeights* weights = nullptr;
  int intermediate = 0;
  int gemm1_rows = 0;  // rows of gate and of up that one GEMM1 task takes
  int gemm2_rows = 0;  // rows of down that one GEMM2 task takes

  std::uint32_t gemm1_blocks() const { return blocks(intermediate, gemm1_rows); }
  std::uint32_t gemm2_blocks(int hidden) const { return blocks(hidden, gemm2_rows); }

 private:
  static std::uint32_t blocks(int rows, int per_block) {
    return static_cast<std::uint32_t>(protocol::ceil_div(rows, per_block));
  }
};

struct LayerState {
  LayerSpec spec;
  MoeWeights weights;
  MappedWeights files;               // of the weights
  protocol::ExpertPartition places;  // the experts' places on ranks
  RankLink* link = nullptr;          // set before the first pass
  protocol::Heap heap;
  int max_tokens = 0;
  protocol::TileShape tile;      // of routed experts
  DType compute = DType::kBF16;  // of operands; kF8E4M3: activations travel as codes and scales
  DType value = DType::kBF16;    // of cells, and of activations where they are not quantised
  DType gemm = DType::kBF16;     // of the operands of the tile GEMM
  std::vector<Ffn> experts;      // of this rank, or the places that it has
  std::vector<std::int32_t> expert_at;  // [places], or empty: see ExpertPlacement
  Ffn shared;
  std::function<void(const ProtocolStep&)> on_step;

  const protocol::Heaps& heaps() const { return link->heaps(); }
  bool quantised() const { return compute == DType::kF8E4M3; }
  std::uint64_t cell_bytes() const {
    return static_cast<std::uint64_t>(spec.hidden) * size_of(value);
  }
  // Bytes of a token on the wire: its activations, or codes and their scales.
  std::uint64_t wire_bytes() const { return quantised() ? heap.token_bytes() : cell_bytes(); }
  int cells_per_token() const { return spec.top_k + (spec.shared_intermediate > 0 ? 1 : 0); }
  // Where the output for a slot of a token of `rank` goes.
  std::byte* cell(int rank, std::uint64_t token, std::uint64_t k) const {
    return heap.cells().in(heaps().base[rank]) +
           (token * static_cast<std::uint64_t>(cells_per_token()) + k) * cell_bytes();
  }
  // The sums for tokens of a rank of another host.
  HostSum sum_for(int source) const { return {link->sums_for(source), spec.top_k, cell_bytes()}; }
  int expert_of(int place) const {
    return expert_at.empty() ? place : expert_at[static_cast<std::size_t>(place)];
  }
  int first_expert() const { return places.begin(link->rank()); }
  const Ffn& expert(int global_index) const {
    return experts[static_cast<std::size_t>(global_index - first_expert())];
  }
  // Every step is a sign of life: one task may signal many tiles.
  void step(ProtocolStep::Kind kind, int peer, std::uint64_t epoch) const {
    protocol::note_progress(heaps());
    if (on_step) on_step({kind, link->rank(), peer, epoch});
  }
  // Calls the hook only. A wait is no progress: a world in which everybody waits must end.
  void waiting(int peer, std::uint64_t epoch) const {
    if (on_step) on_step({ProtocolStep::Kind::kWait, link->rank(), peer, epoch});
  }
};

// A token tile of an expert that this rank computes.
struct Tile {
  std::int32_t expert = 0;      // global index; unused for the shared expert
  std::uint32_t segment = 0;    // of Placement; unused for the shared expert
  std::uint32_t first_row = 0;  // in its segment; the first token for the shared expert
  std::uint32_t rows = 0;
  std::uint32_t padded = 0;  // rows rounded up to the matrix unit's width
  // Where its intermediate activations are, from its first GEMM1 task to its last GEMM2 task.
  std::int32_t intermediate_slot = -1;
  std::uint32_t gemm1_done = 0;  // blocks completed, counted by processors
  std::uint32_t gemm2_done = 0;
  std::uint32_t finished = 0;  // all of GEMM2, for this rank's own tokens
  std::uint32_t returned = 0;  // all of GEMM2, and what it sends, so that its slot is free
};

// Where a slot's row is.
struct Slot {
  std::uint32_t position = 0;  // in this rank's list of its slots with the expert
  std::int32_t tile = -1;      // in Pass::tiles, once it is placed, if the expert is this rank's
  std::int32_t owner = -1;     // the expert's rank; -1: no expert
};

struct Pass {
  std::uint64_t epoch = 0;
  std::int64_t tokens = 0;
  // [tokens, H] of LayerState::value; null if they came quantised.
  const std::byte* x = nullptr;
  std::int64_t x_row_bytes = 0;
  // The same tokens as the experts get them: LayerState::wire_bytes() of each, which may be those
  // of x.
  const std::byte* wire = nullptr;
  std::int64_t wire_row_bytes = 0;
  // Slots of intermediate activations, [padded rows, I] each. Only tiles with a slot are in
  // progress; the next one starts when one of them is complete. So they stay in the cache, and
  // their memory does not grow with the batch.
  std::byte* intermediate = nullptr;
  std::size_t intermediate_slot_bytes = 0;
  std::size_t staging_offset = 0;  // in a slot: rows for other hosts, until the tile is complete
  std::int32_t num_intermediate_slots = 0;
  MatrixView logits;  // given, or empty
  ForwardOutput output;
  // The layer's, as it has them in this pass: [E], [E] and [H]; null where it has none.
  const float *router_bias = nullptr, *correction_bias = nullptr, *shared_gate = nullptr;

  std::vector<std::int32_t> ids;  // [tokens, K]
  std::vector<float> weights;     // [tokens, K]
  std::vector<Slot> slots;        // [tokens, K]

  protocol::Placement placement;

  std::vector<std::uint32_t> counts;  // [E]: slots of this rank with each expert
  // [expert of this rank][position]: entries of this rank's own slots with it. Those with experts
  // of other ranks go into their heaps.
  std::vector<std::vector<std::uint32_t>> own_entries;
  // [rank]: tokens with an expert there; of another host's ranks, all stand with its gateway.
  std::vector<std::vector<std::uint32_t>> tokens_for;
  std::vector<std::uint32_t> unsent;           // [E]: slots that are still to be sent
  std::vector<std::uint32_t> dispatch_chunks;  // [rank]
  // [distance - 1][token]: a bit for each token of another rank that has a row here.
  std::vector<std::uint64_t> received;
  // [expert of this rank][source]: placed rows whose cells are still to be stored.
  std::vector<std::uint32_t> unfinished;
  std::uint64_t sums_sent = 0;  // to other hosts, counted by processors

  protocol::TokenTiles shared_tiles;
  // Shared tiles, then routed tiles in the order in which they were placed. Tiles are added while
  // processors work on earlier ones, so the memory for all is reserved before the pass.
  std::vector<Tile> tiles;
  protocol::Workload work;  // without routed tiles: see routed_work()

  // Appends tiles of one segment, or the shared expert's.
  void add_tiles(const protocol::TokenTiles& of, const protocol::TileShape& shape, int expert,
                 std::uint32_t segment) {
    for (std::uint32_t j = 0; j < of.count; ++j) {
      Tile tile;
      tile.expert = expert;
      tile.segment = segment;
      tile.first_row = of.begin(j);
      tile.rows = of.end(j) - of.begin(j);
      tile.padded = protocol::round_up(tile.rows, static_cast<std::uint32_t>(shape.granule));
      tiles.push_back(tile);
    }
  }
  // The GEMM tasks of the routed tiles from `first_tile` on, which has number 0 there.
  protocol::Workload routed_work(std::uint32_t first_tile) const {
    protocol::Workload routed;
    routed.num_ranks = 0;  // nothing is sent
    routed.num_routed_tiles = static_cast<std::uint32_t>(tiles.size()) - first_tile;
    routed.routed_gemm1_blocks = work.routed_gemm1_blocks;
    routed.routed_gemm2_blocks = work.routed_gemm2_blocks;
    return routed;
  }
  std::uint32_t* unfinished_rows(std::uint32_t expert_of_owner, int source, int num_ranks) {
    return &unfinished[expert_of_owner * static_cast<std::size_t>(num_ranks) +
                       static_cast<std::size_t>(source)];
  }
  static std::size_t received_words(int max_tokens) {
    return static_cast<std::size_t>(protocol::ceil_div(max_tokens, 64));
  }
  // Any processor may call it, any number of times.
  void note_received(std::uint32_t distance, std::uint32_t token, int max_tokens) {
    std::uint64_t& word = received[(distance - 1) * received_words(max_tokens) + token / 64];
    std::atomic_ref(word).fetch_or(std::uint64_t{1} << token % 64, std::memory_order_relaxed);
  }
  const std::byte* x_row(std::int64_t token) const { return x + token * x_row_bytes; }
  const std::byte* wire_row(std::int64_t token) const { return wire + token * wire_row_bytes; }
};

// Returns the rows that another rank has for an expert, once its counts are here. Relaxed: the look
// that found them has acquired every word.
inline std::uint32_t count_of(const LayerState& layer, std::uint64_t epoch, int source,
                              int expert) {
  return static_cast<std::uint32_t>(
      protocol::load_relaxed(layer.heap.counts(epoch, source).in(layer.heaps().mine()) + expert));
}

inline constexpr std::uint32_t kDispatchChunk = 64;  // tokens
inline constexpr std::uint32_t kCombineChunk = 32;   // tokens

// The bits of a product may depend on its shape: the library picks instructions by it. An expert's
// tiles have the same rows however many ranks share the experts, but the tokens of a rank's gate
// and shared expert are its own; these always multiply tiles of this one height, padded with zeros,
// so that a token's result does not depend on how tokens are dealt to ranks.
inline constexpr protocol::TileShape kOwnTokensShape{32, 32};

// The rows of a routed tile that are of one source.
struct RowRange {
  std::uint32_t begin, end;  // in the tile
};
inline RowRange rows_of_source(const Pass& pass, const Tile& tile, int source) {
  const auto in_tile = [&](std::uint32_t row) {
    return std::clamp(row, tile.first_row, tile.first_row + tile.rows) - tile.first_row;
  };
  return {in_tile(pass.placement.source_begin(tile.segment, source)),
          in_tile(pass.placement.source_begin(tile.segment, source + 1))};
}

// Calls visit(source, its distance, its rows) for every rank of which the routed tile has rows.
template <typename Visit>
void for_each_source(const LayerState& layer, const Pass& pass, const Tile& tile, Visit&& visit) {
  for (int source = 0; source < layer.link->num_ranks(); ++source) {
    const RowRange rows = rows_of_source(pass, tile, source);
    if (rows.begin == rows.end) continue;
    visit(source, static_cast<std::uint32_t>(pass.placement.distance_of(source)),
          rows.end - rows.begin);
  }
}

// A row of a routed tile: its source rank, and its slot there.
struct Row {
  int source;
  std::uint32_t distance;  // of the source
  std::uint32_t position;  // in the source's list
  std::uint32_t token, k;
};
inline Row row_of(const LayerState& layer, const Pass& pass, const Tile& tile, std::uint32_t r) {
  const std::uint32_t row = tile.first_row + r;
  const auto of_owner = static_cast<std::uint32_t>(tile.expert - layer.first_expert());
  Row result;
  result.source = pass.placement.source_of(tile.segment, row);
  result.distance = static_cast<std::uint32_t>(pass.placement.distance_of(result.source));
  result.position = row - pass.placement.source_begin(tile.segment, result.source);
  const std::uint32_t entry =
      result.distance == 0
          ? pass.own_entries[of_owner][result.position]
          : layer.heap.entries(of_owner, result.distance).in(layer.heaps().mine())[result.position];
  result.token = protocol::SlotEntry::token(entry);
  result.k = protocol::SlotEntry::k(entry);
  return result;
}

}  // namespace switchyard::cpu
