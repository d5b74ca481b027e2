// The start of a pass, from activations to what every role needs to know: gate, choice of experts,
// counts of all ranks, places of rows and tiles. Warps rehearse each step while they have nothing
// to do, so that its code is in the caches when they need it.
#pragma once

#include "gpu/exchange/counts.cuh"
#include "gpu/layer/record.cuh"
#include "gpu/layer/storage.cuh"
#include "gpu/tokens/activations.cuh"

namespace switchyard::gpu {

// Finds out whose rows the first round has. Returns false if the pass was given up. Called by the
// loading warps.
template <typename P>
__device__ __forceinline__ bool begin_first_round(const Pass<P>& pass) {
  RoundState& round = pass.state().tiles.round;
  if (threadIdx.x == 0) {
    const bool listed = all_arrived(pass.waiter(), pass.life().barrier(kListsReady));
    round.sources = listed ? choose_sources(pass.exchange(), pass.call.patience_ns) : 0;
    round.last = round.sources == 0 || round.sources == pass.exchange().all_sources();
  }
  named_barrier<kWarpgroup>(kOfLoading);
  return round.sources != 0;
}

// True if the round has the rows of this rank's own tokens.
template <typename P>
__device__ __forceinline__ bool own_rows(const Pass<P>& pass) {
  return P::kOneRank || (pass.state().tiles.round.sources >> pass.life().rank() & 1) != 0;
}

// Stores the statistics of a pass with two rounds, of all ranks' counts. Called by one warp of each
// block.
template <typename P>
__device__ __forceinline__ void store_stats_of_rounds(const Pass<P>& pass) {
  if (blockIdx.x != 0) return;
  const LayerParams& layer = pass.layer;
  const auto num_experts = static_cast<std::uint32_t>(layer.num_experts);
#pragma unroll 1
  for (std::uint32_t e = threadIdx.x % 32; e < num_experts; e += 32) {
    std::uint32_t rows = 0;
#pragma unroll 1
    for (int source = 0; source < pass.life().num_ranks(); ++source) {
      rows += static_cast<std::uint32_t>(protocol::load_relaxed(
          layer.heap.counts(pass.life().epoch(), source).in(layer.mine) + e));
    }
    layer.stats[e] = rows;
  }
  if (threadIdx.x % 32 == 0) layer.stats[num_experts] = pass.call.tokens;
  record_routing(pass, layer.stats);  // a lane records what it has stored itself
}

// Begins the second round, once the first has no more tasks: see RoundState. `stored`: all of this
// block's tasks are done. Returns false if the pass was given up. Called by the scheduler's warp,
// while the pack warp is in await_second_round().
template <typename P>
__device__ __forceinline__ bool begin_second_round(const Pass<P>& pass, bool stored) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t lane = threadIdx.x % 32;
  RoundState& round = pass.state().tiles.round;
  // All roles but the pack warp's have left the first round's tables. Now that one has, too.
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
  const std::uint32_t sources = pass.exchange().all_sources() & ~round.sources;
  const std::uint32_t tiles = pass.table().num_tiles(), rows = pass.table().num_rows();
  __syncwarp();
  if (lane == 0) {
    round.sources = sources;
    round.number = 1;
    round.first_tile = tiles;
    round.first_row = rows;
  }
  __syncwarp();
  const bool has_shared = layer.cells_per_token > layer.top_k;
  bool counted = stored;
  // The first iteration is a rehearsal, on what is there.
#pragma unroll 1
  for (std::uint32_t rehearsal = opaque<1>(); counted; rehearsal = 0) {
    if (rehearsal == 0) {
      counted = __all_sync(~0u, await_words_of_counts<32>(pass.exchange(), sources)) != 0;
      if (!counted) break;
    }
    read_counts<32>(pass.exchange(), sources);
    __syncwarp();
    place_tiles(pass.table(), has_shared && own_rows(pass) ? pass.call.tokens : 0);
    __syncwarp();
    if (rehearsal == 0) break;
  }
  if (counted) store_stats_of_rounds(pass);
  if (lane == 0) {
    round.failed = !counted;
    round.last = true;
  }
  __syncwarp();
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
  return counted;
}
// Gives up the second round instead, if the scheduler's role has ended because the pass was given
// up.
template <typename P>
__device__ __forceinline__ void give_up_second_round(const Pass<P>& pass) {
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
  RoundState& round = pass.state().tiles.round;
  if (threadIdx.x % 32 == 0) round.failed = round.last = true;
  __syncwarp();
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
}
// Waits in the pack warp for the second round to begin. Returns false if the pass was given up.
template <typename P>
__device__ __forceinline__ bool await_second_round(const Pass<P>& pass) {
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
  named_barrier_anywhere<kSchedulerAndPack>(kBetweenRounds);
  return !pass.state().tiles.round.failed;
}

