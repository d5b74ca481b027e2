// One forward pass of one rank: gate, plan, dispatch, expert GEMMs and combine in one cooperative
// launch. What ranks tell each other is in heap.h and ranks.cuh.
//
//   math warps         gate (partial logits), quantize; the loading warps rehearse what follows
//   all warps          route, lists; the scheduler's of a large pass rehearses on
//   loading warps      counts to and from all ranks | plan: every block makes the same one. (In
//                      small passes, all warps.) Whoever is done goes on to its role, rehearses it,
//                      and hears of the plan with its first task; of a large pass, the math warps
//                      send tokens to other ranks meanwhile, and pack rows (of one rank, those of
//                      the block's tokens) as soon as tiles are placed
//   then, by warp:
//     0         weights    tasks -> TMA of 128 or 256 weight rows x 128 bytes per stage
//     1         scheduler  tickets -> tasks; tells other blocks of tiles that are stored
//     2         tokens     tasks -> TMA of the tile's packed rows x 128 bytes per stage; in FP8
//                          their scales, multiplied by the weights'
//     3         pack       sends tokens to other ranks, and copies rows, its own and those sent to
//                          it, into tiles, ahead of the tasks (the first ones are the math warps');
//                          at last tells the rows' ranks of finished tiles (pack.cuh)
//     2, 3      gather     in small passes in place of the two: rows of x from where they are, h
//                          (small passes have a kernel of their own: SmallPass of a policy)
//     4 to 11   math       two warpgroups: WGMMA over the ring (multiply.cuh); epilogue (finish.cuh
//                          or, of large passes in FP8, tall.cuh); combine tasks
//
//   Large passes are launched in pairs of blocks. A pair does each task together, with twice the
//   weight rows: the first block's scheduler takes the ticket for both, each block loads its own
//   weights and half of the tokens, and these go to both rings. In FP8, where an expert has two
//   tall tiles, with both tiles instead: each block loads its own tokens and half of the weights.
//
//   barrier      phase completes on                                              waited for by
//   full[s]      weights: 1 arrival + bytes; tokens:  1 arrival + bytes, or in   math
//                small passes 64 arrivals: copies of x, or one with h's bytes
//   empty[s]     8 math warps, of both blocks of a pair, when the products that  weights, tokens
//                read the stage are done
//   task_full    scheduler                                                       all other roles
//   demand       weights, a few stages before the end of a GEMM, and tokens or     scheduler
//                gather, when its rows are there; or twice math, when what a
//                combine task needs is there; of both blocks of a pair
//   gate_full[s] large passes: 1 arrival + bytes, of x and the router's weight     math, its gate
//   ticket_full  scheduler of the pair's first block; in small passes, which     its second's
//                have no pairs, each thread that rehearses to gather
//   packing[i]   pack: 1 arrival + bytes, of pieces of rows                        pack
//   task_empty   1 weights, 1 tokens or 2 gather, having read it, and 8 math     scheduler: tells
//                warps, having stored the tile                                   of it (large
//                passes)
//
//   between blocks (device memory, cleared by the pass before):
//   barrier[i]     every block: logits complete; lists complete                  all blocks
//   packed[t]      8 per row: tokens of tile t are packed                          tokens (GEMM1)
//   gemm1_done[t]  1 per block of weight rows, from its scheduler (small passes:   tokens (GEMM2);
//                  2, from its math warpgroups): h of tile t is written           pack reusing t
//   parts_stored   small passes in FP8: 1 per part of a group of columns of h      nobody: the last
//                  that is written in bf16; of the group, gemm1_done counts then   quantizes it
//   gemm2_done[t]  the same: cells of tile t are written                         combine; tokens
//                                                                                that reuse t's h;
//                                                                                pack
//   sent[e]        8 per row of another rank's expert: all of it is sent         who sends the last
//
//   between ranks (their heaps, raised to the epoch):
//   counts[s][e]   source s has counted its rows for expert e                    all blocks
//   arrived[e][s]  all rows of s for expert e are here                           pack, math packing
//   finished[t]    another rank has stored tile t's cells                        combine
#pragma once

#include "gpu/math.cuh"
#include "gpu/pack.cuh"

