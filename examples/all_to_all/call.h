// The memory and sizes of one rank's call. The file compiles as C++ and as CUDA: kernels take the
// struct by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/peer_map.h"

namespace switchyard::all_to_all {

// Sizes that all ranks share. A slot is a token's k-th expert, numbered t * top_k + k.
struct Sizes {
  std::int32_t experts_per_rank, top_k, hidden, max_tokens;

  // The most slots of a rank. All of them may belong to one rank's experts.
  SWITCHYARD_PEER_FUNCTION std::size_t slots() const {
    return static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(top_k);
  }
  SWITCHYARD_PEER_FUNCTION std::size_t row_bytes() const {
    return static_cast<std::size_t>(hidden) * 2;
  }
};

// Where a row came from. It travels with the row.
struct alignas(16) Origin {
  std::int32_t rank, slot;  // whose, and which
  std::int32_t position;    // among the rows from that rank to this one
  std::int32_t expert;      // among this rank's
};

// A rank's memory. All of it is in the symmetric heap; what other ranks write is so marked.
//
// Calls are numbered, and use two windows in turn. A rank begins call n + 2 when it has finished
// call n + 1, in which it waited for the row counts of every rank, also of those that sent it no
// row. A rank sends its counts of call n + 1 when it has finished call n. So when a rank writes
// call n + 2, nobody reads call n any more, which used the same window.
//
// In the rung `host` the ranks meet between the steps, so one window is enough: the first is for
// rows to the experts, the second for results.
struct Memory {
  // [2, ranks, slots, H] and [2, ranks, slots]: rows from each rank, in the order in which it
  // counted them. Written by that rank.
  std::uint16_t* rows;
  Origin* origins;
  // [2, ranks]: tag << 32 | rows from that rank. With a flag per rank, raised when its rows are
  // there; with a flag per token, as soon as it has counted them. Written by that rank.
  std::uint64_t* counts;
  std::uint32_t* row_flags;  // [2, ranks, slots]: the tag, once the row is there. As `rows`.
  std::uint16_t* results;  // [2, slots, H]: results of this rank's slots. By their experts' ranks.
  std::uint32_t* result_flags;  // [2, slots]: the tag, once the result is there. As `results`.
  std::uint64_t* rank_flags;    // [2, ranks]: the tag, once all results of that rank are there.

  // Counters, which only this rank uses.
  std::uint32_t* sent;           // [ranks]: rows to each rank, so far
  std::uint32_t* expert_counts;  // [experts of this rank]: rows of each, so far
  std::uint32_t* ticket;         // blocks of a kernel that are done; the last one puts it back to 0

  // The result of the problem's dispatch: rows by expert.
  std::uint16_t* expert_rows;  // [experts of this rank, ranks * max_tokens, H]
  Origin* expert_origins;      // [experts of this rank, ranks * max_tokens]
  std::uint32_t* placed;       // [ranks, slots]: where in expert_rows each row of `rows` is

  // The rung `host` only: what the host copies to other ranks.
  std::uint16_t* staging;         // [ranks, slots, H]: rows to each rank, then results to each
  Origin* staging_origins;        // [ranks, slots]
  std::uint64_t* staging_counts;  // [ranks], as `counts`
  std::uint32_t* sent_to;         // [slots]: which row of `staging` is the slot's
};

// A record of one warp's work in a stage (on a CPU, a thread's), for traces.
struct Record {
  std::uint64_t begin_ns, end_ns;
  std::uint64_t waited_ns;  // within; waits that took a few looks count as 0
  std::uint32_t rows;       // rows sent or received, or tokens summed
  std::uint32_t valid;      // 1; 0: not written
};

struct Call {
  PeerMap map;
  Sizes sizes;
  Memory memory;

  // The features that stages ask for; see rung.h.
  bool host, flag_per_token, fused, epochs, flattened;
  std::int32_t window;  // of this call: 0 or 1
  // The value of this call's flags: its number, or 1 where flags are reset.
  std::uint32_t tag;

  std::int32_t num_tokens;
  const std::uint16_t* x;   // [T, H]
  const std::int32_t* ids;  // [T, K]
  const float* weights;     // [T, K]
  const float* factors;     // [experts of this rank]
  std::uint16_t* y;         // [T, H]
  Record* records;          // [blocks, warps] of the stage; null: none are kept

  SWITCHYARD_PEER_FUNCTION std::size_t ranks() const { return static_cast<std::size_t>(map.size); }
  SWITCHYARD_PEER_FUNCTION std::int32_t num_slots() const { return num_tokens * sizes.top_k; }
  SWITCHYARD_PEER_FUNCTION std::size_t expert_room() const {
    return ranks() * static_cast<std::size_t>(sizes.max_tokens);
  }
  // Indexes of what `rank` has, or had, in a window.
  SWITCHYARD_PEER_FUNCTION std::size_t of_rank(std::int32_t in, std::int32_t rank) const {
    return static_cast<std::size_t>(in) * ranks() + static_cast<std::size_t>(rank);
  }
  SWITCHYARD_PEER_FUNCTION std::size_t of_row(std::int32_t in, std::int32_t rank,
                                              std::size_t position) const {
    return of_rank(in, rank) * sizes.slots() + position;
  }
  SWITCHYARD_PEER_FUNCTION std::size_t of_slot(std::int32_t in, std::int32_t slot) const {
    return static_cast<std::size_t>(in) * sizes.slots() + static_cast<std::size_t>(slot);
  }
};

}  // namespace switchyard::all_to_all
