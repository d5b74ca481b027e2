// Finding the source of each row of this rank's experts.
#pragma once

#include "gpu/exchange/exchange.cuh"

namespace switchyard::gpu {

// An expert of this rank and the distance of a source of its rows, packed into one word.
struct ExpertSource {
  static constexpr int kBits = 5;
  static_assert(kMaxDeviceRanks <= 1 << kBits);
  __device__ static std::uint32_t pack(std::uint32_t expert, std::uint32_t distance) {
    return expert << kBits | distance;
  }
  __device__ static std::uint32_t expert(std::uint32_t pair) { return pair >> kBits; }
  __device__ static std::uint32_t distance(std::uint32_t pair) {
    return pair & ((1u << kBits) - 1);
  }
};

struct SourceRow {
  std::uint32_t distance;  // of the source; 0: this rank itself
  std::uint32_t position;  // in the source's list of its slots with the expert
};
template <typename P>
__device__ __forceinline__ SourceRow find_source(const Exchange<P>& exchange, std::uint32_t expert,
                                                 std::uint32_t row) {
  if constexpr (!P::kOneRank) {
    const auto size = static_cast<std::uint32_t>(exchange.life.num_ranks());
    if (size > 1) {
      const std::uint32_t* const begin = exchange.ranks.source_begin + expert * size;
      std::uint32_t distance = size - 1;
      while (begin[distance] > row) --distance;
      return {distance, row - begin[distance]};
    }
  }
  return {0, row};
}
template <typename P>
__device__ __forceinline__ const std::uint32_t* entry_of(const Exchange<P>& exchange,
                                                         std::uint32_t expert,
                                                         const SourceRow& row) {
  const ExchangeParams& layer = exchange.layer;
  return (row.distance == 0 ? shared_list(exchange.lists, exchange.shape,
                                          exchange.table.partition.first_expert + expert)
                            : layer.heap.entries(expert, row.distance).in(layer.mine)) +
         row.position;
}

// True if all rows that the source has for the expert have arrived.
template <typename P>
__device__ __forceinline__ bool has_arrived(const Exchange<P>& exchange, std::uint32_t expert,
                                            std::uint32_t distance) {
  const ExchangeParams& layer = exchange.layer;
  return distance == 0 ||
         protocol::load_acquire(layer.heap.arrived(expert, distance).in(layer.mine)) ==
             exchange.life.flag();
}

}  // namespace switchyard::gpu