// Collects the rows per expert over all blocks and all ranks. Returns false if the pass was given
// up. Called by the loading warps after their block has arrived with its lists.
template <typename P>
__device__ __forceinline__ bool count_all_rows(const Pass<P>& pass) {
  if (pass.exchange().distributed()) {
    // Waiting for counts takes longer than reading them, so they are read twice: first as a
    // rehearsal.
#pragma unroll 1
    for (std::uint32_t rehearsal = opaque<1>();; rehearsal = 0) {
      read_counts<kWarpgroup>(pass.exchange(), pass.state().tiles.round.sources);
      if (rehearsal == 0) break;
      if (!begin_first_round(pass)) return false;
      if (!await_counts(pass.exchange(), pass.state().tiles.round.sources)) return false;
      pass.trace().pass(kCountsRecord, &TraceRecord::begin);
    }
    named_barrier<kWarpgroup>(kOfLoading);
    return true;
  }
  const bool arrived =
      threadIdx.x != 0 || all_arrived(pass.waiter(), pass.life().barrier(kListsReady));
  if (named_barrier_any<kWarpgroup>(kOfLoading, !arrived)) return false;
  pass.trace().pass(kCountsRecord, &TraceRecord::begin);
  for (int e = threadIdx.x; e < pass.layer.num_experts; e += kWarpgroup) {
    pass.tiles().expert_rows[e] =
        static_cast<TableWord<P>>(__ldcg(pass.state().life.words.expert_rows() + e));
  }
  named_barrier<kWarpgroup>(kOfLoading);
  return true;
}

// The part of routing that each loading warp rehearses. The scheduler's warp instead rehearses
// placing tiles and describing a task.
__device__ __forceinline__ std::uint32_t rehearsed_parts(std::uint32_t warp) {
  switch (warp) {
    case kWeightsWarp: return routing::kScorePart;
    case kTokensWarp: return routing::kChoicePart;
    case kPackWarp: return routing::kWeightPart;
    default: return 0;
  }
}

// Fills words by one warp. All its lanes see them afterwards.
template <typename Word>
__device__ __forceinline__ void fill_together(Word* words, int count, Word value) {
  __syncwarp();
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) words[i] = value;
  __syncwarp();
}

// The scheduler's warp signals that tiles are placed, or will not be. The pack warp waits for that
// signal and for the math warps.
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
  if (blockIdx.x != 0 || threadIdx.x >= kWarpgroup || !pass.table().last_round()) return;
  for (int e = threadIdx.x; e < pass.layer.num_experts; e += kWarpgroup) {
    pass.layer.stats[e] = pass.tiles().expert_rows[e];
  }
  if (threadIdx.x == 0) pass.layer.stats[pass.layer.num_experts] = pass.call.tokens;
  // (The weights and tokens warps are wanted for the first task.)
  if (threadIdx.x / 32 == kPackWarp) record_routing(pass, pass.tiles().expert_rows);
}

