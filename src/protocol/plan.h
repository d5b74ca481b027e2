// From the counts matrix to exact offsets: where each rank's rows lie in each expert's segment, how
// segments are tiled, and where tokens lie in the pools. Every rank computes the same numbers.
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace switchyard::protocol {

// Arrays the caller provides; Plan never owns.
struct Plan {
  std::uint32_t* rows_of_expert;   // [E] sum over sources of c(s, e)
  std::uint32_t* row_begin;        // [E] B(e): the expert's first row on its owner
  std::uint32_t* my_row_begin;     // [E] B(e) + S(me, e): this rank's first row there
  std::uint32_t* tile_begin;       // [E] the expert's first tile on its owner
  std::uint32_t* num_rows;         // [R] rows on each rank
  std::uint32_t* num_tiles;        // [R] tiles on each rank
  std::uint32_t* my_pool_begin;    // [R] P(me, d): this rank's first pool index on d
  std::uint32_t* num_pool_tokens;  // [R] tokens received by each rank, its own not counted

  static constexpr std::uint64_t words(int num_experts, int num_ranks) {
    return 4 * static_cast<std::uint64_t>(num_experts) + 4 * static_cast<std::uint64_t>(num_ranks);
  }
  SWITCHYARD_HOST_DEVICE static Plan over(std::uint32_t* words, int num_experts, int num_ranks) {
    const auto e = static_cast<std::uint64_t>(num_experts);
    const auto r = static_cast<std::uint64_t>(num_ranks);
    std::uint32_t* ranks = words + 4 * e;
    return {words, words + e, words + 2 * e, words + 3 * e,
            ranks, ranks + r, ranks + 2 * r, ranks + 3 * r};
  }
};

// Who computes a plan together: lanes that each take some experts and share prefix sums. A single
// thread is the trivial team; a warp implements the same three members with shuffles.
struct SoloTeam {
  SWITCHYARD_HOST_DEVICE int lane() const { return 0; }
  SWITCHYARD_HOST_DEVICE int size() const { return 1; }
  // The sum of the values of lower lanes; `total` becomes the sum over all.
  SWITCHYARD_HOST_DEVICE std::uint32_t exclusive_sum(std::uint32_t value,
                                                     std::uint32_t& total) const {
    total = value;
    return 0;
  }
};

// Needs every row of the counts matrix of `epoch` in this rank's heap.
template <typename Team>
SWITCHYARD_HOST_DEVICE void build_plan(const Team& team, const Heaps& heaps, std::uint64_t epoch,
                                       const Plan& plan) {
  const HeapLayout& layout = heaps.layout;
  const ExpertPartition experts = layout.experts();
  const int num_experts = experts.num_experts;
  for (int d = 0; d < heaps.size(); ++d) {
    std::uint32_t rows = 0, tiles = 0;
    for (int first = experts.begin(d); first < experts.end(d); first += team.size()) {
      const int e = first + team.lane();
      std::uint32_t of_expert = 0, before_me = 0;
      if (e < experts.end(d)) {
        for (int s = 0; s < heaps.size(); ++s) {
          if (s == heaps.rank) before_me = of_expert;
          of_expert += layout.counts(heaps.mine(), epoch, s)[e];
        }
      }
      const TokenTiles expert_tiles(of_expert, layout.params().tile);
      std::uint32_t row_total = 0, tile_total = 0;
      const std::uint32_t row_offset = rows + team.exclusive_sum(of_expert, row_total);
      const std::uint32_t tile_offset = tiles + team.exclusive_sum(expert_tiles.count, tile_total);
      if (e < experts.end(d)) {
        plan.rows_of_expert[e] = of_expert;
        plan.row_begin[e] = row_offset;
        plan.my_row_begin[e] = row_offset + before_me;
        plan.tile_begin[e] = tile_offset;
      }
      rows += row_total;
      tiles += tile_total;
    }
    if (team.lane() == 0) {
      std::uint32_t pool = 0;
      for (int s = 0; s < heaps.size(); ++s) {
        if (s == heaps.rank) plan.my_pool_begin[d] = pool;
        if (s != d) pool += layout.counts(heaps.mine(), epoch, s)[num_experts + d];
      }
      plan.num_rows[d] = rows;
      plan.num_tiles[d] = tiles;
      plan.num_pool_tokens[d] = pool;
    }
  }
}

}  // namespace switchyard::protocol