namespace switchyard::gpu {

constexpr Arrivals kPackedArrivals = arrivals_of(TokenSource::kPacked);
constexpr Arrivals kGatheredArrivals = arrivals_of(TokenSource::kGathered);
static_assert(kPackedArrivals.full == 1 + 1 && kGatheredArrivals.full == 1 + 64 &&
                  kPackedArrivals.empty == 8 && kPackedArrivals.task_full == 1 &&
                  kPackedArrivals.demand == 1 + 1 && kPackedArrivals.gate_full == 1 &&
                  kPackedArrivals.ticket_full == 1 && kGatheredArrivals.ticket_full == 64 &&
                  kPackedArrivals.packing == 1 && kPackedArrivals.task_empty == 1 + 1 + 8 &&
                  kGatheredArrivals.task_empty == 1 + 2 + 8 && kTellers<BF16Policy> == 1 &&
                  kTellers<SmallPass<BF16Policy>> == 2,
              "the table above");

// Activations as bf16 rows, one after the other.
__device__ __forceinline__ void convert_activations(const LayerParams& layer,
                                                    const CallParams& call) {
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::size_t count = static_cast<std::size_t>(call.tokens) * (hidden / 2);
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * kThreads) {
    const std::size_t row = i / (hidden / 2), column = i % (hidden / 2) * 2;
    const std::size_t at = row * call.x_stride + column;
    float2 pair;
    if (call.x_type == DType::kF32) {
      pair = *reinterpret_cast<const float2*>(static_cast<const float*>(call.x) + at);
    } else if (call.x_type == DType::kF16) {
      pair = __half22float2(
          *reinterpret_cast<const __half2*>(static_cast<const __half*>(call.x) + at));
    } else {
      pair = __bfloat1622float2(
          *reinterpret_cast<const __nv_bfloat162*>(static_cast<const std::uint16_t*>(call.x) + at));
    }
    reinterpret_cast<std::uint32_t*>(layer.converted)[i] = pack_bf16(pair.x, pair.y);
  }
}

// Lists of a pass that this block routes for itself. The position of a slot among its expert's is
// the number of earlier slots, so all blocks agree. `scratch`: [warps of slots, E] bytes.
template <typename P>
__device__ __forceinline__ void list_own_slots(const LayerParams& layer, BlockStorage<P>& block,
                                               std::uint32_t slots, std::uint8_t* scratch) {
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
  const std::uint32_t rounds = protocol::ceil_div(slots, 32u), lane = threadIdx.x % 32;
  for (std::uint32_t i = threadIdx.x; i < rounds * num_experts; i += kThreads) scratch[i] = 0;
  __syncthreads();
  // Among the 32 slots of a warp at first, then among those of the warps before it.
  for (std::uint32_t round = threadIdx.x / 32; round < rounds; round += kWarps) {
    const std::uint32_t slot = 32 * round + lane;
    const std::int32_t id = slot < slots ? block.own.ids[slot] : -1;
    const std::uint32_t same = __match_any_sync(~0u, id);
    const std::uint32_t before = __popc(same & ((1u << lane) - 1));
    if (id < 0) continue;
    block.own.positions[slot] = static_cast<std::uint16_t>(before);
    if (before == 0) {
      scratch[round * num_experts + id] = static_cast<std::uint8_t>(__popc(same));
    }
  }
  __syncthreads();
  for (std::uint32_t e = threadIdx.x; e < num_experts; e += kThreads) {
    std::uint32_t rows = 0;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      // At most one slot per token, and so no more than a byte holds.
      static_assert(P::kSmallTokens <= 255);
      std::uint8_t& count = scratch[round * num_experts + e];
      const std::uint32_t here = count;
      count = static_cast<std::uint8_t>(rows);
      rows += here;
    }
    block.expert_rows[e] = rows;
  }
  __syncthreads();
  for (std::uint32_t slot = threadIdx.x; slot < slots; slot += kThreads) {
    const std::int32_t id = block.own.ids[slot];
    if (id < 0) continue;
    block.own.positions[slot] = static_cast<std::uint16_t>(block.own.positions[slot] +
                                                           scratch[slot / 32 * num_experts + id]);
  }
}

// Where each slot is in its expert's list, once the experts' rows have places. By one warp.
template <typename P>
__device__ __forceinline__ void fill_own_lists(const LayerParams& layer, BlockStorage<P>& block,
                                               std::uint32_t slots) {
  const std::uint32_t first = block.row_begin[0];  // after the shared expert's rows
  for (std::uint32_t s = threadIdx.x % 32; s < slots; s += 32) {
    const std::int32_t id = block.own.ids[s];
    if (id < 0) continue;
    block.own.lists[block.row_begin[id] - first + block.own.positions[s]] =
        RowEntry::pack(s / layer.top_k, s % layer.top_k);
  }
}

