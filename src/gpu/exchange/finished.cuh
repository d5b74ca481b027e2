// Tells other ranks that their rows' outputs are in their cells.
#pragma once

#include "gpu/exchange/exchange.cuh"

namespace switchyard::gpu {

// Tells the sources of the rows of each of this rank's experts that all of them are finished, as
// soon as they are. The lanes of one warp of each block share pairs of expert and source out.
// Called by that warp after its other work, in each round. Returns false if the pass was given up.
template <typename P>
__device__ __forceinline__ bool raise_finished(const Exchange<P>& exchange) {
  const ExchangeParams& layer = exchange.layer;
  const protocol::Heaps& heaps = exchange.life.layer.heaps;
  const auto size = static_cast<std::uint32_t>(heaps.size());
  // In passes with two rounds this rank gets flags, too: see combine_task().
  const bool signals_itself = exchange.table.round() != 0 || !exchange.table.last_round();
  const std::uint32_t nearest = signals_itself ? 0 : 1, sources = size - nearest;
  const std::uint32_t pairs = exchange.table.local_experts() * sources;
  std::uint32_t returned = 0, flags = 0;
  const auto stamp = [&](TraceStamp which) {
    if (threadIdx.x % 32 == 0) exchange.trace.stamp(TraceRole::kSend, kSignalRecord, which);
  };
  stamp(&TraceRecord::ready);
#pragma unroll 1
  for (std::uint32_t pair0 = blockIdx.x; pair0 < pairs; pair0 += 32 * gridDim.x) {
    const std::uint32_t pair = pair0 + gridDim.x * (threadIdx.x % 32);
    // Look up the tiles of the source's rows now, so that the flag can be raised at once when the
    // last of them is finished.
    std::uint32_t tile = 0, tiles = 0;  // the next to be finished, and how many are not yet
    std::uint32_t of_all = 0, distance = 0;
    if (pair < pairs) {
      const std::uint32_t expert = pair / sources;
      distance = nearest + pair % sources;
      of_all = exchange.table.first_expert() + expert;
      const std::uint32_t* const begins = exchange.ranks.source_begin + expert * size + distance;
      const protocol::TokenTiles cut = exchange.table.tiles_of(of_all);
      const std::uint32_t begin = begins[0], end = distance + 1 < size ? begins[1] : cut.rows;
      if (begin < end) {
        const std::uint32_t first = begin / cut.height;
        tile = exchange.table.block.tile_begin[of_all] + first;
        tiles = (end - 1) / cut.height - first + 1;
        if (distance != 0) {
          returned += end - begin;
          ++flags;
        }
      }
    }
    while (__any_sync(~0u, tiles != 0)) {
      bool done = false;
      if (!exchange.life.waiter().template wait<WarpPace>(protocol::Phase::kExperts, pair0, [&] {
            done = tiles != 0 && exchange.progress.gemm2_complete(tile);
            return __any_sync(~0u, done);
          })) {
        return false;
      }
      stamp(&TraceRecord::begin);
      if (!done) continue;
      ++tile;
      if (--tiles != 0) continue;
      fence_system();
      Peer(heaps, exchange.life.rank_at(distance))
          .signal_relaxed(layer.heap.finished(of_all), exchange.life.flag());
    }
  }
  returned = __reduce_add_sync(~0u, returned);
  flags = __reduce_add_sync(~0u, flags);
  if (threadIdx.x % 32 != 0 || flags == 0) return true;
  exchange.trace.subject(TraceRole::kSend, kSignalRecord,
                         {TraceKind::kSignal, -1, -1, -1, static_cast<std::int32_t>(returned)});
  stamp(&TraceRecord::end);
  atomicAdd(exchange.life.state.words.counters() + kReturnedRows, returned);
  atomicAdd(exchange.life.state.words.counters() + kRaisedFlags, flags);
  return true;
}

}  // namespace switchyard::gpu
