// An exchange's spec as both engines use it: checked, and with what follows from it.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/partition.h"
#include "switchyard/exchange.h"

namespace switchyard {

struct ExchangeProblem {
  ExchangeSpec spec;  // a padded layout has its room
  int rank = 0;
  int num_ranks = 1;
  protocol::ExpertPartition places;    // of experts; without a placement a place is an expert
  std::vector<std::int32_t> place_of;  // [E], for this rank's tokens; empty: without a placement
  // For layers over hosts, which use the CPU engine by itself: combine only tells that all ranks
  // have sent their results, which travel another way.
  bool without_results = false;

  // Throws Error{kInvalidArgument, kUnsupported}.
  ExchangeProblem(const ExchangeSpec& given, int rank, int num_ranks);

  ExpertRange own() const { return {places.begin(rank), places.end(rank)}; }
  int num_own() const { return places.count(rank); }
  bool quantised() const { return spec.dispatch == DType::kF8E4M3; }
  // Scales of a token; 0 where tokens have none.
  int groups() const;
  // Bytes of a token without its scales; of these; of a token with all that travels with it; and of
  // a row of results.
  std::size_t token_bytes() const;
  std::size_t scale_bytes() const { return static_cast<std::size_t>(groups()) * sizeof(float); }
  std::size_t wire_bytes() const { return token_bytes() + scale_bytes(); }
  std::size_t result_bytes() const;
  // The most slots of one source that a rank with so many experts can have.
  std::int64_t most_rows_of_source(int experts) const;
  // The rows that the layout needs for all that this rank can receive.
  std::int64_t rows_needed() const;
};

}  // namespace switchyard