// Lists of a pass whose tokens are shared out over the blocks.
template <typename P>
__device__ __forceinline__ void list_shared_slots(const LayerParams& layer, BlockStorage<P>& block,
                                                  const PassWords& words, std::uint32_t begin,
                                                  std::uint32_t end) {
  std::uint32_t* const base = block.tile_begin;  // not yet in use
  for (std::uint32_t e = threadIdx.x; e < static_cast<std::uint32_t>(layer.num_experts);
       e += kThreads) {
    const std::uint32_t rows = block.ranks.routed[e];
    base[e] = rows != 0 ? atomicAdd(words.expert_rows() + e, rows) : 0;
  }
  __syncthreads();
  const auto top_k = static_cast<std::uint32_t>(layer.top_k);
  for (std::uint32_t slot = begin * top_k + threadIdx.x; slot < end * top_k; slot += kThreads) {
    const std::int32_t id = layer.ids[slot];
    if (id < 0) continue;
    const std::uint32_t position = layer.positions[slot] + base[id];
    layer.positions[slot] = position;
    layer.lists[static_cast<std::size_t>(id) * layer.max_tokens + position] =
        RowEntry::pack(slot / top_k, slot % top_k);
  }
}

// Rows per expert of all blocks', and all ranks', slots. False if the pass was given up. By the
// loading warps, behind the blocks' arrivals.
template <typename P>
__device__ __forceinline__ bool count_all_rows(const Pass<P>& pass) {
  if (pass.distributed()) {
    // Counts take longer to come than to be read: they are read twice, at first as a rehearsal.
#pragma unroll 1
    for (std::uint32_t rehearsal = untold<1>();; rehearsal = 0) {
      read_counts(pass);
      if (rehearsal == 0) break;
      if (!await_counts(pass)) return false;
      trace_pass(pass, kCountsRecord, &TraceRecord::begin);
    }
    named_barrier<kWarpgroup>(kOfLoading);
    return true;
  }
  const bool arrived = threadIdx.x != 0 || all_arrived(pass.waiter(), pass.barrier(kListsReady));
  if (named_barrier_any<kWarpgroup>(kOfLoading, !arrived)) return false;
  trace_pass(pass, kCountsRecord, &TraceRecord::begin);
  for (int e = threadIdx.x; e < pass.layer.num_experts; e += kWarpgroup) {
    pass.block.expert_rows[e] = __ldcg(pass.state().words.expert_rows() + e);
  }
  named_barrier<kWarpgroup>(kOfLoading);
  return true;
}

template <bool kGated, typename P>
__device__ __forceinline__ void loading_group(const Pass<P>& pass) {
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == kWeightsWarp) {
    if (elect()) weights_role<kGated>(pass);
  } else if (warp == kSchedulerWarp) {
    scheduler_role(pass);
  } else if constexpr (kGathers<P>) {
    gather_role(pass);
  } else if (warp == kTokensWarp) {
    tokens_role(pass);
  } else if (!pass.state().plan_failed) {
    pack_role(pass);
  }
}

// Of routing, what each of the loading warps rehearses. The scheduler's rehearses to place tiles
// and to describe a task.
__device__ __forceinline__ std::uint32_t rehearsed_parts(std::uint32_t warp) {
  switch (warp) {
    case kWeightsWarp:
      return routing::kScorePart;
    case kTokensWarp:
      return routing::kChoicePart;
    case kPackWarp:
      return routing::kWeightPart;
    default:
      return 0;
  }
}

// By one warp, which sees the words afterwards.
__device__ __forceinline__ void fill_together(std::uint32_t* words, int count,
                                              std::uint32_t value) {
  __syncwarp();
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) words[i] = value;
  __syncwarp();
}

// That tiles are placed, or will not be, the scheduler's warp tells; the pack warp waits for it,
// and for the math warps.
__device__ __forceinline__ void tell_placed(std::uint32_t warp) {
  if (warp == kSchedulerWarp) {
    named_barrier_arrive<kMathAndScheduler>(kTilesPlaced);
    named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
  } else if (warp == kPackWarp) {
    named_barrier_anywhere<kMathSchedulerAndPack>(kAllPlaced);
  }
}

