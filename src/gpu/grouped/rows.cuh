// Where each expert's rows and tiles are, computed from the running sums of rows.
#pragma once

#include "gpu/grouped/params.h"
#include "gpu/tile/find_expert.cuh"
#include "protocol/partition.h"

namespace switchyard::gpu {

struct RowTable {
  std::uint32_t tile_begin[kMostGroupedExperts + 1];    // its first tile
  std::uint32_t packed_begin[kMostGroupedExperts + 1];  // its first row in packed order
  // Its first row in the input and the output, in blocked layouts; in others it is computed.
  std::uint32_t in_begin[kMostGroupedExperts], out_begin[kMostGroupedExperts];
};

// The expert's first row, of a layout whose blocked rows begin at begin[expert].
__device__ __forceinline__ std::uint32_t first_row(const RowLayout& layout, const RowTable& rows,
                                                   const std::uint32_t* begin,
                                                   std::uint32_t expert) {
  switch (layout.kind) {
    case RowLayout::Kind::kPacked: return rows.packed_begin[expert];
    case RowLayout::Kind::kBlocked: return begin[expert];
    case RowLayout::Kind::kPadded: return expert * static_cast<std::uint32_t>(layout.size);
  }
  return 0;
}

// The number of rows of an expert and those before it.
__device__ __forceinline__ std::uint32_t end_of_rows(const GroupedRows& call,
                                                     std::uint32_t expert) {
  return call.wide_ends
             ? static_cast<std::uint32_t>(static_cast<const std::int64_t*>(call.ends)[expert])
             : static_cast<const std::uint32_t*>(call.ends)[expert];
}

// Computes the table. Called by one warp; each lane takes a run of experts. Returns the height of
// the highest tile. Loops are not unrolled: the code runs once.
__device__ __forceinline__ std::uint32_t place_rows(const GroupedRows& call, int experts,
                                                    protocol::TileShape shape, RowTable& table) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(experts);
  const std::uint32_t per_lane = protocol::ceil_div(num_experts, 32u);
  const std::uint32_t begin = min(lane * per_lane, num_experts);
  const std::uint32_t end = min(begin + per_lane, num_experts);
  const auto block_of = [](const RowLayout& layout) {
    return static_cast<std::uint32_t>(layout.kind == RowLayout::Kind::kBlocked ? layout.size : 1);
  };
  const std::uint32_t in_block = block_of(call.in), out_block = block_of(call.out);
  std::uint32_t tiles = 0, in = 0, out = 0, height = shape.least;
  std::uint32_t row = begin == 0 || begin == end ? 0 : end_of_rows(call, begin - 1);
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const std::uint32_t next = end_of_rows(call, e), rows = next - row;
    const protocol::TokenTiles cut(rows, shape);
    table.packed_begin[e] = row;
    table.tile_begin[e] = tiles;
    table.in_begin[e] = in;
    table.out_begin[e] = out;
    tiles += cut.count;
    in += protocol::round_up(rows, in_block);
    out += protocol::round_up(rows, out_block);
    height = max(height, cut.height);
    row = next;
  }
  std::uint32_t tiles_to = tiles, in_to = in, out_to = out;  // sums up to this lane's last expert
#pragma unroll 1
  for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t before[] = {__shfl_up_sync(~0u, tiles_to, offset),
                                    __shfl_up_sync(~0u, in_to, offset),
                                    __shfl_up_sync(~0u, out_to, offset)};
    if (lane < offset) continue;
    tiles_to += before[0];
    in_to += before[1];
    out_to += before[2];
  }
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    table.tile_begin[e] += tiles_to - tiles;
    table.in_begin[e] += in_to - in;
    table.out_begin[e] += out_to - out;
  }
  if (lane == 31) {
    table.tile_begin[num_experts] = tiles_to;
    table.packed_begin[num_experts] = end_of_rows(call, num_experts - 1);
  }
  return __reduce_max_sync(~0u, height);
}

}  // namespace switchyard::gpu
