// The layer kernel: one forward pass of one rank, in one launch. It contains the gate, dispatch,
// both GEMMs of the experts and combine. Transfers between ranks are in exchange/ and
// protocol/heap.h.
//
// First comes the start of the pass (start.cuh):
//   math warps      compute partial logits and quantize the block's tokens; meanwhile the loading
//                   warps rehearse the steps that follow
//   all warps       choose the tokens' experts, and list the rows of each expert
//   loading warps   exchange counts with all ranks, and place tiles. Every block computes the same
//                   tiles. (In small passes all warps take part.)
// A warp that has no part in a step goes on to its role, rehearses it, and learns of the tiles from
// its first task. In large passes the math warps meanwhile send tokens to other ranks, and pack
// rows as soon as tiles are placed. With one rank they pack the rows of the block's own tokens.
//
// Then each warp has a role (loading_roles.cuh, math_role.cuh):
//   0         weights    tasks -> the copy engine: 128 or 256 weight rows x 128 bytes per stage
//   1         scheduler  tickets -> tasks; tells other blocks which tiles are stored
//   2         tokens     tasks -> the copy engine: the tile's packed rows x 128 bytes per stage; in
//                        FP8 also the rows' scales, multiplied by the weights'
//   3         pack       sends tokens to other ranks; copies rows of this rank and rows sent to it
//                        into tiles, ahead of the tasks (the math warps pack the first tiles); at
//                        last tells other ranks which of their rows' tiles are finished
//   2, 3      gather     in small passes instead of these two: loads rows of x in place, and h
//   4 to 11   math       two warpgroups: matrix instructions over the ring, the epilogue, and
//                        combine tasks
// Small passes have a kernel of their own: SmallPass of a policy. Passes of four-bit weights whose
// tiles are all low have two more, LowPass and TallLowPass, of two blocks on a multiprocessor, and
// with tokens in bf16 SmallLowPass. These want the routing given. For calls that do not give it, a
// launch of the kernel for large passes comes first, which ends when experts are chosen.
//
// Large passes are launched in pairs of blocks. A pair does each task together, with twice the
// weight rows: the first block's scheduler takes the ticket for both, each block loads its own
// weights and half of the tokens, and these tokens go to both rings. In FP8 a pair takes two tall
// tiles of an expert together, if there are two: each block loads its own tokens and half of the
// weights.
//
// In passes of several ranks the rows of late ranks may have a round of their own: see RoundState.
// Only two roles know of rounds: the scheduler, which makes the tables for the second, and pack.
// The others go from task to task.
//
//   barrier      arrivals that complete a phase                                waited for by
//   full[s]      weights: 1 arrival + bytes; tokens: 1 arrival + bytes, or     math
//                in small passes 64 arrivals: copies of x, or one with h's
//                bytes
//   empty[s]     8 math warps, of both blocks of a pair, when the products     weights, tokens
//                that read the stage are done
//   task_full    scheduler                                                     all other roles
//   demand       weights, a few stages before the end of a GEMM, and tokens    scheduler
//                or gather, when its rows are there; or twice math, when
//                the inputs of a combine task are there; of both blocks of
//                a pair
//   gate_full[s] large passes: 1 arrival + bytes, of x and the router's        math, in its gate
//                weight
//   ticket_full  scheduler of the pair's first block; in small passes,         the second's
//                which have no pairs, each thread that rehearses gather
//   packing[i]   pack: 1 arrival + bytes, of pieces of rows                    pack
//   task_empty   1 weights, 1 tokens or 2 gather, after reading the task,      scheduler, to
//                and 8 math warps, after storing the tile                      publish the tile
//                                                                              (large passes)
//
//   between blocks (device memory, cleared by the pass before):
//   barrier[i]     every block: logits complete; lists complete                all blocks
//   packed[t]      8 per row: tokens of tile t are packed                      tokens (GEMM1)
//   gemm1_done[t]  1 per block of weight rows, from its scheduler (small       tokens (GEMM2); pack
//                  passes: 2, from its math warpgroups): h of tile t is        to reuse t's slot
//                  written
//   parts_stored   small passes in FP8, and weights of four bits times FP8:    nobody: the last
//                  1 per part of what shares a scale that is written in bf16,  ones quantize it
//                  128 columns of h or all; gemm1_done then counts all of
//                  that, and above them 1 per piece that somebody quantizes
//   gemm2_done[t]  counted as gemm1_done (four bits times FP8: 1, from the     combine; tokens and
//                  scheduler): cells of tile t are written                     pack, to reuse t's h
//   sent[e]        8 per row of another rank's expert: the row is sent         the last sender
//   first_sources  several ranks, with a patience: the first block that        all blocks
//                  chooses them
//
//   between ranks (their heaps, raised to the epoch):
//   counts[s][e]   source s has counted its rows for expert e                  all blocks
//   ahead[s]       source s has not waited for this rank's counts              who chooses sources
//   arrived[e][s]  all rows of s for expert e have arrived                     pack, math packing
//   finished[e]    cells of slots with expert e, of another rank, are stored   combine
#pragma once