template <typename P>
__device__ __forceinline__ void store_stats(const Pass<P>& pass) {
  if (blockIdx.x != 0 || threadIdx.x >= kWarpgroup) return;
  for (int e = threadIdx.x; e < pass.layer.num_experts; e += kWarpgroup) {
    pass.layer.stats[e] = pass.block.expert_rows[e];
  }
  if (threadIdx.x == 0) pass.layer.stats[pass.layer.num_experts] = pass.call.tokens;
}

// The block's part of the gate and of the quantization, by the math warps. Others wait for it if it
// is shared: the logits, and in small passes what all blocks quantize, which they read when they
// are past the logits. (Large ones read it when they are past the lists.)
template <typename P>
__device__ __forceinline__ void gate_and_quantize(const Pass<P>& pass, bool math, bool quantizes,
                                                  bool shares) {
  const auto quantize = [&] {
    if constexpr (kScaled<P>) {
      if (quantizes) quantize_activations(pass);
    }
  };
  trace_math(pass, kGateRecord, &TraceRecord::begin);
  if (math && kOwnStart<P> && quantizes) {
    quantize();
    named_barrier<kMathThreads>(kOfMath);
  }
  if (math && pass.call.gated) gate_logits(pass);
  if (shares && threadIdx.x == kWarpgroup) add_release_gpu(pass.barrier(kLogitsReady), 1);
  if (math && !kOwnStart<P>) quantize();
  trace_math_end(pass, kGateRecord, {TraceKind::kGate});
}

// Waits for all blocks' parts of it; false if the pass was given up. By the warps that route: those
// that begin together ask together.
template <typename P>
__device__ __forceinline__ bool await_gate(const Pass<P>& pass, bool math) {
  const std::uint32_t asks = kOwnStart<P> ? 0 : math ? kWarpgroup : threadIdx.x & ~31u;
  const bool arrived =
      threadIdx.x != asks || all_arrived(pass.waiter(), pass.barrier(kLogitsReady));
  if constexpr (kOwnStart<P>) return __syncthreads_and(arrived);
  return math ? !named_barrier_any<kMathThreads>(kOfMath, !arrived) : __all_sync(~0u, arrived) != 0;
}