// Does the block's part of the gate and of quantization in the math warps. If `shares`, other
// blocks wait for it: for the logits and, in small passes, for the quantized tokens, which all
// blocks read once they have the logits. (Large passes read these after the lists.)
template <typename P>
__device__ __forceinline__ void gate_and_quantize(const Pass<P>& pass, bool math, bool quantizes,
                                                  bool shares) {
  const auto quantize = [&] {
    if constexpr (kScaled<P>) {
      if (quantizes) {
        if constexpr (kRowScales<P>) {
          quantize_activations_by_row<P>(pass.layer, pass.layer, pass.call, pass.block.pass.route,
                                         pass.call.tokens);
        } else {
          quantize_activations(pass.layer, pass.layer, pass.block.pass.route, pass.call.tokens);
        }
      }
    }
  };
  pass.trace().math(kGateRecord, &TraceRecord::begin);
  if (math && kOwnStart<P> && quantizes) {
    quantize();
    named_barrier<kMathThreads>(kOfMath);
  }
  if constexpr (!P::kGivenRouting) {
    if (math && pass.call.gated) gate_logits(pass.gate());
  }
  if (shares && threadIdx.x == kWarpgroup) {
    add_release_gpu(pass.life().barrier(kLogitsReady), 1);
  }
  if (math && !kOwnStart<P>) quantize();
  pass.trace().math_end(kGateRecord, {TraceKind::kGate});
}

// Waits for all blocks' parts of the gate; returns false if the pass was given up. Called by the
// warps that route. Warps that begin together share one look.
template <typename P>
__device__ __forceinline__ bool await_gate(const Pass<P>& pass, bool math) {
  const std::uint32_t asks = kOwnStart<P> ? 0 : math ? kWarpgroup : threadIdx.x & ~31u;
  const bool arrived =
      threadIdx.x != asks || all_arrived(pass.waiter(), pass.life().barrier(kLogitsReady));
  if constexpr (kOwnStart<P>) return __syncthreads_and(arrived);
  return math ? !named_barrier_any<kMathThreads>(kOfMath, !arrived) : __all_sync(~0u, arrived) != 0;
}

// The way of a warp after exchange_counts(): to the next step, to its role, or out of the pass.
enum class Next { kStep, kRole, kGivenUp };

// The steps of the start, for one warp. With `rehearsal` a step runs its code without lasting
// effect.
template <typename P>
class PassStart {
 public:
  static constexpr bool kOwn = kOwnStart<P>;

  __device__ PassStart(const Pass<P>& pass, std::uint32_t warp)
      : pass_(pass),
        warp_(warp),
        math_(warp >= kWarpgroup / 32),
        quantizes_(!only_routes<P>(pass.call) &&
                   (kRowScales<P> || (kScaled<P> && pass.call.x_type != DType::kF8E4M3))),
        shares_(gates() || (kOwn && quantizes_)),
        router_(kOwn                    ? warp
                : math_                 ? warp - kWarpgroup / 32
                : warp < kSchedulerWarp ? kMathWarps + warp
                                        : kMathWarps + warp - 1),
        routes_(kOwn || warp != kSchedulerWarp) {
    // The loading warps have no part in the gate. Each of them rehearses a part of the steps after
    // it, on one token and on the numbers that the last pass left. In a small pass in which few
    // blocks have a part in the gate, those blocks do not rehearse, because all others wait for
    // them. (In large passes the copy engine already has the gate's loads under way.)
    const std::uint32_t gate_units =
        gates() ? GateGrid<P>(pass.layer, pass.call.tokens).units() : 0;
    rehearses_ = !kOwn || blockIdx.x >= gate_units || gate_units > gridDim.x / 2;
  }

  // True if the real iteration is preceded by one for the gate and for rehearsals.
  __device__ bool has_rehearsal() const { return gates() || quantizes_; }
  __device__ bool math() const { return math_; }

  // Computes logits and quantized activations in the math warps. Returns true for warps that
  // rehearse.
  __device__ __forceinline__ bool gate() {
    gate_and_quantize(pass_, math_, quantizes_, shares_);
    return !math_ && rehearses_;
  }

