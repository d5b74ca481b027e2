// From the counts matrix to where rows lie: in each expert's segment, and in token tiles. Every
// rank computes the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/partition.h"

namespace switchyard::protocol {

// One rank's view of a pass. Rows of an expert are ordered by source, and within a source by token.
// So a row has the same place as if one rank had all tokens, whatever the number of ranks. Its tile
// then has the same shape, and the GEMM library, which chooses instructions by shape, gives it the
// same bits. (The GPU's products do not depend on the shape; there the owner's own rows come first:
// first_row_in_segment().)
class Placement {
 public:
  Placement() = default;
  Placement(const ExpertPartition& experts, int rank, const TileShape& tile)
      : experts_(experts),
        rank_(rank),
        tile_(tile),
        rows_(u(experts.num_experts)),
        my_first_row_(rows_.size()),
        first_tile_(rows_.size() + 1),
        source_begin_(u(experts.count(rank)) * (u(experts.num_ranks) + 1)) {}

  // `count(source, expert)` is the counts matrix.
  template <typename Count>
  void compute(Count&& count) {
    const int ranks = experts_.num_ranks;
    std::uint32_t tiles = 0;
    for (int owner = 0; owner < ranks; ++owner) {
      for (int e = experts_.begin(owner); e < experts_.end(owner); ++e) {
        std::uint32_t all = 0, before_me = 0;
        for (int s = 0; s < ranks; ++s) {
          if (s == rank_) before_me = all;
          all += count(s, e);
        }
        rows_[u(e)] = all;
        my_first_row_[u(e)] = before_me;
        first_tile_[u(e)] = tiles;
        tiles += tiles_of(e).count;
        if (owner != rank_) continue;
        std::uint32_t* const begin = sources(e);
        for (int s = 0; s < ranks; ++s) begin[s + 1] = begin[s] + count(s, e);
      }
    }
    first_tile_.back() = tiles;
  }

  // The rows of an expert, over all ranks.
  std::uint32_t rows(int expert) const { return rows_[u(expert)]; }
  TokenTiles tiles_of(int expert) const { return TokenTiles(rows(expert), tile_); }
  // The number of an expert's first tile among all experts' tiles, on all ranks.
  std::uint32_t first_tile(int expert) const { return first_tile_[u(expert)]; }
  // Where this rank's rows begin in the expert's segment.
  std::uint32_t my_first_row(int expert) const { return my_first_row_[u(expert)]; }

  // Where a source's rows begin in the segment of one of this rank's experts; for source num_ranks,
  // the number of rows.
  std::uint32_t source_begin(int expert, int source) const { return sources(expert)[source]; }
  // The source of a row.
  int source_of(int expert, std::uint32_t row) const {
    const std::uint32_t* const begin = sources(expert);
    int source = 0;
    while (begin[source + 1] <= row) ++source;
    return source;
  }
  // The distance of a source from this rank, around the circle of ranks.
  int distance_of(int source) const {
    return (source - rank_ + experts_.num_ranks) % experts_.num_ranks;
  }

  std::uint32_t num_tiles_of_all() const { return first_tile_.back(); }
  std::uint32_t num_tiles() const { return first_tile_[u(experts_.end(rank_))] - my_first_tile(); }
  // The number of this rank's first tile among all ranks' tiles.
  std::uint32_t my_first_tile() const { return first_tile_[u(experts_.begin(rank_))]; }

 private:
  static std::size_t u(int value) { return static_cast<std::size_t>(value); }
  const std::uint32_t* sources(int expert) const {
    return source_begin_.data() + u(expert - experts_.begin(rank_)) * (u(experts_.num_ranks) + 1);
  }
  std::uint32_t* sources(int expert) {
    return const_cast<std::uint32_t*>(static_cast<const Placement*>(this)->sources(expert));
  }

  ExpertPartition experts_;
  int rank_ = 0;
  TileShape tile_;
  std::vector<std::uint32_t> rows_, my_first_row_, first_tile_, source_begin_;
};

}  // namespace switchyard::protocol
