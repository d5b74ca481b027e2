// Which rank owns which experts, and how an expert's rows are cut into token tiles. Every rank and
// every role computes these from the same functions, so that no two can disagree.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace switchyard::protocol {

template <typename T>
SWITCHYARD_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
SWITCHYARD_HOST_DEVICE constexpr T round_up(T a, T multiple) {
  return ceil_div(a, multiple) * multiple;
}

// Experts in contiguous shards that differ by at most one. If there are more ranks than experts,
// some ranks have none. The product of the two numbers must be below 2^31: it is not computed in 64
// bits because kernels divide it.
struct ExpertPartition {
  int num_experts = 0;
  int num_ranks = 1;

  SWITCHYARD_HOST_DEVICE constexpr int begin(int rank) const {
    return num_experts * rank / num_ranks;
  }
  SWITCHYARD_HOST_DEVICE constexpr int end(int rank) const { return begin(rank + 1); }
  SWITCHYARD_HOST_DEVICE constexpr int count(int rank) const { return end(rank) - begin(rank); }
  SWITCHYARD_HOST_DEVICE constexpr int max_count() const {
    return ceil_div(num_experts, num_ranks);
  }
  // The inverse of begin/end: the r with begin(r) <= expert < end(r).
  SWITCHYARD_HOST_DEVICE constexpr int owner(int expert) const {
    return ((expert + 1) * num_ranks - 1) / num_experts;
  }
};

// Rows of one expert in equal token tiles: as few tiles as `max_height` allows, and no taller than
// they need be, in steps of `granule` (the matrix unit's width, or what is compiled for it).
struct TileShape {
  int max_height = 128;
  int granule = 16;
  int least = 0;  // this many rows or fewer make a tile of this height
};

struct TokenTiles {
  std::uint32_t rows = 0;
  std::uint32_t height = 0;  // rows per tile, all but the last
  std::uint32_t count = 0;

  constexpr TokenTiles() = default;
  SWITCHYARD_HOST_DEVICE constexpr TokenTiles(std::uint32_t num_rows, TileShape shape)
      : rows(num_rows) {
    if (num_rows == 0) return;
    const auto max_height = static_cast<std::uint32_t>(shape.max_height);
    const auto granule = static_cast<std::uint32_t>(shape.granule);
    const auto least = static_cast<std::uint32_t>(shape.least);
    height = num_rows <= least ? least : round_up(num_rows, granule);
    count = 1;
    if (num_rows <= max_height) return;
    const std::uint32_t fewest = ceil_div(num_rows, max_height);
    height = round_up(ceil_div(num_rows, fewest), granule);
    // Rounding the height up can leave the last of many tiles empty.
    count = ceil_div(num_rows, height);
  }
  SWITCHYARD_HOST_DEVICE constexpr std::uint32_t begin(std::uint32_t tile) const {
    return tile * height;
  }
  SWITCHYARD_HOST_DEVICE constexpr std::uint32_t end(std::uint32_t tile) const {
    return (tile + 1) * height < rows ? (tile + 1) * height : rows;
  }
};

// Two neighbouring tiles of an expert that can be multiplied together, so that each weight is
// loaded once for both. Both have at least `least_rows` rows and are in one band (see Workload).
// Tasks of a band stand together, so neither tile waits for what comes later than the other.
struct TilePair {
  std::uint32_t first = 0;  // the first tile's number in the expert; the other is the next
  bool two = false;         // false: there is no other

  // Finds the pair of `tile`, whose number in the band of `band` tiles is `place`.
  SWITCHYARD_HOST_DEVICE constexpr TilePair(const TokenTiles& tiles, std::uint32_t tile,
                                            std::uint32_t place, std::uint32_t band,
                                            std::uint32_t least_rows) {
    // The first and second of the expert's tiles in the band go together, then the third and
    // fourth.
    const std::uint32_t odd = (place < tile ? place : tile) & 1;
    first = tile - odd;
    const std::uint32_t second = first + 1;
    two = place - odd + 1 < band && second < tiles.count &&
          tiles.end(second) - tiles.begin(second) >= least_rows;
  }
};

}  // namespace switchyard::protocol
