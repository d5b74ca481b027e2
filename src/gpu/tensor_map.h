// Descriptions of matrices for the copy engine, in boxes of 128 swizzled bytes per row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/layer_params.h"

namespace switchyard::gpu {

// Over [E, halves, rows, columns] bf16 such that a box is kTileRows rows: groups of 8 rows, taken
// from all halves in turn. `rows` and `columns` must be multiples of 8.
CUtensorMap weights_map(const std::byte* data, std::int64_t num_experts, int halves, int rows,
                        int columns);

// Over [rows, columns] bf16, `stride` elements from row to row; zeros beyond the last column.
TokenMaps token_maps(const std::uint16_t* data, std::int64_t rows, int columns,
                     std::int64_t stride);

}  // namespace switchyard::gpu
