// The shared memory of a block, the ring in it, and who arrives on which barrier.
#pragma once

#include "gpu/layer_params.h"
#include "gpu/sync.cuh"
#include "gpu/wgmma.cuh"

namespace switchyard::gpu {

// A block is a loading warpgroup, whose warps have roles of their own, and the math warpgroups.
// (More threads would leave the kernel fewer registers at entry than the widest matrix instruction
// has operands, and ptxas asks for those whatever setmaxnreg says later.)
inline constexpr int kMathWarps = 4 * kMathGroups;
inline constexpr int kThreads = kWarpgroup * (1 + kMathGroups);
// Small passes have two warps that gather tokens, large ones one that loads packed tiles of them
// and one that packs tiles.
enum LoadingWarp : int { kWeightsWarp, kSchedulerWarp, kTokensWarp, kPackWarp };
inline constexpr int kGatherWarps = 4 - kTokensWarp;
inline constexpr int kGatherThreads = 32 * kGatherWarps;
// Registers of each thread at launch: the SM's 65,536 shared out in steps of 8.
inline constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
// When the roles part, setmaxnreg hands out what the block got at launch, and no more: a warpgroup
// that asks for registers beyond those waits for ever, without a deadline. See docs/decisions/0008.
template <typename P>
constexpr bool registers_suffice() {
  constexpr auto valid = [](int registers) {
    return registers % 8 == 0 && registers >= 24 && registers <= 256;
  };
  return valid(P::kLoadingRegisters) && valid(P::kMathRegisters) &&
         kWarpgroup * (P::kLoadingRegisters + kMathGroups * P::kMathRegisters) <=
             kThreads * kLaunchRegisters;
}
template <typename... P>
constexpr bool all_registers_suffice = (registers_suffice<P>() && ...);
static_assert(
    all_registers_suffice<BF16Policy, SmallPass<BF16Policy>, FP8Policy, SmallPass<FP8Policy>>,
    "the roles want more registers than the launch gives the block");

// A stage holds kStageRowBytes of each of the task's weight rows, which are 128 or a multiple, and
// of the tile's tokens.
static_assert(kStageRowBytes == kSwizzleRowBytes);
inline constexpr std::uint32_t kBoxBytes = kTileRows * kStageRowBytes;
inline constexpr std::uint32_t kRingBytes = 192 * 1024, kMaxStages = 12, kGateStages = 8;
template <typename P>
inline constexpr std::uint32_t kMaxHeight = static_cast<std::uint32_t>(P::kTileShape.max_height);
template <typename P>
inline constexpr std::uint32_t kSlotRows = static_cast<std::uint32_t>(P::kSlotRows);
// Large passes with scales have, with each stage, the products of its tokens' scales with those of
// its weights, which are two: of gate and up, or of the first 128 rows and the next. Small passes
// have both kinds of scales as they are.
template <typename P>
inline constexpr bool kJoinedScales = P::kScaled && !P::kAlone;
// A stage has room for tiles of at most `height` tokens; where math warps are short of registers,
// for all, so that they know its size when they are compiled.
template <typename P>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t stage_bytes(std::uint32_t height) {
  return P::kHalves * kBoxBytes + (kJoinedScales<P> ? kMaxHeight<P> : height) * kStageRowBytes;
}
template <typename P>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t num_stages(std::uint32_t height) {
  const std::uint32_t fit = kRingBytes / stage_bytes<P>(height);
  return fit < kMaxStages ? fit : kMaxStages;
}
// Of a stage, in floats: the weights' four (FfnParams::gemm1_scales) and one for each token; or two
// for each.
inline constexpr std::uint32_t kWeightScales = 4, kScaleSets = 2;
template <typename P>
inline constexpr std::uint32_t kScaleBytes =
    static_cast<std::uint32_t>(sizeof(float) * (kJoinedScales<P> ? kScaleSets * kMaxHeight<P>
                                                                 : kWeightScales + kMaxHeight<P>));
// Who tells other blocks that the block has stored its part of a tile. To tell means to wait until
// all of it has reached the L2 cache, 1 us: the scheduler does that while the math warps are at the
// next tile. In small passes somebody waits for it, and each math warpgroup tells for itself.
template <typename P>
inline constexpr std::uint32_t kTellers = P::kAlone ? kMathGroups : 1;
// The task in work, of which the math warps read again what they need, and those after it.
inline constexpr std::uint32_t kTaskSlots = 4;
// Where a math warpgroup turns its 64 rows of weights into rows of tokens: two buffers of so many.
template <typename P>
inline constexpr int kStagedTokens = P::kAlone ? 32 : 16;
template <typename P>
inline constexpr int kStagingBytes = 2 * kStagedTokens<P>* kSwizzleRowBytes;

// Arrivals that complete one phase of each barrier.
inline constexpr int kFullArrivals = 1 + 1;                    // weights and tokens, with bytes
inline constexpr int kFullArrivalsAlone = 1 + kGatherThreads;  // weights with bytes; each thread
inline constexpr int kEmptyArrivals = kMathWarps;  // of each block that loads into the stage
inline constexpr int kDemandArrivals = 2;  // weights and tokens, or math; of each block of a pair
inline constexpr int kTicketArrivals = 1;  // the scheduler of the other block
inline constexpr int kTicketArrivalsAlone = kGatherThreads;    // once, in gather's rehearsal
inline constexpr int kTaskFullArrivals = 1;                    // the scheduler
inline constexpr int kTaskEmptyArrivals = 1 + 1 + kMathWarps;  // weights, tokens, math: by warp
inline constexpr int kTaskEmptyArrivalsAlone = 1 + kGatherWarps + kMathWarps;
inline constexpr int kPackArrivals = 1;  // the pack warp, with bytes

// See Pass::quantizes_late.
inline constexpr std::uint32_t kLateRows = 8, kLateStages = 8;
// Tokens come into the ring in units of so many rows.
inline constexpr std::uint32_t kUnitRows = 16;

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

enum class Work : std::uint32_t { kGemm1, kGemm2, kCombine, kStop };

inline constexpr std::uint32_t kNoMore = 1u << 31;

// A task as the scheduler hands it to the other roles.
struct TaskDescriptor {
  Work work;
  std::uint32_t units;     // height of the tile in steps of kUnitRows
  std::uint32_t k_blocks;  // stages of the K loop
  std::uint32_t first_k_block;
  std::uint32_t split;  // which part of K, where GEMM2 is split
  std::uint32_t tile;
  std::uint32_t block;      // of output rows; the chunk of a combine task
  std::uint32_t rows;       // of the tile
  std::uint32_t first_row;  // of the tile, in its expert
  std::uint32_t expert;     // of this rank
  std::uint32_t shared;     // 1: of the shared expert
  std::uint32_t one_tile;   // 1: no other tile reads these weights
  // 1: of a pair's blocks each has a tile of its own and both the same weight rows; 0: they have
  // the same tile.
  std::uint32_t two_tiles;
  // Of the tile's rows, where there is one rank; null: the tokens themselves, in order.
  const std::uint32_t* list;
};

// In large passes, of the one token that is rehearsed.
template <typename P>
struct OwnRouting {
  static constexpr std::uint32_t kTokens = P::kAlone ? P::kSmallTokens : 1;
  static constexpr std::uint32_t kSlots = P::kAlone ? kMaxOwnSlots : protocol::kMaxTopK;
  std::int32_t ids[kSlots];
  float weights[kSlots + kTokens];  // [T, cells_per_token]
  std::uint16_t positions[kSlots];
  std::uint32_t lists[kSlots];
};

// The ring, at addresses in shared memory.
template <typename P, bool kFixed = kJoinedScales<P>>
struct StageShape {
  std::uint32_t stages, stage_bytes;
};
template <typename P>
struct StageShape<P, true> {
  static constexpr std::uint32_t stages = num_stages<P>(0), stage_bytes = gpu::stage_bytes<P>(0);
};
template <typename P>
struct Ring : StageShape<P> {
  std::uint32_t base, full, empty, scales;