// From activations to what every role needs to know. Of a small pass all but the scheduler's warp
// leave before it knows that, of a large one all but the scheduler's and the pack warp. False if
// the pass was given up: in all warps or, when the math warps of a large pass have left, in the
// loading warps; the math warps then find state.plan_failed. (These may fail alone, before they
// send; they and the pack warp find that.)
template <typename P>
__device__ __forceinline__ bool plan_pass(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const CallParams& call = pass.call;
  BlockStorage<P>& block = pass.block;
  trace_pass(pass, kRouteRecord, &TraceRecord::ready);
  if (call.converts) {
    convert_activations(layer, call);
    grid_arrive(pass.barrier(kConverted));
    if (!grid_await(pass.waiter(), pass.barrier(kConverted))) return false;
  }
  // Told to be the same in all lanes: a third less code.
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  // The loading warps, which have no part in the gate, rehearse what comes after it, each a part of
  // it, on one token and whatever numbers the last pass left, so that its code is in the caches
  // when the logits come. Where few blocks of a small pass have a part in the gate, theirs do not:
  // all wait for these. (In large passes the copy engine has the gate's loads under way.)
  constexpr bool alone = kOwnStart<P>;
  const std::uint32_t gate_units = call.gated ? GateGrid<P>(layer, call.tokens).units() : 0;
  const bool rehearses = !alone || blockIdx.x >= gate_units || gate_units > gridDim.x / 2;
  const bool quantizes = kScaled<P> && call.x_type != DType::kF8E4M3;
  const bool shares = call.gated || (alone && quantizes);
  const bool math = warp >= kWarpgroup / 32;
  // The math warps of a large pass route first; the loading warps, if there are tokens left, when
  // they have rehearsed; but for the scheduler's, which rehearses until tiles are to be placed.
  constexpr std::uint32_t kRouters = alone ? kWarps : kWarps - 1;
  const std::uint32_t router = alone                   ? warp
                               : math                  ? warp - kWarpgroup / 32
                               : warp < kSchedulerWarp ? kMathWarps + warp
                                                       : kMathWarps + warp - 1;
  const bool routes = alone || warp != kSchedulerWarp;
  bool given_up = false;
#pragma unroll 1
  for (int run = call.gated || quantizes ? 0 : 1; run < 2; ++run) {
    const bool rehearsal = run == 0;
    if (rehearsal) {
      gate_and_quantize(pass, math, quantizes, shares);
      if (math || !rehearses) continue;
    }
    const std::uint32_t begin = rehearsal || alone ? 0 : pass.first_token(blockIdx.x);
    const std::uint32_t end = rehearsal ? min(call.tokens, 1u)
                              : alone   ? call.tokens
                                        : pass.first_token(blockIdx.x + 1);
    if (!rehearsal && shares && routes && (alone || math || begin + router < end)) {
      given_up = !await_gate(pass, math);
    }
    if (!rehearsal) {
      trace_pass(pass, kRouteRecord, &TraceRecord::begin, alone ? 0 : kWarpgroup);
    }
    const std::uint32_t parts = rehearsal ? rehearsed_parts(warp) : routing::kAllRouteParts;
    if (parts != 0 && !given_up && (rehearsal || routes)) {
      route_tokens<kRouters>(pass, rehearsal ? 0 : begin + router, end, parts);
    }
    if (!rehearsal) {
      if (__syncthreads_or(given_up)) return false;
      if constexpr (alone) {
        auto* const scratch = reinterpret_cast<std::uint8_t*>(block.ring);
        list_own_slots(layer, block, end * layer.top_k, scratch);
        // The gate and lists used the ring's memory; from the next barrier on the async proxy does.
        fence_async_proxy_shared();
        __syncthreads();
      } else {
        list_shared_slots(layer, block, pass.state().words, begin, end);
        trace_turn(pass, kRouteRecord, TraceKind::kRoute, kCountsRecord);
        if (!pass.distributed()) {
          grid_arrive(pass.barrier(kListsReady));
        } else if (grid_arrive_last(pass.barrier(kListsReady))) {
          publish_counts(pass);
        }
        if (math) return true;
        if (!count_all_rows(pass)) {
          if (warp == kSchedulerWarp) block.pass.plan_failed = true;
          tell_placed(warp);
          return false;
        }
      }
      store_stats(pass);
      if constexpr (alone) {
        trace_turn(pass, kRouteRecord, TraceKind::kRoute, kTraceRecords);
        // The rest is one warp's; the others are on their way to what they wait for next.
        if (warp != kSchedulerWarp) return true;
      } else {
        trace_turn(pass, kCountsRecord, TraceKind::kCounts, kPlanRecord);
        // These two wait for nothing but their first task.
        if (warp == kWeightsWarp || warp == kTokensWarp) return true;
      }
    }
    if (warp == kSchedulerWarp) {
      const bool has_shared = layer.cells_per_token > layer.top_k;
      if (rehearsal) fill_together(block.expert_rows, layer.num_experts, 1);
      place_tiles(layer, block, has_shared ? call.tokens : 0);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        auto& state = block.pass;
        state.log2_splits =
            alone ? log2_splits<P>(layer, pass.num_tiles(), state.shared_tiles.count) : 0;
        if constexpr (!kJoinedScales<P>) {
          state.stage_shape = {StageLayout<P>::count(state.max_height),
                               StageLayout<P>::bytes(state.max_height)};
        }
      }
    }
    if (!alone && !rehearsal) tell_placed(warp);
    if (warp == kSchedulerWarp) {
      __syncwarp();
      if (alone && !rehearsal) fill_own_lists(layer, block, end * layer.top_k);
      describe_first(pass, rehearsal);
    }
  }
  if constexpr (!alone) {
    trace_turn(pass, kPlanRecord, TraceKind::kPlan, kTraceRecords, 32 * kSchedulerWarp);
  }
  return true;
}

