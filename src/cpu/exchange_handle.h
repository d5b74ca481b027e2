// The lists of a dispatch on the CPU: what this rank sends where, and what it received.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/rank_link.h"
#include "exchange/engine.h"
#include "exchange/problem.h"
#include "protocol/exchange_heap.h"

namespace switchyard::cpu {

// True if the rows for a token of `source` are summed before they return.
inline bool are_summed(const ExchangeProblem& problem, const RankLink& link, int source) {
  return problem.spec.pre_sum || link.way_back(source) == RankLink::Return::kSummed;
}

// A token that this rank sends to a rank, or once to all ranks of a host.
struct SentToken {
  std::uint32_t token = 0;
  std::uint32_t first_place = 0;  // in its list; the next token's is behind the last
  std::uint32_t slots = 0;        // a bit for each k whose expert is there
};
// A destination of such a token: a position in a rank's pool.
struct SentPlace {
  int rank = 0;
  std::uint32_t position = 0;
};
struct SentTokens {
  std::vector<SentToken> tokens;
  std::vector<SentPlace> places;
};

// A row that this rank received.
struct Arrival {
  std::uint32_t row;       // in the layout
  std::uint32_t packed;    // in packed order
  std::uint32_t position;  // of its token in the source's pool
  std::uint32_t slot;      // of the source
  float weight;
};

class DispatchHandle final : public ExchangeHandle::State {
 public:
  // The number of the dispatch that made the contents. Parts of it travel with flags, so that ranks
  // notice if they reuse different dispatches.
  std::uint64_t layout = 0;
  // This rank's tokens.
  std::vector<std::int32_t> places;          // [T, K]: the place of each slot, or -1
  std::vector<float> weights;                // [T, K]
  std::vector<std::uint32_t> num_tokens_to;  // [ranks]: the tokens that each rank gets
  std::vector<std::vector<protocol::ExchangeEntry>> entries_to;
  std::vector<SentTokens> sent_to;  // [ranks]: of another host's ranks, all stand with its gateway
  // Rows that this rank received.
  bool planned = false;
  std::vector<std::int64_t> ends;                 // [own experts]
  std::vector<std::vector<std::uint32_t>> count;  // [ranks][own experts]
  std::vector<std::vector<Arrival>> arrivals;     // [ranks], in the order of the source's entries
  // [ranks], where rows are summed: arrivals by slot.
  std::vector<std::vector<std::uint32_t>> by_token;
  // [ranks], where this host sums: for each arrival the slots of its token on this host.
  std::vector<std::vector<std::uint32_t>> host_slots;
  std::vector<std::int64_t> first_row;  // [own experts]: in the layout
  std::int64_t layout_rows = 0;         // that the layout has
  std::int64_t end_of_rows = 0;         // one behind the last row of an expert

  // Lists what each rank gets: its tokens, each once, and its rows, by expert.
  void list_slots(const ExchangeProblem& problem, const RankLink& link);
  // Computes where every source's rows go, once `count` is complete. Throws
  // Error{kCapacityExceeded} if a padded layout has too little room.
  void place_rows(const ExchangeProblem& problem);
  // Lists the rows of a source whose entries have come in dispatch number `dispatch`.
  void list_arrivals(const ExchangeProblem& problem, const RankLink& link,
                     const protocol::ExchangeHeap& heap, std::uint64_t dispatch, int source);
};

}  // namespace switchyard::cpu