  // Chooses experts and weights of all tokens, or of the block's share. In shared starts the math
  // warps route first. The loading warps join after their rehearsals if tokens are left. The
  // scheduler's warp does not: it rehearses until tiles can be placed.
  __device__ __forceinline__ void choose(bool rehearsal) {
    constexpr std::uint32_t kRouters = kOwn ? kWarps : kWarps - 1;
    begin_ = rehearsal || kOwn ? 0 : first_token_of(pass_.call.tokens, blockIdx.x);
    end_ = rehearsal ? min(pass_.call.tokens, 1u)
           : kOwn    ? pass_.call.tokens
                     : first_token_of(pass_.call.tokens, blockIdx.x + 1);
    if (!rehearsal && shares_ && routes_ && (kOwn || math_ || begin_ + router_ < end_)) {
      given_up_ = !await_gate(pass_, math_);
    }
    if (!rehearsal) {
      pass_.trace().pass(kRouteRecord, &TraceRecord::begin, kOwn ? 0 : kWarpgroup);
    }
    const std::uint32_t parts = rehearsal ? rehearsed_parts(warp_) : routing::kAllRouteParts;
    if (parts != 0 && !given_up_ && (rehearsal || routes_)) {
      route_tokens<kRouters>(pass_.routing(), rehearsal ? 0 : begin_ + router_, end_, parts);
    }
  }

  // Makes the lists of slots and, from all ranks' counts, the rows of each expert. Only one part is
  // rehearsed: reading counts, in count_all_rows().
  __device__ __forceinline__ Next exchange_counts() {
    BlockStorage<P>& block = pass_.block;
    if (__syncthreads_or(given_up_)) return Next::kGivenUp;
    if constexpr (kOwn) {
      auto* const scratch = reinterpret_cast<std::uint8_t*>(block.memory.ring);
      list_own_slots(pass_.routing(), pass_.tiles().expert_rows, end_ * pass_.layer.top_k, scratch);
      // The gate and the lists used the ring's memory; after the next barrier the async proxy does.
      fence_async_proxy_shared();
      __syncthreads();
    } else {
      // tile_begin serves as scratch memory: tiles are placed later.
      if (pass_.call.capacity != kNoCapacity) {
        if (!list_kept_slots(pass_.routing(), pass_.tiles().tile_begin, pass_.state().life.words,
                             begin_, end_)) {
          return Next::kGivenUp;
        }
      } else {
        list_shared_slots(pass_.routing(), pass_.tiles().tile_begin, pass_.state().life.words,
                          begin_, end_);
      }
      pass_.trace().turn(kRouteRecord, TraceKind::kRoute, kCountsRecord);
      if (!pass_.exchange().distributed()) {
        grid_arrive(pass_.life().barrier(kListsReady));
      } else if (grid_arrive_last(pass_.life().barrier(kListsReady))) {
        publish_counts(pass_.exchange());
      }
      if (math_) return Next::kRole;
      if (!count_all_rows(pass_)) {
        if (warp_ == kSchedulerWarp) block.pass.life.plan_failed = true;
        tell_placed(warp_);
        return Next::kGivenUp;
      }
    }
    store_stats(pass_);
    if constexpr (kOwn) {
      pass_.trace().turn(kRouteRecord, TraceKind::kRoute, kTraceRecords);
      // One warp does the rest; the others go on to their roles.
      if (warp_ != kSchedulerWarp) return Next::kRole;
    } else {
      pass_.trace().turn(kCountsRecord, TraceKind::kCounts, kPlanRecord);
      // These two warps need nothing but their first task.
      if (warp_ == kWeightsWarp || warp_ == kTokensWarp) return Next::kRole;
    }
    return Next::kStep;
  }

