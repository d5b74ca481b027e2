#include "gpu/host/tensor_map.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <span>
#include <utility>

#include "gpu/host/cuda_error.h"
#include "gpu/host/driver_function.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

// The columns of a box: 128 bytes, one row of the swizzle.
cuuint32_t box_columns(int element_bytes) {
  return static_cast<cuuint32_t>(kStageRowBytes / element_bytes);
}

template <typename T>
cuuint64_t u(T value) {
  return static_cast<cuuint64_t>(value);
}

// sizes and box: innermost first; strides in bytes, from the second dimension on.
CUtensorMap encode(const void* data, int element_bytes, std::span<const cuuint64_t> sizes,
                   std::span<const cuuint64_t> strides, std::span<const cuuint32_t> box,
                   CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  // Elements are copied as they are, and zero is the same in all types.
  const CUtensorMapDataType type =
      element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  static const auto encoder =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  const CUresult result =
      encoder(&map, type, static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(data),
              sizes.data(), strides.data(), box.data(), kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE,
              CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::kSystem,
                fmt::format("cuTensorMapEncodeTiled failed with {} for an array of {} columns",
                            static_cast<int>(result), sizes[0]));
  }
  return map;
}

}  // namespace

WeightMaps weight_maps(const WeightArray& weights, BoxOrder order) {
  cuuint64_t sizes[] = {u(weights.columns), kRowGroup, u(weights.halves),
                        u(weights.rows / kRowGroup), u(weights.num_experts)};
  cuuint64_t strides[] = {u(weights.row_stride), u(weights.half_stride),
                          kRowGroup * u(weights.row_stride), u(weights.expert_stride)};
  cuuint32_t box[] = {box_columns(weights.element_bytes), kRowGroup,
                      static_cast<cuuint32_t>(weights.halves),
                      static_cast<cuuint32_t>(kTileRows / kRowGroup / weights.halves), 1};
  if (order == BoxOrder::kHalvesInTurn) {
    std::swap(sizes[2], sizes[3]);
    std::swap(strides[1], strides[2]);
    std::swap(box[2], box[3]);
  }
  return {encode(weights.data, weights.element_bytes, sizes, strides, box),
          encode(weights.data, weights.element_bytes, sizes, strides, box,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B)};
}

CUtensorMap rows_map(const void* data, int element_bytes, std::int64_t rows, int columns,
                     std::int64_t stride, int box_rows) {
  const cuuint64_t sizes[] = {u(columns), u(rows)};
  const cuuint64_t strides[] = {u(stride * element_bytes)};
  const cuuint32_t box[] = {box_columns(element_bytes), static_cast<cuuint32_t>(box_rows)};
  return encode(data, element_bytes, sizes, strides, box);
}

TokenMaps token_maps(const std::byte* data, int element_bytes, std::int64_t rows, int columns,
                     std::int64_t stride, const TokenBoxes& boxes) {
  return {rows_map(data, element_bytes, rows, columns, stride, static_cast<int>(boxes.many)),
          rows_map(data, element_bytes, rows, columns, stride, static_cast<int>(boxes.few))};
}

}  // namespace switchyard::gpu
