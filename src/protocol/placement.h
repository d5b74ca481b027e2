// Which rows of its experts a rank computes together on the CPU, given all ranks' counts.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/partition.h"

namespace switchyard::protocol {

// A set of ranks, a bit for each.
using RankSet = std::uint64_t;
constexpr RankSet set_of(int rank) { return RankSet{1} << rank; }
constexpr RankSet all_ranks(int num_ranks) {
  return num_ranks == 64 ? ~RankSet{0} : set_of(num_ranks) - 1;
}

// How the owner of experts places rows in one pass. A segment has the rows of one expert that are
// placed together, cut into token tiles. Where all ranks are in time, each expert has one segment.
// The rows of a late rank get a segment of their own when they arrive, so that the others' need not
// wait for its counts.
//
// Only the owner numbers segments and tiles. A source learns when all of its rows of an expert are
// finished, so no two ranks need the same numbers.
//
// Rows of a segment are ordered by source, and within a source by token. So where no rank is late,
// a row has the place that it has when one rank has all tokens. (The GPU has the owner's own rows
// first, then the others' by distance.)
class Placement {
 public:
  Placement() = default;
  Placement(const ExpertPartition& experts, int rank)
      : experts_(experts), rank_(rank), placed_(u(experts.count(rank))) {
    // Segments are added while other threads read earlier ones, so they must not move.
    const std::size_t most = placed_.size() * u(experts.num_ranks);
    expert_of_.reserve(most);
    begins_.reserve(most * (u(experts.num_ranks) + 1));
  }

  // Starts a pass, in which nothing is placed yet.
  void clear() {
    placed_.assign(placed_.size(), 0);
    expert_of_.clear();
    begins_.clear();
  }

  // Places the rows that `sources` have for one of this rank's experts, and returns how many there
  // are. If there are any, they are the segment num_segments() - 1. `count(source)` is the number
  // of a source's rows for the expert. No source may be placed twice.
  template <typename Count>
  std::uint32_t place(int expert, RankSet sources, Count&& count) {
    if (sources == 0) return 0;
    placed_[of_owner(expert)] |= sources;
    const std::size_t first = begins_.size();
    std::uint32_t rows = 0;
    for (int s = 0; s < experts_.num_ranks; ++s) {
      begins_.push_back(rows);
      if ((sources & set_of(s)) != 0) rows += count(s);
    }
    begins_.push_back(rows);
    if (rows == 0) {
      begins_.resize(first);
    } else {
      expert_of_.push_back(expert);
    }
    return rows;
  }

  // The sources whose rows of the expert are placed.
  RankSet placed(int expert) const { return placed_[of_owner(expert)]; }

  std::uint32_t num_segments() const { return static_cast<std::uint32_t>(expert_of_.size()); }
  int expert_of(std::uint32_t segment) const { return expert_of_[segment]; }
  // Where a source's rows begin in a segment; for source num_ranks, the number of rows.
  std::uint32_t source_begin(std::uint32_t segment, int source) const {
    return begins_[segment * (u(experts_.num_ranks) + 1) + u(source)];
  }
  // The source of a row.
  int source_of(std::uint32_t segment, std::uint32_t row) const {
    int source = 0;
    while (source_begin(segment, source + 1) <= row) ++source;
    return source;
  }
  // The distance of a source from this rank, around the circle of ranks.
  int distance_of(int source) const {
    return (source - rank_ + experts_.num_ranks) % experts_.num_ranks;
  }

 private:
  static std::size_t u(int value) { return static_cast<std::size_t>(value); }
  std::size_t of_owner(int expert) const { return u(expert - experts_.begin(rank_)); }

  ExpertPartition experts_;
  int rank_ = 0;
  std::vector<RankSet> placed_;        // [expert of this rank]
  std::vector<int> expert_of_;         // [segment]
  std::vector<std::uint32_t> begins_;  // [segment][num_ranks + 1]
};

}  // namespace switchyard::protocol