  __device__ std::uint32_t weights(std::uint32_t stage) const {
    return base + stage * this->stage_bytes;
  }
  __device__ std::uint32_t tokens(std::uint32_t stage) const {
    return weights(stage) + P::kHalves * kBoxBytes;
  }
  __device__ std::uint32_t weight_scales(std::uint32_t stage) const {
    return scales + stage * kScaleBytes<P>;
  }
  __device__ std::uint32_t token_scales(std::uint32_t stage) const {
    return weight_scales(stage) + kWeightScales * sizeof(float);
  }
  __device__ std::uint32_t joined_scales(std::uint32_t stage, std::uint32_t set) const {
    return scales + stage * kScaleBytes<P> + set * kMaxHeight<P> * sizeof(float);
  }
  __device__ std::uint32_t full_barrier(std::uint32_t stage) const { return full + 8 * stage; }
  __device__ std::uint32_t empty_barrier(std::uint32_t stage) const { return empty + 8 * stage; }

  // Waits until what the stage held before is used up; see wait_ring().
  template <bool kWarp = false>
  __device__ bool await_free(const Waiter& waiter, const RingPlace& place) const {
    return wait_ring<kWarp>(waiter, empty_barrier(place.stage), place.parity ^ 1);
  }
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
template <typename P, bool kScaled = P::kScaled>
struct QuantizedTile {};
template <typename P>
struct QuantizedTile<P, true> {
  alignas(16) std::byte scales[num_stages<P>(P::kTileShape.least) * kScaleBytes<P>];
  float most[kMathGroups][kInstructionRows];
};

// Where rows come from and go to, where there are several ranks. Sources are told by their distance
// from the owner of the expert.
template <typename P, bool kAlone = P::kAlone>
struct RankTables {};
template <typename P>
struct RankTables<P, false> {
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
template <typename P, bool kAlone = P::kAlone>
struct PackStorage {};
template <typename P>
struct PackStorage<P, false> {
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
  StageShape<P> stage_shape;
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
  alignas(16) TaskDescriptor tasks[kTaskSlots];
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

// Named barriers beside that of __syncthreads(): the math warps' before their role; in it, 1 and 2,
// one for each warpgroup, and one for both; and, of large passes, the loading warps'; that of the
// math warps, which wait for the scheduler's to place tiles; and that of the pack warp, which waits
// for these and for the math warps to place what is to be sent.
enum NamedBarrier : std::uint32_t {
  kOfMath = 1,
  kBothGroups = 3,
  kOfLoading,
  kTilesPlaced,
  kAllPlaced
};
inline constexpr int kMathAndScheduler = 32 * (kMathWarps + 1);
inline constexpr int kMathSchedulerAndPack = 32 * (kMathWarps + 2);

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
  __device__ Ring<P> ring() const {
    Ring<P> ring{state().stage_shape, shared_address(block.ring), shared_address(block.full),
                 shared_address(block.empty), 0};
    if constexpr (P::kScaled) ring.scales = shared_address(block.quantized.scales);
    return ring;
  }
  __device__ Waiter waiter() const {
    return {&layer.heaps, &layer.failures->given_up, &block.pass.going, block.pass.epoch,
            layer.deadline_ns};
  }
  __device__ bool goes_on() const { return *waiter().going == Going::kOn; }
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
    return P::kAlone && P::kScaled && call.tokens <= kLateRows && layer.h_groups <= kLateStages;
  }
  // The others: the last warpgroup that has stored a part of a group makes its codes, and tells.
  __device__ bool quantizes_together() const {
    return P::kAlone && P::kScaled && !quantizes_late();
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
  __device__ bool distributed() const { return !P::kAlone && layer.heaps.size() > 1; }
  __device__ int rank_at(std::uint32_t distance) const {
    const int rank = layer.heaps.rank + static_cast<int>(distance), size = layer.heaps.size();
    return rank < size ? rank : rank - size;
  }
  // This rank's experts, and its tiles and rows, the shared expert's first.
  __device__ std::uint32_t first_expert() const {
    return P::kAlone ? 0 : static_cast<std::uint32_t>(layer.first_expert);
  }
  __device__ std::uint32_t local_experts() const {
    return static_cast<std::uint32_t>(P::kAlone ? layer.num_experts : layer.local_experts);
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
  // What flags of the pass are raised to.
  __device__ std::uint32_t flag() const { return static_cast<std::uint32_t>(state().epoch) + 1; }
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
