// Tells ranks how many rows the others have for each expert.
#pragma once

#include "gpu/exchange/exchange.cuh"

namespace switchyard::gpu {

// Sends this rank's row of the counts matrix to all ranks. Called by all threads of the block that
// completed the row.
template <typename P>
__device__ __forceinline__ void publish_counts(const Exchange<P>& exchange) {
  const ExchangeParams& layer = exchange.layer;
  const protocol::Heaps& heaps = exchange.life.layer.heaps;
  const std::uint64_t flag = std::uint64_t{exchange.life.flag()} << 32;
  const auto num_experts = static_cast<std::uint32_t>(exchange.shape.num_experts);
  const std::uint32_t* const rows = exchange.life.state.words.expert_rows();
  for (std::uint32_t e = 2 * threadIdx.x; e < num_experts; e += 2 * kThreads) {
    const WordPair words{flag | __ldcg(rows + e),
                         flag | (e + 1 < num_experts ? __ldcg(rows + e + 1) : 0)};
#pragma unroll 1
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(heaps.size()); ++i) {
      Peer(heaps, exchange.life.rank_at(i))
          .put_words(layer.heap.counts(exchange.life.epoch(), heaps.rank) + e, words);
    }
  }
}

// Chooses the sources of the first round, or learns what another block has chosen. They are all
// ranks or, if patience ends, those whose counts are here. Returns 0 if the pass was given up.
// Called by one thread, when all blocks have listed their tokens.
template <typename P>
__device__ __forceinline__ std::uint32_t choose_sources(const Exchange<P>& exchange,
                                                        std::uint64_t patience_ns) {
  const ExchangeParams& layer = exchange.layer;
  const auto size = static_cast<std::uint32_t>(exchange.life.num_ranks());
  const int rank = exchange.life.rank();
  const std::uint32_t all = exchange.all_sources(), flag = exchange.life.flag();
  std::uint32_t* const word = exchange.life.state.words.first_sources();
  const std::uint64_t start = device_now_ns();
  std::uint32_t chosen = 0, here = 0;
  const bool goes_on = exchange.life.waiter().wait_for(
      [&] {
        // (No branch before the last load: they are under way together.)
        chosen = protocol::load_relaxed(word);
        here = 1u << rank;
        std::uint32_t ahead = 0;
#pragma unroll 1
        for (std::uint32_t distance = 1; distance < size; ++distance) {
          const int source = exchange.life.rank_at(distance);
          // The first word stands for all: they are stored at the same time.
          const WordPair words =
              load_words(layer.heap.counts(exchange.life.epoch(), source).in(layer.mine));
          const std::uint32_t seen =
              protocol::load_relaxed(layer.heap.ahead(source).in(layer.mine));
          here |= (words.first >> 32 == flag ? 1u : 0u) << source;
          ahead |= (seen == flag ? 1u : 0u) << source;
        }
        if (patience_ns == kWaitsForAll) {
          // There is nothing to agree on: every block sees all ranks by itself.
          chosen = here == all ? all : 0;
          return chosen != 0;
        }
        if (chosen != 0) return true;
        const bool patient = device_now_ns() - start < patience_ns;
        const std::uint32_t choice = first_sources(all, here, ahead, patient);
        if (choice == 0) return false;
        chosen = atomicCAS(word, 0u, choice);
        if (chosen != 0) return true;
        chosen = choice;
        // Tells late ranks that they are late, so that they do the rows of this rank first. (If
        // their counts come at this moment, they may miss it, and do all rows together.)
        if (choice == all) return true;
#pragma unroll 1
        for (std::uint32_t distance = 1; distance < size; ++distance) {
          const int peer = exchange.life.rank_at(distance);
          if ((here >> peer & 1) != 0) continue;
          Peer(exchange.life.layer.heaps, peer)
              .signal_relaxed(layer.heap.ahead(rank), exchange.life.flag());
        }
        return true;
      },
      [&] {
        const int missing = __ffs(static_cast<int>(all & ~here)) - 1;
        return protocol::Missing{protocol::Phase::kCounts, missing < 0 ? rank : missing, 0,
                                 exchange.life.flag(), 0};
      });
  return goes_on ? chosen : 0;
}

