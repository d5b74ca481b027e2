// A block's shared memory, and the views through which the rooms see a pass.
#pragma once

#include <cstddef>
#include <limits>

#include "gpu/exchange/combine.cuh"
#include "gpu/layer/params.h"
#include "gpu/route/choose.cuh"
#include "gpu/schedule/scheduler.cuh"
#include "gpu/tokens/gathered.cuh"
#include "gpu/tokens/pack.cuh"

namespace switchyard::gpu {

// The shape of the stages, where passes choose it.
template <typename P, bool = StageLayout<P>::kFixed>
struct ChosenStages {
  StageShape<StageLayout<P>> shape;
};
template <typename P>
struct ChosenStages<P, true> {};

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
  ChosenStages<P> stages;
};

// Memory for the tables of experts; see TileTables and RankTables. In large passes it has room for
// kUsualExperts.
template <typename P, Start = P::kStart>
struct TableMemory {
  TableWord<P> expert_rows[kMaxDeviceExperts], tile_begin[kMaxDeviceExperts + 1],
      row_begin[kMaxDeviceExperts];
  static_assert(kMaxOwnSlots + P::kSmallTokens <= std::numeric_limits<TableWord<P>>::max());
};
template <typename P>
struct TableMemory<P, Start::kShared> {
  std::uint32_t words[place_tables(0, kUsualExperts).end / sizeof(std::uint32_t)];
};

template <typename P>
struct BlockStorage {
  RingOfBytes<kRing<P>> memory;
  StagingMemory<P> staging;
  QueueStorage queue;
  RingBarriers barriers;
  alignas(8) std::uint64_t gate_full[kGateStages];  // for gates that use the ring
  TableMemory<P> tables;
  OwnRouting<P> own;
  RowNotes<P> notes;
  ScaleMemory<P> quantized;
  PackStorage<P> packing;
  PassState<P> pass;
};
template <typename P>
inline constexpr std::size_t kSharedBytes = sizeof(BlockStorage<P>);
// (The system takes 1 KB of shared memory for each block.)
template <typename... P>
constexpr bool fit = ((kSharedBytes<P> + 1024 <= std::size_t{228} * 1024 / P::kBlocksPerSM) && ...);
static_assert(
    fit<BF16Policy, SmallPass<BF16Policy>, FP8Policy, SmallPass<FP8Policy>, MXFP4FP8Policy,
        SmallPass<MXFP4FP8Policy>, LowPass<MXFP4FP8Policy>, TallLowPass<MXFP4FP8Policy>,
        LowPass<MXFP4Policy>, TallLowPass<MXFP4Policy>, SmallLowPass<MXFP4Policy>>,
    "the block's shared memory is full");

// The storage of large passes of layers with up to kUsualExperts places.
template <typename P>
LargeStorage usual_storage() {
  const auto begin = static_cast<std::uint32_t>(offsetof(BlockStorage<P>, tables));
  return {place_tables(begin, kUsualExperts), kRing<P>, StageLayout<P>::count(0), false};
}
// The storage of layers with more places. Tables are in the end of the ring, and tiles have fewer
// stages. The gate uses the whole ring, so nobody may write tables there before the gate's end. The
// counts of the block's tokens' rows, which are set to 0 earlier, are in the place of source_begin
// in the usual tables.
template <typename P>
constexpr std::uint32_t kRingOfMany = (kRing<P> - place_tables(0, kMaxDeviceExperts).end) / 1024 *
                                      1024;
template <typename P>
LargeStorage storage_of_many() {
  LargeStorage storage{place_tables(kRingOfMany<P>, kMaxDeviceExperts), kRingOfMany<P>,
                       StageLayout<P>::count(0, kRingOfMany<P>), true};
  storage.tables.source_begin = static_cast<std::uint32_t>(offsetof(BlockStorage<P>, tables));
  return storage;
}
// gate_token_in_memory() has two arrays for each warp, before the tables in the ring's end.
static_assert(kRingOfMany<BF16Policy> >=
              kWarps * 2 * kMaxDeviceExperts * static_cast<int>(sizeof(float)));
static_assert(place_tables(0, kUsualExperts).end >=
              (kMaxDeviceExperts + kMaxDeviceRanks) * sizeof(std::uint32_t));
// Math warps release a stage when they have issued the products of the next.
template <typename P>
constexpr bool enough_stages = StageLayout<P>::count(kMaxHeight<P>,
                                                     kRingOfMany<P>) > P::kStagesTogether + 1;
static_assert(enough_stages<BF16Policy> && enough_stages<FP8Policy> &&
              enough_stages<MXFP4FP8Policy>);

// A block's access to a pass. Functions of lower rooms take only the views that they use.
template <typename P>
struct Pass {
  const LayerParams& layer;
  const CallParams& call;
  BlockStorage<P>& block;

  __device__ PassState<P>& state() const { return block.pass; }
  // Words in the block's shared memory.
  __device__ std::uint32_t* words(std::uint32_t at) const {
    return reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(&block) + at);
  }
  __device__ TileTables<P> tiles() const {
    if constexpr (kOwnStart<P>) {
      return {block.tables.expert_rows, block.tables.tile_begin, block.tables.row_begin};
    } else {
      return {words(layer.tables.expert_rows), words(layer.tables.tile_begin),
              words(layer.tables.row_begin)};
    }
  }
  __device__ RankTables ranks() const {
    if constexpr (kOwnStart<P>) {
      return {};
    } else {
      return {words(layer.tables.source_begin), words(layer.tables.send_begin)};
    }
  }
  __device__ decltype(auto) stage_shape() const {
    if constexpr (StageLayout<P>::kFixedCount) {
      return StageShape<StageLayout<P>>{};
    } else if constexpr (StageLayout<P>::kFixed) {
      return StageShape<StageLayout<P>>{layer.ring_stages};
    } else {
      return (block.pass.stages.shape);
    }
  }
  __device__ Lifetime life() const { return {layer, block.pass.life}; }
  __device__ Waiter waiter() const { return life().waiter(); }
  __device__ bool goes_on() const { return life().goes_on(); }
  __device__ Tracer<P::kTraced> trace() const { return {call.trace, life()}; }

  __device__ TilePipeline<P> pipeline() const {
    const std::byte* scales = nullptr;
    if constexpr (kScaled<P>) scales = block.quantized.scales;
    return {life(), stage_shape(), block.memory.ring, block.barriers.full, block.barriers.empty,
            scales, call.paired};
  }
  __device__ Epilogue<P> epilogue() const {
    float(*most)[kInstructionRows] = nullptr;
    const std::uint64_t* tables = nullptr;
    if constexpr (kMakesCodes<P>) {
      tables = block.quantized.notes.tables;
    } else if constexpr (kScaled<P>) {
      most = block.quantized.notes.most;
    }
    return {layer, layer, layer, block.staging.bytes, block.notes.rows, most, tables};
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
            ranks().routed_rows(),
            block.memory.ring};
  }

  __device__ TileTable<P> table() const { return {layer, layer, layer, tiles(), block.pass.tiles}; }
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
    return {life(),     layer,   layer,           layer,           layer,          table(),
            progress(), ranks(), block.pass.send, block.pass.rows, layer.x_groups, trace()};
  }
  __device__ Combine<P> combine() const {
    return {exchange(), call, block.pass.route.tables, block.own.positions, queue()};
  }
  __device__ Packing<P> packing() const {
    return {life(), table(), progress(), exchange(), layer, block.packing};
  }
};

}  // namespace switchyard::gpu
