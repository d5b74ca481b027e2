// A block's shared memory, and the views through which the rooms see a pass.
#pragma once

#include "gpu/exchange/combine.cuh"
#include "gpu/layer/params.h"
#include "gpu/route/choose.cuh"
#include "gpu/schedule/scheduler.cuh"
#include "gpu/tokens/gathered.cuh"
#include "gpu/tokens/pack.cuh"

namespace switchyard::gpu {

// The facts that the block finds out about the pass. They are in shared memory because the math
// warps have no registers to keep them in.
template <typename P>
struct PassState {
  LifeState life;
  RouteState route;
  TokenRows rows;
  TileTableState tiles;
  WorkState work;
  SendState send;
  StageShape<StageLayout<P>> stage_shape;
};

template <typename P>
struct BlockStorage {
  RingMemory memory;
  StagingMemory<P> staging;
  QueueStorage queue;
  RingBarriers barriers;
  alignas(8) std::uint64_t gate_full[kGateStages];  // for gates that use the ring
  TileTableStorage tiles;
  OwnRouting<P> own;
  RankTables<P> ranks;
  RowNotes<P> notes;
  ScaleMemory<P> quantized;
  PackStorage<P> packing;
  PassState<P> pass;
};
template <typename P>
inline constexpr std::size_t kSharedBytes = sizeof(BlockStorage<P>);
template <typename... P>
constexpr bool fit = ((kSharedBytes<P> <= std::size_t{227} * 1024) && ...);
static_assert(fit<BF16Policy, SmallPass<BF16Policy>, FP8Policy, SmallPass<FP8Policy>>,
              "the block's shared memory is full");

// A block's access to a pass. Functions of lower rooms take only the views that they use.
template <typename P>
struct Pass {
  const LayerParams& layer;
  const CallParams& call;
  BlockStorage<P>& block;

  __device__ PassState<P>& state() const { return block.pass; }
  __device__ Lifetime life() const { return {layer, block.pass.life}; }
  __device__ Waiter waiter() const { return life().waiter(); }
  __device__ bool goes_on() const { return life().goes_on(); }
  __device__ Tracer<P::kTraced> trace() const { return {call.trace, life()}; }

  __device__ TilePipeline<P> pipeline() const {
    const std::byte* scales = nullptr;
    if constexpr (kScaled<P>) scales = block.quantized.scales;
    return {life(),
            block.pass.stage_shape,
            block.memory.ring,
            block.barriers.full,
            block.barriers.empty,
            scales,
            call.paired};
  }
  __device__ Epilogue<P> epilogue() const {
    float(*most)[kInstructionRows] = nullptr;
    if constexpr (kScaled<P>) most = block.quantized.most;
    return {layer, layer, layer, block.staging.bytes, block.notes.rows, most};
  }
  __device__ HiddenSlots<P> hidden() const { return {layer}; }

  __device__ Gate<P> gate() const {
    return {life(),
            layer,
            layer,
            call,
            call.tokens,
            call.converts,
            block.pass.route,
            block.memory.ring,
            block.gate_full};
  }
  __device__ Routing<P> routing() const {
    return {life(),
            layer,
            layer,
            layer,
            call,
            call.tokens,
            block.pass.route,
            block.own,
            block.ranks.routed_rows()};
  }

  __device__ TileTable<P> table() const {
    return {layer, layer, layer, block.tiles, block.pass.tiles};
  }
  __device__ Progress<P> progress() const {
    return {life(), layer, layer, call.tokens, call.paired, table(), block.pass.work};
  }
  __device__ Queue<P> queue() const {
    return {life(), block.queue, call.paired, table(), block.pass.work, trace()};
  }
  __device__ Schedule<P> schedule() const {
    return {life(), table(), progress(), queue(), call.paired, block.own.lists, layer};
  }

  __device__ Exchange<P> exchange() const {
    return {life(),     layer,       layer,           layer,           layer,          table(),
            progress(), block.ranks, block.pass.send, block.pass.rows, layer.x_groups, trace()};
  }
  __device__ Combine<P> combine() const {
    return {exchange(), call, block.pass.route.tables, block.own.positions, queue()};
  }
  __device__ Packing<P> packing() const {
    return {life(), table(), progress(), exchange(), layer, block.packing};
  }
};

}  // namespace switchyard::gpu
