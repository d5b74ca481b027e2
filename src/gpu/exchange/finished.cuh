// Telling other ranks that their rows' outputs are in their cells.
#pragma once

#include "gpu/exchange/exchange.cuh"

namespace switchyard::gpu {

// Tells the sources of the rows of this rank's tiles that a tile is finished, as soon as it is. The
// lanes of one warp of each block share all tiles out. Called by that warp after its other work.
template <typename P>
__device__ __forceinline__ void raise_finished(const Exchange<P>& exchange) {
  const ExchangeParams& layer = exchange.layer;
  const protocol::Heaps& heaps = exchange.life.layer.heaps;
  const auto size = static_cast<std::uint32_t>(heaps.size());
  const std::uint32_t tiles = exchange.table.num_tiles(),
                      first = exchange.table.state.shared_tiles.count;
  std::uint32_t returned = 0, flags = 0;
  const auto stamp = [&](TraceStamp which) {
    if (threadIdx.x % 32 == 0) exchange.trace.stamp(TraceRole::kSend, kSignalRecord, which);
  };
  stamp(&TraceRecord::ready);
#pragma unroll 1
  for (std::uint32_t tile0 = first + blockIdx.x; tile0 < tiles; tile0 += 32 * gridDim.x) {
    const std::uint32_t tile = tile0 + gridDim.x * (threadIdx.x % 32);
    bool pending = tile < tiles;
    // Look up the sources now, so that the flags can be raised at once when the tile is finished.
    std::uint32_t distances = 0;
    if (pending) {
      const std::uint32_t expert =
          find_expert(exchange.table.block.tile_begin + exchange.table.partition.first_expert,
                      exchange.table.partition.local_experts, tile);
      const protocol::TokenTiles cut(
          exchange.table.block.expert_rows[exchange.table.partition.first_expert + expert],
          P::kTile.token_rows);
      const std::uint32_t of_expert =
          tile - exchange.table.block.tile_begin[exchange.table.partition.first_expert + expert];
      const std::uint32_t* const source_begin = exchange.ranks.source_begin + expert * size;
#pragma unroll 1
      for (std::uint32_t distance = 1; distance < size; ++distance) {
        const std::uint32_t begin = max(cut.begin(of_expert), source_begin[distance]);
        const std::uint32_t end =
            min(cut.end(of_expert), distance + 1 < size ? source_begin[distance + 1] : cut.rows);
        if (begin >= end) continue;
        distances |= 1u << distance;
        returned += end - begin;
      }
      flags += __popc(distances);
    }
    while (__any_sync(~0u, pending)) {
      bool done = false;
      if (!exchange.life.waiter().template wait<WarpPace>(protocol::Phase::kExperts, tile0, [&] {
            done = pending && exchange.progress.gemm2_complete(tile);
            return __any_sync(~0u, done);
          })) {
        return;
      }
      stamp(&TraceRecord::begin);
      if (!done) continue;
      pending = false;
      fence_system();
#pragma unroll 1
      for (; distances != 0; distances &= distances - 1) {
        const auto distance = static_cast<std::uint32_t>(__ffs(static_cast<int>(distances)) - 1);
        const Peer peer{heaps.base[exchange.life.rank_at(distance)]};
        peer.signal_fenced(layer.heap.finished(peer.base, tile + exchange.table.state.tile_offset),
                           exchange.life.flag());
      }
    }
  }
  returned = __reduce_add_sync(~0u, returned);
  flags = __reduce_add_sync(~0u, flags);
  if (threadIdx.x % 32 != 0 || flags == 0) return;
  exchange.trace.subject(TraceRole::kSend, kSignalRecord,
                         {TraceKind::kSignal, -1, -1, -1, static_cast<std::int32_t>(returned)});
  stamp(&TraceRecord::end);
  atomicAdd(exchange.life.state.words.counters() + kReturnedRows, returned);
  atomicAdd(exchange.life.state.words.counters() + kRaisedFlags, flags);
}

}  // namespace switchyard::gpu