#include "gpu/layer/loading_roles.cuh"
#include "gpu/layer/math_role.cuh"
#include "gpu/layer/start.cuh"
#include "gpu/ptx/early_launch.cuh"

namespace switchyard::gpu {

constexpr Arrivals kPackedArrivals = arrivals_of(TokenSource::kPacked);
constexpr Arrivals kGatheredArrivals = arrivals_of(TokenSource::kGathered);
static_assert(kPackedArrivals.full == 1 + 1 && kGatheredArrivals.full == 1 + 64 &&
                  kPackedArrivals.empty == 8 && kPackedArrivals.task_full == 1 &&
                  kPackedArrivals.demand == 1 + 1 && kPackedArrivals.gate_full == 1 &&
                  kPackedArrivals.ticket_full == 1 && kGatheredArrivals.ticket_full == 64 &&
                  kPackedArrivals.packing == 1 && kPackedArrivals.task_empty == 1 + 1 + 8 &&
                  kGatheredArrivals.task_empty == 1 + 2 + 8 &&
                  publishers<BF16Policy>(TaskKind::kGemm1) == 1 &&
                  publishers<SmallPass<BF16Policy>>(TaskKind::kGemm1) == 2,
              "the table above");

// Initialises the block's barriers. Called by the block's first thread.
template <typename P>
__device__ __forceinline__ void make_barriers(const Pass<P>& pass) {
  BlockStorage<P>& block = pass.block;
  constexpr Arrivals kArrivals = arrivals_of(P::kTokens);
  make_ring_barriers<P::kTokens, P::kTile.stages>(block.barriers, pass.call.paired);
  for (std::uint32_t s = 0; s < kTaskSlots; ++s) {
    init_barrier(shared_address(&block.queue.task_full[s]), kArrivals.task_full);
    init_barrier(shared_address(&block.queue.task_empty[s]), kArrivals.task_empty);
  }
  if constexpr (P::kGate == GateLoads::kCopyEngine) {
    for (std::uint32_t s = 0; s < kGateStages; ++s) {
      init_barrier(shared_address(&block.gate_full[s]), kArrivals.gate_full);
    }
  }
  if constexpr (P::kTokens == TokenSource::kPacked) {
    for (std::uint64_t& full : block.packing.full) {
      init_barrier(shared_address(&full), kArrivals.packing);
    }
  }
  init_barrier(shared_address(&block.queue.demand), kArrivals.demand << pass.call.paired);
  init_barrier(shared_address(&block.queue.ticket_full), kArrivals.ticket_full);
  fence_new_barriers();
}

// Stores what the block knows of the pass from its parameters alone. Called by the block's first
// thread, perhaps while the kernel before still runs.
template <typename P>
__device__ __forceinline__ void describe_pass(const Pass<P>& pass) {
  BlockStorage<P>& block = pass.block;
  PassState<P>& state = block.pass;
  block.queue.handed_out = 1;  // see describe_first
  state.send.first_sends = state.send.send_lead = 0;
  // begin_first_round() chooses the sources of passes of several ranks.
  if constexpr (!P::kOneRank) {
    state.tiles.round = {.sources = 1u << pass.life().rank(), .last = true};
  }
  state.life.going = Going::kOn;
  state.life.plan_failed = false;
  state.route.x =
      pass.call.converts ? pass.layer.converted : static_cast<const std::uint16_t*>(pass.call.x);
  state.route.x_stride = pass.call.converts ? pass.layer.hidden : pass.call.x_stride;
  if (kScaled<P> && !kRowScales<P> && pass.call.x_type == DType::kF8E4M3) {
    state.rows.rows = static_cast<const std::byte*>(pass.call.x);
    state.rows.row_bytes = pass.call.x_stride;
    state.rows.row_scales = pass.call.x_scales;
    state.rows.row_scale_stride = pass.call.x_scale_stride;
  } else if (kScaled<P>) {
    state.rows.rows = pass.layer.quantized;
    state.rows.row_bytes = pass.layer.hidden;
    state.rows.row_scales = pass.layer.quantized_scales;
    state.rows.row_scale_stride = pass.layer.x_groups;
  } else {
    state.rows.rows = reinterpret_cast<const std::byte*>(state.route.x);
    state.rows.row_bytes = state.route.x_stride * static_cast<std::int64_t>(sizeof(std::uint16_t));
  }
  constexpr std::uint32_t kLog2TileRows = 7, kLog2Boxes = kBoxes<P> / 2;
  static_assert(kTileRows == 1 << kLog2TileRows && kBoxes<P> == 1 << kLog2Boxes);
  state.work.log2_rows = kLog2TileRows + kLog2Boxes + pass.call.paired;
  state.route.tables = pass.routing().tables(kOwnStart<P>);
  if constexpr (!P::kGivenRouting) {
    state.route.gate_slices = GateGrid<P>(pass.layer, pass.call.tokens).slices;
  }
  state.work.log2_combine_chunk = log2_combine_chunk(pass.call.tokens, gridDim.x, kMathWarps);
}

// Reads what the pass before has left: the number of this one, and whether there may be one. A pass
// that was given up leaves words in a state that no later pass may start from. Called by one thread
// after await_kernel_before().
template <typename P>
__device__ __forceinline__ void begin_life(const Pass<P>& pass) {
  LifeState& life = pass.state().life;
  life.epoch = *pass.layer.epoch_word;
  life.aborted = protocol::aborted(pass.layer.heaps);
  life.words = pass.layer.pass_words[life.epoch & 1];
  if (life.aborted) pass.layer.failures->given_up = 1;
}

template <bool kGated, typename P>
__device__ __forceinline__ void loading_group(const Pass<P>& pass) {
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == kWeightsWarp) {
    if (elect()) weights_role<kGated>(pass);
  } else if (warp == kSchedulerWarp) {
    scheduler_role(pass.schedule(), [&](bool stored) { return begin_second_round(pass, stored); });
    if constexpr (!P::kOneRank) {
      // The pass was given up, but the pack warp waits for the second round.
      if (!pass.table().last_round()) give_up_second_round(pass);
    }
  } else if constexpr (kGathers<P>) {
    gather_role(pass);
  } else if (warp == kTokensWarp) {
    tokens_role(pass);
  } else {
    bool goes_on = !pass.state().life.plan_failed;
#pragma unroll 1
    for (;;) {
      if (goes_on) goes_on = pack_role(pass);
      if (pass.table().last_round()) break;
      goes_on = await_second_round(pass) && goes_on;
    }
  }
}

