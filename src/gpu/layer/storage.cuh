// The shared memory of a block, the ring in it, and who arrives on which barrier.
#pragma once

#include "gpu/layer/params.h"
#include "gpu/pipeline/ring.cuh"
#include "gpu/ptx/bulk_copy.cuh"
#include "gpu/ptx/cluster.cuh"
#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/convert.cuh"
#include "gpu/ptx/mma.cuh"
#include "gpu/ptx/wgmma.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// Of the gate, which uses the ring before the tasks do.
inline constexpr std::uint32_t kGateStages = 8;
template <typename P>
inline constexpr std::uint32_t kSlotRows = static_cast<std::uint32_t>(P::kSlotRows);
// Additions that tell of a tile when a block has stored its part: see Teller.
template <typename P>
inline constexpr std::uint32_t kTellers = P::kTeller == Teller::kMath ? kMathGroups : 1;
// The task in work, of which the math warps read again what they need, and those after it.
inline constexpr std::uint32_t kTaskSlots = 4;
// Where a math warpgroup turns its 64 rows of weights into rows of tokens: two buffers of so many.
template <typename P>
inline constexpr int kStagingBytes = 2 * P::kStagedTokens* kSwizzleRowBytes;

// See Pass::quantizes_late.
inline constexpr std::uint32_t kLateRows = 8, kLateStages = 8;

// A row of an expert's list: which slot (token, k) it is.
struct RowEntry {
  static constexpr int kBits = 5;
  static_assert(protocol::kMaxTopK <= 1 << kBits);
  __device__ static std::uint32_t pack(std::uint32_t token, std::uint32_t k) {
    return token << kBits | k;
  }
  __device__ static std::uint32_t token(std::uint32_t entry) { return entry >> kBits; }
  __device__ static std::uint32_t k(std::uint32_t entry) { return entry & ((1u << kBits) - 1); }
  // One that another rank was to send. In a pass that was given up it may not have come, and be no
  // slot of anybody's; then it is made some slot's.
  __device__ static std::uint32_t sent(std::uint32_t entry, const LayerParams& layer) {
    return token(entry) < static_cast<std::uint32_t>(layer.max_tokens) &&
                   k(entry) < static_cast<std::uint32_t>(layer.top_k)
               ? entry
               : 0;
  }
  // The slot's place among all tokens' cells, weights too.
  __device__ static std::uint32_t cell(std::uint32_t entry, std::uint32_t cells_per_token) {
    return token(entry) * cells_per_token + k(entry);
  }
};

inline constexpr std::uint32_t kNoMore = 1u << 31;

// In large passes, of the one token that is rehearsed.
template <typename P>
struct OwnRouting {
  static constexpr bool kAll = P::kStart == Start::kEveryBlock;
  static constexpr std::uint32_t kTokens = kAll ? P::kSmallTokens : 1;
  static constexpr std::uint32_t kSlots = kAll ? kMaxOwnSlots : protocol::kMaxTopK;
  std::int32_t ids[kSlots];
  float weights[kSlots + kTokens];  // [T, cells_per_token]
  std::uint16_t positions[kSlots];
  std::uint32_t lists[kSlots];
};

// Where the routing of a pass is. Small passes keep it in every block's shared memory, large ones
// share it in device memory.
struct RoutingTables {
  std::int32_t* ids;  // [T, K]
  float* weights;     // [T, cells_per_token]
  std::uint32_t top_k;
  std::uint32_t cells_per_token;
  bool alone;  // in shared memory
};

// What a policy with scales needs beside: the ring's, and, of low tiles, the largest magnitude that
// each math warpgroup found in its columns of h of every token.
template <typename P, bool = kScaled<P>>
struct QuantizedTile {};
template <typename P>
struct QuantizedTile<P, true> {
  alignas(16) std::byte
      scales[StageLayout<P>::count(P::kTile.token_rows.least) * StageLayout<P>::kScaleBytes];
  float most[kMathGroups][kInstructionRows];
};

// Where rows come from and go to, where there are several ranks. Sources are told by their distance
// from the owner of the expert.
template <typename P, Start = P::kStart>
struct RankTables {};
template <typename P>
struct RankTables<P, Start::kShared> {
  static constexpr int kMost = kMaxDeviceExperts + kMaxDeviceRanks;
  union {
    // [own experts, ranks]: of each source's rows in the expert's, the first.
    std::uint32_t source_begin[kMost];
    // Before that, [E]: rows of the tokens that this block has routed.
    std::uint32_t routed[kMaxDeviceExperts];
  };
  // [level, distance of the owner] of this rank's slots with experts of others, counted in the
  // order in which they are sent: the first experts of all ranks, then the second. And the end.
  std::uint32_t send_begin[kMost + 1];
};

