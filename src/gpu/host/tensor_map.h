// Descriptors of matrices for the copy engine, in boxes of 128 swizzled bytes per row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/layer/params.h"

namespace switchyard::gpu {

// [E, halves, rows, columns]: gate and up are the halves of a gated first GEMM.
struct WeightArray {
  const std::byte* data = nullptr;
  std::int64_t num_experts = 0;
  int halves = 1;
  int rows = 0, columns = 0;  // whole groups of rows, columns of whole 16 bytes
  int element_bytes = 2;      // 2 for bf16 and fp16, 1 for E4M3
  // Distances in bytes between rows, halves and experts; multiples of 16.
  std::int64_t row_stride = 0, half_stride = 0, expert_stride = 0;
};

// How a box of kTileRows rows takes them from the halves: groups of 8 rows from all halves in turn,
// or an equal share of each half, one half after the other.
enum class BoxOrder : std::uint8_t { kGroupsInTurn, kHalvesInTurn };
WeightMaps weight_maps(const WeightArray& weights, BoxOrder order);

// Describes a matrix [rows, columns] with `stride` elements from row to row, in boxes of
// `box_rows`. Loads beyond the last row or column give zeros.
CUtensorMap rows_map(const void* data, int element_bytes, std::int64_t rows, int columns,
                     std::int64_t stride, int box_rows);
TokenMaps token_maps(const std::byte* data, int element_bytes, std::int64_t rows, int columns,
                     std::int64_t stride, const TokenBoxes& boxes = kUsualTokenBoxes);

}  // namespace switchyard::gpu