// The math warps' part of sending, done while other warps wait for all ranks' counts.
template <typename P>
__device__ __forceinline__ void send_first_slots(const Pass<P>& pass) {
  if (!place_sends(pass.exchange())) {
    pass.block.pass.life.plan_failed = true;
    if (pass.call.paired != 0 && threadIdx.x == kWarpgroup) give_up_pair(pass.life());
  }
  named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
  const std::uint32_t slots = pass.state().send.first_sends;  // none if the pass was given up
  pass.trace().math(kFirstSendsRecord, &TraceRecord::begin);
  share_out(pass.packing(), slots, [&](std::uint32_t slot, const RowPart& part) {
    send_slots<1>(pass.exchange(), slot, 0, slots, part);
  });
  pass.trace().math_end(kFirstSendsRecord, {TraceKind::kSend, -1, -1, -1,
                                            static_cast<std::int32_t>(slots / gridDim.x)});
}

// The math warps' part of packing.
template <typename P>
__device__ __forceinline__ void pack_first_rows(const Pass<P>& pass) {
  std::uint32_t packed = 0;
  if (pass.exchange().distributed()) {
    named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
    if (pass.state().life.plan_failed) return;
    pass.trace().math(kFirstRowsRecord, &TraceRecord::begin);
    const std::uint32_t rows = first_rows(pass.packing());
    share_out(pass.packing(), rows, [&](std::uint32_t row, const RowPart& part) {
      pack_rows<1>(pass.packing(), row, 0, rows, part);
    });
    packed = rows / gridDim.x;
  } else {
    pass.trace().math(kFirstRowsRecord, &TraceRecord::begin);
    named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
    packed = pack_own_tokens(pass.packing());
  }
  pass.trace().math_end(kFirstRowsRecord,
                        {TraceKind::kPack, -1, -1, -1, static_cast<std::int32_t>(packed)});
}