// What the pack warp copies goes through here, in pieces of several rows: enough under way that it
// does not wait for each trip to memory. Of a row's scales it has so many under way.
inline constexpr std::uint32_t kPackBuffers = 4, kPackPieces = 2, kPackPieceBytes = 1024;
inline constexpr std::uint32_t kScalesAtOnce = 4;
// Of a group of rows each buffer is filled an even number of times, so that its barrier has the
// same parity at the next.
static_assert(kPackedTogether / kPackPieces % (2 * kPackBuffers) == 0);
template <typename P, TokenSource = P::kTokens>
struct PackStorage {};
template <typename P>
struct PackStorage<P, TokenSource::kPacked> {
  alignas(128) std::byte pieces[kPackBuffers][kPackPieces][kPackPieceBytes];
  alignas(8) std::uint64_t full[kPackBuffers];
};

// What the block found out about the pass. In shared memory, because the math warps have no
// registers to keep it in.
template <typename P>
struct PassState {
  std::uint64_t epoch;
  PassWords words;
  const std::uint16_t* x;  // [T, H] bf16, for the gate
  std::int64_t x_stride;   // in elements
  // [T, H] of the policy's elements, for the experts, and [T, x_groups] scales.
  const std::byte* rows;
  std::int64_t row_bytes;
  const float* row_scales;
  std::int64_t row_scale_stride;
  RoutingTables tables;
  StageShape<StageLayout<P>> stage_shape;
  protocol::TokenTiles shared_tiles;
  std::uint32_t log2_rows;           // of the weight rows of a task, of a pair's if there are pairs
  std::uint32_t gate_slices;         // that logits are sums of
  std::uint32_t max_height;          // of all tiles
  std::uint32_t log2_band;           // of tiles taken up together
  std::uint32_t log2_splits;         // of the parts of GEMM2's K, with cells of their own
  std::uint32_t log2_combine_chunk;  // of the tokens of a combine task
  std::uint32_t num_rows;            // of this rank's tiles
  // What the math warps send and, of several ranks, pack, having nothing else to do at first.
  std::uint32_t first_sends, first_rows;
  std::uint32_t send_lead;    // levels that sending is ahead of packing, at most
  std::uint32_t tile_offset;  // from the number of a tile to that among all ranks' tiles
  Going going;
  // Of the world, before the pass began; of the plan. Written before those who read them begin
  // their roles, so that all warps find the same. (`going` is every wait's.)
  bool aborted, plan_failed;
};

template <typename P>
struct BlockStorage {
  alignas(1024) std::byte ring[kRingBytes];
  alignas(1024) std::byte staging[kMathGroups][kStagingBytes<P>];
  alignas(16) TileTask tasks[kTaskSlots];
  alignas(8) std::uint64_t full[kMaxStages], empty[kMaxStages];
  alignas(8) std::uint64_t task_full[kTaskSlots], task_empty[kTaskSlots], demand, ticket_full;
  alignas(8) std::uint64_t gate_full[kGateStages];    // large passes
  std::uint32_t pack_slot, pack_slots_end, pack_row;  // of the pack warp
  std::uint32_t ticket;  // from the scheduler of the pair's first block to that of the second
  // Tasks of the block; and kNoMore, when a math warp has given up waiting for another.
  std::uint32_t handed_out;
  std::uint32_t expert_rows[kMaxDeviceExperts];
  // [E + 1] first tile of each expert, numbered so that those of this rank come after the shared
  // expert's; those of other ranks go on in both directions.
  std::uint32_t tile_begin[kMaxDeviceExperts + 1];
  // [E + 1] of this rank's experts, the first row, after the shared expert's rows. Of others, where
  // in the expert's rows this rank's begin.
  std::uint32_t row_begin[kMaxDeviceExperts + 1];
  OwnRouting<P> own;
  RankTables<P> ranks;
  // Of the rows of the tile in work, for the epilogue of each math warpgroup: their entries or
  // weights, in the low words, or the addresses of their cells.
  alignas(16) std::uint64_t rows[kMathGroups][kMaxHeight<P>];
  QuantizedTile<P> quantized;
  PackStorage<P> packing;
  PassState<P> pass;
};
template <typename P>
inline constexpr std::size_t kSharedBytes = sizeof(BlockStorage<P>);
template <typename... P>
constexpr bool fit = ((kSharedBytes<P> <= std::size_t{227} * 1024) && ...);
static_assert(fit<BF16Policy, SmallPass<BF16Policy>, FP8Policy, SmallPass<FP8Policy>>,
              "the block's shared memory is full");

// Which math warpgroup the thread is in, asked anew wherever it is needed: the sums leave no
// register to keep it in.
__device__ __forceinline__ std::uint32_t math_group() {
  return fresh_thread_index<kThreads>() / kWarpgroup - 1;
}

// Barriers of all blocks, in the order in which a pass comes to them.
enum GridBarrier : std::uint32_t { kConverted, kLogitsReady, kListsReady };

// What every role of a block knows.
template <typename P>
struct Pass {
  const LayerParams& layer;
  const CallParams& call;
  BlockStorage<P>& block;

