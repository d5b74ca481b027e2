// The rows of a tile: the slots they stand for, and the cells that their outputs go to.
#pragma once

#include "gpu/exchange/receive.cuh"
#include "gpu/tile/epilogue.cuh"

namespace switchyard::gpu {

// Notes the entries of the tile's rows while the products are under way; the rows have arrived
// before. After await_copies() a thread sees only the entries that it fetched itself.
template <typename P>
__device__ __forceinline__ void fetch_entries(const Exchange<P>& exchange,
                                              const Epilogue<P>& epilogue, const TileTask& task,
                                              std::uint32_t group) {
  for (std::uint32_t row = reread_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& to = epilogue.entry(group, row);
    if (task.list == nullptr) {
      to = SlotEntry::pack(task.first_row + row, exchange.shape.top_k);
    } else if (kOwnStart<P>) {
      to = task.list[row];
    } else {
      const std::uint32_t* from = task.list + row;
      if (exchange.distributed()) {
        from = entry_of(exchange, task.expert,
                        find_source(exchange, task.expert, task.first_row + row));
      }
      copy_word_async(shared_address(&to), from);
    }
  }
}

// Replaces the noted entries of the tile's rows by the addresses of their cells. A cell is in the
// heap of the rank that the row came from. The epilogue stores there with ordinary stores.
template <typename P>
__device__ __forceinline__ void place_cells(const Exchange<P>& exchange,
                                            const Epilogue<P>& epilogue, const TileTask& task,
                                            std::uint32_t group) {
  const ExchangeParams& layer = exchange.layer;
  const auto cells = static_cast<std::uint32_t>(exchange.shape.cells_per_token);
  for (std::uint32_t row = reread_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t entry = epilogue.entry(group, row);
    std::uint16_t* base = layer.cells;
    if (exchange.distributed() && task.shared == 0) {
      entry = SlotEntry::sent(entry, exchange.shape);
      const SourceRow source = find_source(exchange, task.expert, task.first_row + row);
      const Peer peer(exchange.life.layer.heaps, exchange.life.rank_at(source.distance));
      base = peer.mapped(layer.heap.cells().template as<std::uint16_t>());
    }
    const std::uint32_t cell =
        (SlotEntry::cell(entry, cells) << exchange.progress.work.log2_splits) + task.split;
    epilogue.note_output(group, row, base + std::size_t{cell} * exchange.shape.hidden);
  }
  named_barrier<kWarpgroup>(group_barrier(group));
}

// Replaces the noted entries by the rows' routing weights, for layers that weight the input.
template <typename P>
__device__ __forceinline__ void fetch_weights(const Exchange<P>& exchange,
                                              const Epilogue<P>& epilogue, const float* weights,
                                              const TileTask& task, std::uint32_t group) {
  const ExchangeParams& layer = exchange.layer;
  const auto cells = static_cast<std::uint32_t>(exchange.shape.cells_per_token);
  for (std::uint32_t row = reread_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& word = epilogue.entry(group, row);
    const float* from = weights + SlotEntry::cell(word, cells);
    if (const SourceRow source = find_source(exchange, task.expert, task.first_row + row);
        exchange.distributed() && source.distance != 0) {
      from = layer.heap.weights(task.expert, source.distance).in(layer.mine) + source.position;
    }
    word = __float_as_uint(kOwnStart<P> ? *from : __ldcg(from));
  }
  named_barrier<kWarpgroup>(group_barrier(group));
}

}  // namespace switchyard::gpu