template <typename P, bool kSilu, bool kGated>
__global__ void __launch_bounds__(kThreads, P::kBlocksPerSM)
    layer_kernel(const __grid_constant__ LayerParams layer,
                 const __grid_constant__ CallParams call) {
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<BlockStorage<P>*>(shared_memory);
  const Pass<P> pass{layer, call, block};
  // The kernel before may still run. Until it has ended, this one touches nothing but its
  // parameters and its own shared memory: x, ids, weights and words are still being written.
  if (threadIdx.x == 0) {
    make_barriers(pass);
    describe_pass(pass);
  }
  if constexpr (!kOwnStart<P>) {
    std::uint32_t* const routed = pass.ranks().routed_rows();
    for (int e = threadIdx.x; e < layer.num_experts; e += kThreads) routed[e] = 0;
  }
  if constexpr (kMakesCodes<P>) make_code_tables(block.quantized.notes);
  await_kernel_before();
  if (threadIdx.x == kThreads - 1) begin_life(pass);  // it has nothing else to do
  __syncthreads();
  if (only_routes<P>(pass.call)) invite_next_kernel();
  const bool planned = !block.pass.life.aborted && start_pass(pass);
  const bool math = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) != 0;
  if (planned) {
    // The next kernel's blocks come as this one's leave. With other ranks to wait for, they would
    // take the room of a rank that shares the device.
    if (!pass.exchange().distributed()) invite_next_kernel();
    // From here on the blocks of a pair write into each other's memory. Each block has seen all
    // blocks arrive with their lists, so it knows that the other has made its barriers and no
    // longer uses its ring for the gate.
    if (!math) {
      cutlass::arch::warpgroup_reg_dealloc<P::kRegisters.loading>();
      loading_group<kGated>(pass);
    } else {
      if constexpr (!P::kOneRank) {
        if (pass.exchange().distributed()) send_first_slots(pass);
      }
      clear_next_words(pass);
      if constexpr (P::kTokens == TokenSource::kPacked) pack_first_rows(pass);
      if (!block.pass.life.plan_failed) {
        cutlass::arch::warpgroup_reg_alloc<P::kRegisters.math>();
        math_role<kSilu, kGated>(pass);
      }
    }
  }
  // Copies that were issued before the pass was given up arrive within microseconds. They must not
  // arrive when another kernel's blocks use this memory.
  if (!pass.goes_on()) {
    constexpr std::uint64_t kEnough = 100'000;  // ns
    for (const std::uint64_t start = device_now_ns(); device_now_ns() - start < kEnough;) {
      __nanosleep(1000);
    }
  }
  if (P::kTile.cluster != 1 && call.paired != 0) {
    // (If the world was aborted before the pass, the other block may not have started.)
    if (!planned && !block.pass.life.aborted && threadIdx.x == 0) give_up_pair(pass.life());
    // A block must not leave while the other may still write into its memory.
    pair_sync();
  }
}

// The kernels for low passes beside those of a policy for large ones, if there is one.
template <typename Large, bool kSilu, bool kGated>
KernelEntry::Low low_entry() {
  if constexpr (kHasLowPass<Large>) {
    using Low = LowPass<Large>;
    using TallLow = TallLowPass<Large>;
    KernelEntry::Low entry{
        nullptr,
        layer_kernel<Low, kSilu, kGated>,
        layer_kernel<TallLow, kSilu, kGated>,
        Low::kBlocksPerSM,
        kTallRows<Large>,
        static_cast<int>(kStageParts<Low>),
        static_cast<int>(kStageParts<TallLow>),
        static_cast<std::uint32_t>(std::max(kSharedBytes<Low>, kSharedBytes<TallLow>)),
        usual_storage<Low>(),
        usual_storage<TallLow>()};
    if constexpr (kHasSmallLowPass<Large>) {
      using SmallLow = SmallLowPass<Large>;
      entry.small = layer_kernel<SmallLow, kSilu, kGated>;
      entry.shared_bytes =
          std::max(entry.shared_bytes, static_cast<std::uint32_t>(kSharedBytes<SmallLow>));
    }
    return entry;
  } else {
    return {};
  }
}

}  // namespace switchyard::gpu
