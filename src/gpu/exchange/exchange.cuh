// What the ranks of a pass tell and send each other; see protocol/heap.h. All of it is stores into
// the other rank's heap, with flags in the words themselves (counts) or behind them. The data of a
// pass is never read from another rank's memory. Only a wait that takes long reads there: the words
// `progress` and `waits_for` of all ranks, by which protocol/wait.h tells a slow world from a stuck
// one and finds who is to blame.
#pragma once

#include "gpu/exchange/params.h"
#include "gpu/exchange/peer.cuh"
#include "gpu/pipeline/trace.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/schedule/progress.cuh"

namespace switchyard::gpu {

// Where rows come from and go to, where there are several ranks. Sources are told by their distance
// from the owner of the expert.
template <typename P, Start = P::kStart>
struct RankTables {
  __device__ std::uint32_t* routed_rows() { return nullptr; }
};
template <typename P>
struct RankTables<P, Start::kShared> {
  static constexpr int kMost = kMaxDeviceExperts + kMaxDeviceRanks;
  union {
    // [own experts, ranks]: the first of each source's rows in the expert's.
    std::uint32_t source_begin[kMost];
    // Before that, [E]: rows of the tokens that this block has routed.
    std::uint32_t routed[kMaxDeviceExperts];
  };
  // [level, distance of the owner] of this rank's slots with experts of others, counted in the
  // order in which they are sent: the first experts of all ranks, then the second. And the end.
  std::uint32_t send_begin[kMost + 1];
  __device__ std::uint32_t* routed_rows() { return routed; }
};
struct SendState {
  // What the math warps send and, of several ranks, pack, having nothing else to do at first.
  std::uint32_t first_sends, first_rows;
  std::uint32_t send_lead;  // levels that sending is ahead of packing, at most
};

template <typename P>
struct Exchange {
  Lifetime life;
  const ModelShape& shape;
  const ActivationParams& activation;
  const ExchangeParams& layer;
  const ListParams& lists;
  TileTable<P> table;
  Progress<P> progress;
  RankTables<P>& ranks;
  SendState& state;
  const TokenRows& tokens;
  const std::uint32_t& x_groups;
  Tracer<P::kTraced> trace;

  // Several ranks, or one that has all experts.
  __device__ bool distributed() const { return !P::kOneRank && life.num_ranks() > 1; }
  // This rank's slots with experts of others.
  __device__ std::uint32_t num_sends() const {
    return ranks
        .send_begin[table.partition.levels * static_cast<std::uint32_t>(life.num_ranks() - 1)];
  }
};

}  // namespace switchyard::gpu