// Waits until all ranks, or the sources of a round, have sent the counts that this thread reads in
// read_counts(). Returns false if the pass was given up. Called by kReaders threads.
template <int kReaders, typename P>
__device__ __forceinline__ bool await_words_of_counts(const Exchange<P>& exchange,
                                                      std::uint32_t sources) {
  const ExchangeParams& layer = exchange.layer;
  const int size = exchange.life.num_ranks();
  bool arrived = true;
#pragma unroll 1
  for (int e = 2 * static_cast<int>(threadIdx.x % kReaders);
       arrived && e < exchange.shape.num_experts; e += 2 * kReaders) {
    std::uint64_t seen = 0;
    const auto first_missing = [&] {  // the first rank that is missing; `size` if none is
      int missing = size;
#pragma unroll 2
      for (int source = size; source-- > 0;) {
        if ((sources >> source & 1) == 0) continue;
        const WordPair words =
            load_words(layer.heap.counts(exchange.life.epoch(), source).in(layer.mine) + e);
        const std::uint64_t flag = exchange.life.flag();
        if (words.first >> 32 == flag && words.second >> 32 == flag) continue;
        missing = source;
        seen = (words.first >> 32 != flag ? words.first : words.second) >> 32;
      }
      return missing;
    };
    arrived = exchange.life.waiter().wait_for(
        [&] { return first_missing() == size; },
        [&] {
          const int source = first_missing();
          return protocol::Missing{protocol::Phase::kCounts,
                                   source == size ? exchange.life.rank() : source,
                                   static_cast<std::uint64_t>(e), exchange.life.flag(), seen};
        });
  }
  return arrived;
}
// Does the same in all loading warps, which get the same answer. Called after choose_sources().
template <typename P>
__device__ __forceinline__ bool await_counts(const Exchange<P>& exchange, std::uint32_t sources) {
  const bool arrived = await_words_of_counts<kWarpgroup>(exchange, sources);
  return !named_barrier_any<kWarpgroup>(kOfLoading, !arrived);
}

// Computes from the counts matrix the rows per expert and, for this rank's experts, where each
// source's rows begin among them. The rows of the owner come first, since they need not travel,
// then the others by distance. Sources that are not in the round have no rows. Called
// by kReaders threads.
template <int kReaders, typename P>
__device__ __forceinline__ void read_counts(const Exchange<P>& exchange, std::uint32_t sources) {
  const ExchangeParams& layer = exchange.layer;
  const auto size = static_cast<std::uint32_t>(exchange.life.num_ranks());
#pragma unroll 1
  for (int e0 = 2 * static_cast<int>(threadIdx.x % kReaders); e0 < exchange.shape.num_experts;
       e0 += 2 * kReaders) {
    // For each of two experts: the rows of the sources before this one, and where they are noted.
    std::uint32_t rows[2] = {};
    std::uint32_t* begin[2] = {};  // [distance]; null for experts of other ranks
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto own = static_cast<std::uint32_t>(e0 + i - exchange.table.partition.first_expert);
      if (own < static_cast<std::uint32_t>(exchange.table.partition.local_experts)) {
        begin[i] = exchange.ranks.source_begin + own * size;
      }
    }
#pragma unroll 2
    for (std::uint32_t distance = 0; distance < size; ++distance) {
      const int source = exchange.life.rank_at(distance);
      WordPair words =
          load_words(layer.heap.counts(exchange.life.epoch(), source).in(layer.mine) + e0);
      if ((sources >> source & 1) == 0) words = {0, 0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (begin[i] != nullptr) begin[i][distance] = rows[i];
        rows[i] += static_cast<std::uint32_t>(i == 0 ? words.first : words.second);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (e0 + i < exchange.shape.num_experts) exchange.table.block.expert_rows[e0 + i] = rows[i];
    }
  }
}

}  // namespace switchyard::gpu
