// The data and flags that the ranks of a pass send each other; see protocol/heap.h. Every transfer
// is a store into the other rank's heap, with the flag in the same word (counts) or behind the
// data. No rank reads the data of a pass from another rank's memory. Only a wait that takes long
// reads there: it looks at the words `progress` and `waits_for` of all ranks, by which
// protocol/wait.h tells a slow world from a stuck one and finds who is to blame.
#pragma once

#include "gpu/exchange/params.h"
#include "gpu/pipeline/peer.cuh"
#include "gpu/pipeline/trace.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/schedule/progress.cuh"

namespace switchyard::gpu {

// Where rows come from and go to when there are several ranks: tables in the block's shared memory,
// of large passes. A source is identified by its distance from the owner of the expert.
struct RankTables {
  // [own experts, ranks]: where each source's rows begin among the expert's.
  std::uint32_t* source_begin;
  // [level, distance of the owner]: where this rank's slots for each expert of another rank begin
  // in the order of sending, which takes the first experts of all ranks, then the second. One more
  // entry holds the end.
  std::uint32_t* send_begin;
  // [E]: rows of the tokens that this block has routed; in the place of source_begin, until that is
  // filled.
  __device__ std::uint32_t* routed_rows() const { return source_begin; }
};
struct SendState {
  // The slots that the math warps send and, with several ranks, the rows that they pack, before
  // their first task.
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
  RankTables ranks;
  SendState& state;
  const TokenRows& tokens;
  const std::uint32_t& x_groups;
  Tracer<P::kTraced> trace;

  // True if rows travel: there are several ranks. A single rank has all experts.
  __device__ bool distributed() const { return !P::kOneRank && life.num_ranks() > 1; }
  // The ranks, a bit for each.
  __device__ std::uint32_t all_sources() const { return ~0u >> (32 - life.num_ranks()); }
  static_assert(kMaxDeviceRanks <= 32);
  // The number of this rank's slots whose experts other ranks have.
  __device__ std::uint32_t num_sends() const {
    return ranks
        .send_begin[table.partition.levels * static_cast<std::uint32_t>(life.num_ranks() - 1)];
  }
};

}  // namespace switchyard::gpu