  __device__ const PassState<P>& state() const { return block.pass; }
  __device__ Lifetime life() const {
    return {layer.heaps, layer.failures, layer.deadline_ns, block.pass.epoch, block.pass.going};
  }
  __device__ Pipeline<StageLayout<P>> pipeline() const {
    const std::byte* scales = nullptr;
    if constexpr (kScaled<P>) scales = block.quantized.scales;
    return {life(),     block.pass.stage_shape, block.ring, block.full, block.empty, scales,
            call.paired};
  }
  __device__ Ring<StageLayout<P>> ring() const { return pipeline().ring(); }
  __device__ Waiter waiter() const { return life().waiter(); }
  __device__ bool goes_on() const { return life().goes_on(); }
  __device__ const FfnParams& ffn(bool shared) const {
    return shared ? layer.shared : layer.routed;
  }
  __device__ std::uint32_t* barrier(GridBarrier which) const {
    return state().words.barrier(which);
  }
  __device__ std::uint32_t* gemm1_done(std::uint32_t tile) const {
    return state().words.gemm1_done(layer.num_experts) + tile;
  }
  __device__ std::uint32_t* gemm2_done(std::uint32_t tile) const {
    return state().words.gemm2_done(layer.num_experts, layer.max_tiles) + tile;
  }
  // In units of RowPart.
  __device__ std::uint32_t* packed(std::uint32_t tile) const {
    return state().words.packed(layer.num_experts, layer.max_tiles) + tile;
  }
  // Small passes in FP8 of so few rows and columns of h that each task of GEMM2 makes its codes for
  // itself, at once: that is done before anybody has found out who has stored last.
  __device__ bool quantizes_late() const {
    return kQuantizesStoredRows<P> && call.tokens <= kLateRows && layer.h_groups <= kLateStages;
  }
  // The others: the last warpgroup that has stored a part of a group makes its codes, and tells.
  __device__ bool quantizes_together() const {
    return kQuantizesStoredRows<P> && !quantizes_late();
  }
  // In small passes, of a group of 128 columns of the tile's h: four bits of the word, which count
  // who has stored a part of it.
  __device__ std::uint32_t* parts_stored(std::uint32_t tile, std::uint32_t group) const {
    return state().words.parts_stored(layer.num_experts, layer.max_tiles) +
           tile * layer.group_words + group / PassWords::kGroupsOfWord;
  }
  __device__ bool is_shared(std::uint32_t tile) const { return tile < state().shared_tiles.count; }
  // Tasks that `rows` of weights make for one token tile, of a pair where blocks come in pairs.
  __device__ std::uint32_t tasks(std::uint32_t rows) const {
    return (rows + (1u << state().log2_rows) - 1) >> state().log2_rows;
  }
  __device__ bool gemm1_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm1_done(tile)) >=
           (kTellers<P> * tasks(ffn(is_shared(tile)).gemm1_rows)) << call.paired;
  }
  __device__ bool gemm2_complete(std::uint32_t tile) const {
    return load_acquire_gpu(gemm2_done(tile)) >=
           (kTellers<P> * tasks(ffn(is_shared(tile)).gemm2_rows))
               << call.paired << state().log2_splits;
  }
  // Whether the tile's h may be written: that of the tile that had its slot is no longer needed.
  __device__ bool h_slot_free(std::uint32_t tile) const {
    return tile < layer.h_slots || gemm2_complete(tile - layer.h_slots);
  }
  // Of this rank's tokens, the first that a block routes where it does not route for itself.
  __device__ std::uint32_t first_token(std::uint32_t of_block) const {
    return static_cast<std::uint32_t>(std::uint64_t{call.tokens} * of_block / gridDim.x);
  }
  // Several ranks, or one that has all experts.
  __device__ bool distributed() const { return !P::kOneRank && layer.heaps.size() > 1; }
  __device__ int rank_at(std::uint32_t distance) const {
    const int rank = layer.heaps.rank + static_cast<int>(distance), size = layer.heaps.size();
    return rank < size ? rank : rank - size;
  }
  // This rank's experts, and its tiles and rows, the shared expert's first.
  __device__ std::uint32_t first_expert() const {
    return P::kOneRank ? 0 : static_cast<std::uint32_t>(layer.first_expert);
  }
  __device__ std::uint32_t local_experts() const {
    return static_cast<std::uint32_t>(P::kOneRank ? layer.num_experts : layer.local_experts);
  }
  __device__ std::uint32_t num_tiles() const {
    return block.tile_begin[first_expert() + local_experts()];
  }
  __device__ std::uint32_t num_rows() const { return state().num_rows; }
  // Of this rank's slots, those with experts of others.
  __device__ std::uint32_t num_sends() const {
    return block.ranks
        .send_begin[layer.levels * static_cast<std::uint32_t>(layer.heaps.size() - 1)];
  }
  __device__ std::uint32_t flag() const { return life().flag(); }
  // The place of an expert's row at `position`, counted over whole tiles of most rows.
  __device__ static std::uint32_t place_of(const protocol::TokenTiles& cut,
                                           std::uint32_t first_tile, std::uint32_t position) {
    return (first_tile + position / cut.height) * kMaxHeight<P> + position % cut.height;
  }
  // Where that row is packed.
  __device__ std::uint32_t packed_row(std::uint32_t place) const {
    return place / kMaxHeight<P> % layer.packed_slots * kMaxHeight<P> + place % kMaxHeight<P>;
  }
};

}  // namespace switchyard::gpu