  // Places tiles and rows, and describes the block's first task. The scheduler's warp does the
  // work.
  __device__ __forceinline__ void place(bool rehearsal) {
    BlockStorage<P>& block = pass_.block;
    const LayerParams& layer = pass_.layer;
    if constexpr (kLendsRing<P>) {
      // The gate, which is under way, still has all of the ring.
      if (rehearsal && layer.tables_in_ring) return;
    }
    if (warp_ == kSchedulerWarp) {
      const bool has_shared = layer.cells_per_token > layer.top_k;
      if (rehearsal) {
        fill_together(pass_.tiles().expert_rows, layer.num_experts, TableWord<P>{1});
      }
      place_tiles(pass_.table(), has_shared && own_rows(pass_) ? pass_.call.tokens : 0);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        auto& state = block.pass;
        if constexpr (P::kTile.most_log2_split != 0) {
          state.work.log2_splits = log2_splits(pass_.progress(), pass_.table().num_tiles(),
                                               state.tiles.shared_tiles.count);
        } else {
          state.work.log2_splits = 0;
        }
        if constexpr (!StageLayout<P>::kFixed) {
          const std::uint32_t ring_bytes = kLendsRing<P> ? layer.ring_bytes : kRing<P>;
          // (The ring goes on through a second round, whose tiles are not known yet.)
          const std::uint32_t height =
              pass_.table().last_round() ? state.tiles.max_height : kMaxHeight<P>;
          state.stages.shape = {StageLayout<P>::count(height, ring_bytes),
                                StageLayout<P>::bytes(height)};
        }
      }
    }
    if (!kOwn && !rehearsal) tell_placed(warp_);
    if (warp_ == kSchedulerWarp) {
      __syncwarp();
      if (kOwn && !rehearsal) {
        fill_own_lists(pass_.routing(), pass_.tiles().row_begin, end_ * layer.top_k);
      }
      describe_first(pass_.schedule(), rehearsal);
    }
  }

 private:
  __device__ bool gates() const { return !P::kGivenRouting && pass_.call.gated; }

  const Pass<P>& pass_;
  const std::uint32_t warp_;
  const bool math_, quantizes_;
  const bool shares_;           // others wait for this block's part of the gate
  const std::uint32_t router_;  // this warp's index among those that route
  const bool routes_;
  bool rehearses_;
  bool given_up_ = false;
  std::uint32_t begin_ = 0, end_ = 0;  // the tokens of this block
};

// Leads from activations to what every role needs to know. Most warps leave before tiles are
// placed: in a small pass only the scheduler's warp stays, in a large one the pack warp stays, too.
// Returns false if the launch only routes, or if the pass was given up: in all warps or, when the
// math warps of a large pass have left, in the loading warps; the math warps then find
// LifeState::plan_failed. (Math warps may also fail by themselves before they send; they and the
// pack warp see that.)
template <typename P>
__device__ __forceinline__ bool start_pass(const Pass<P>& pass) {
  pass.trace().pass(kRouteRecord, &TraceRecord::ready);
  if (pass.call.converts) {
    convert_activations(pass.layer, pass.layer, pass.call, pass.call.tokens);
    grid_arrive(pass.life().barrier(kConverted));
    if (!grid_await(pass.waiter(), pass.life().barrier(kConverted))) return false;
  }
  // A shuffle tells the compiler that the number is the same in all lanes: that saves a third of
  // the code.
  PassStart<P> start(pass, __shfl_sync(~0u, threadIdx.x / 32, 0));
  // The loop gives a step and its rehearsal one copy of the code. Its first iteration is the gate,
  // with rehearsals meanwhile.
#pragma unroll 1
  for (int turn = start.has_rehearsal() ? 0 : 1; turn < 2; ++turn) {
    const bool rehearsal = turn == 0;
    if (rehearsal && !start.gate()) continue;
    start.choose(rehearsal);
    if (!rehearsal) {
      if (only_routes<P>(pass.call)) return false;
      const Next next = start.exchange_counts();
      if (next != Next::kStep) return next == Next::kRole;
    }
    start.place(rehearsal);
  }
  if constexpr (!kOwnStart<P>) {
    pass.trace().turn(kPlanRecord, TraceKind::kPlan, kTraceRecords, 32 * kSchedulerWarp);
  }
  return true;
}

}  // namespace switchyard::gpu