template <typename P, ActivationKind kKind, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    layer_kernel(const __grid_constant__ LayerParams layer,
                 const __grid_constant__ CallParams call) {
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<BlockStorage<P>*>(shared_memory);
  if (threadIdx.x == 0) {
    constexpr Arrivals kArrivals = arrivals_of(P::kTokens);
    for (std::uint32_t s = 0; s < kMaxStages; ++s) {
      init_barrier(shared_address(&block.full[s]), kArrivals.full);
      init_barrier(shared_address(&block.empty[s]), kArrivals.empty << call.paired);
    }
    for (std::uint32_t s = 0; s < kTaskSlots; ++s) {
      init_barrier(shared_address(&block.task_full[s]), kArrivals.task_full);
      init_barrier(shared_address(&block.task_empty[s]), kArrivals.task_empty);
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
    init_barrier(shared_address(&block.demand), kArrivals.demand << call.paired);
    init_barrier(shared_address(&block.ticket_full), kArrivals.ticket_full);
    fence_new_barriers();
    block.handed_out = 1;  // see describe_first
    auto& state = block.pass;
    state.first_sends = state.send_lead = 0;
    state.going = Going::kOn;
    state.plan_failed = false;
    state.epoch = *layer.epoch;
    state.words = layer.pass_words[state.epoch & 1];
    state.x = call.converts ? layer.converted : static_cast<const std::uint16_t*>(call.x);
    state.x_stride = call.converts ? layer.hidden : call.x_stride;
    if (kScaled<P> && call.x_type == DType::kF8E4M3) {
      state.rows = static_cast<const std::byte*>(call.x);
      state.row_bytes = call.x_stride;
      state.row_scales = call.x_scales;
      state.row_scale_stride = call.x_scale_stride;
    } else if (kScaled<P>) {
      state.rows = layer.quantized;
      state.row_bytes = layer.hidden;
      state.row_scales = layer.quantized_scales;
      state.row_scale_stride = layer.x_groups;
    } else {
      state.rows = reinterpret_cast<const std::byte*>(state.x);
      state.row_bytes = state.x_stride * static_cast<std::int64_t>(sizeof(std::uint16_t));
    }
    constexpr std::uint32_t kLog2TileRows = 7, kLog2Boxes = kBoxes<P> / 2;
    static_assert(kTileRows == 1 << kLog2TileRows && kBoxes<P> == 1 << kLog2Boxes);
    state.log2_rows = kLog2TileRows + kLog2Boxes + call.paired;
    state.tables = tables_of(layer, block, kOwnStart<P>);
    state.gate_slices = GateGrid<P>(layer, call.tokens).slices;
    state.log2_combine_chunk = log2_combine_chunk(call.tokens, gridDim.x);
  }
  // Behind a pass that was given up, words are not as a pass must find them. (Asked by a thread
  // that has nothing else to do.)
  if (threadIdx.x == kThreads - 1) {
    block.pass.aborted = protocol::aborted(layer.heaps);
    if (block.pass.aborted) layer.failures->given_up = 1;
  }
  if constexpr (!kOwnStart<P>) {
    for (int e = threadIdx.x; e < layer.num_experts; e += kThreads) block.ranks.routed[e] = 0;
  }
  __syncthreads();
  const Pass<P> pass{layer, call, block};
  const bool planned = !block.pass.aborted && plan_pass(pass);
  const bool math = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) != 0;
  if (planned) {
    // From here on the blocks of a pair write into each other's memory. Each knows that the other
    // has made its barriers and left its ring to the tasks: it has seen all blocks arrive, with
    // their lists.
    if (!math) {
      cutlass::arch::warpgroup_reg_dealloc<P::kRegisters.loading>();
      loading_group<kGated>(pass);
    } else {
      if constexpr (!P::kOneRank) {
        if (pass.distributed()) send_first_slots(pass);
      }
      clear_next_words(pass);
      if constexpr (P::kTokens == TokenSource::kPacked) pack_first_rows(pass);
      if (!block.pass.plan_failed) {
        cutlass::arch::warpgroup_reg_alloc<P::kRegisters.math>();
        math_role<kKind, kGated>(pass);
      }
    }
  }
  // What was asked of the copy engine before the pass was given up comes within microseconds, and
  // not when others have this memory.
  if (!pass.goes_on()) {
    constexpr std::uint64_t kEnough = 100'000;  // ns
    for (const std::uint64_t start = device_now_ns(); device_now_ns() - start < kEnough;) {
      __nanosleep(1000);
    }
  }
  if (call.paired != 0) {
    // (Aborted before it began: the other block has perhaps not started.)
    if (!planned && !block.pass.aborted && threadIdx.x == 0) give_up_pair(pass);
    // Nor may a block leave while the other still does.
    pair_sync();
  }
}

}  // namespace switchyard::gpu
