// The kernels that lay out weights.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "base/quantize.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/lay_out.h"
#include "gpu/ptx/machine.h"
#include "gpu/tile/config.h"
#include "protocol/partition.h"

namespace switchyard::gpu {
namespace {

constexpr int kEdge = 32,
              kLines = 8;  // a block's tile of elements, and the lines it does at a time

// Returns an element's value, or its FP8 code where codes are copied.
__device__ float element(const MatrixCopy& copy, std::int64_t row, std::int64_t column) {
  const MatrixView& m = copy.from;
  const std::int64_t at = row * m.row_stride + column * m.col_stride;
  switch (m.dtype) {
    case DType::kF32:
      return static_cast<const float*>(m.data)[at];
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[at]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(m.data)[at]);
    default:
      break;
  }
  const std::uint8_t code = static_cast<const std::uint8_t*>(m.data)[at];
  if (copy.to_type == DType::kF8E4M3) return static_cast<float>(code);
  __nv_fp8_e4m3 value;
  value.__x = code;
  const float unscaled = static_cast<float>(value);
  if (m.scale == nullptr) return unscaled;
  return unscaled * static_cast<const float*>(
                        m.scale)[row / m.scale_rows * m.scale_stride + column / m.scale_cols];
}

__device__ void store(const MatrixCopy& copy, std::int64_t row, std::int64_t column, float value) {
  const std::int64_t at = row * copy.to_stride + column;
  if (copy.to_type == DType::kF32) {
    static_cast<float*>(copy.to)[at] = value;
  } else if (copy.to_type == DType::kF8E4M3) {
    static_cast<std::uint8_t*>(copy.to)[at] = static_cast<std::uint8_t>(value);
  } else if (copy.to_type == DType::kF16) {
    static_cast<__half*>(copy.to)[at] = __float2half_rn(value);
  } else {
    for (int i = 0; i < copy.plane; ++i) value -= __bfloat162float(__float2bfloat16_rn(value));
    static_cast<__nv_bfloat16*>(copy.to)[at] = __float2bfloat16_rn(value);
  }
}

// Each block y copies the y-th matrix of the list, a tile at a time, through shared memory: reads
// and writes of a warp are of neighbouring elements, whichever way the matrix lies.
__global__ void copy_matrices(const MatrixCopy* list) {
  __shared__ float tile[kEdge][kEdge + 1];
  const MatrixCopy& copy = list[blockIdx.y];
  const std::int64_t rows = copy.from.rows, columns = copy.from.cols;
  const std::int64_t across = protocol::ceil_div<std::int64_t>(columns, kEdge);
  const std::int64_t tiles = across * protocol::ceil_div<std::int64_t>(rows, kEdge);
  const bool transposed = llabs(copy.from.row_stride) < llabs(copy.from.col_stride);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const std::int64_t row0 = t / across * kEdge, column0 = t % across * kEdge;
    for (int line = y; line < kEdge; line += kLines) {
      const int r = transposed ? x : line, c = transposed ? line : x;
      if (row0 + r < rows && column0 + c < columns) {
        tile[r][c] = element(copy, row0 + r, column0 + c);
      }
    }
    __syncthreads();
    for (int line = y; line < kEdge; line += kLines) {
      if (row0 + line < rows && column0 + x < columns) {
        store(copy, row0 + line, column0 + x, tile[line][x]);
      }
    }
    __syncthreads();
  }
}

__device__ float scale_at(const MatrixView& m, std::int64_t row, std::int64_t column) {
  return static_cast<const float*>(
      m.scale)[row / m.scale_rows * m.scale_stride + column / m.scale_cols];
}

__global__ void copy_scales(const ScaleCopy* list) {
  const ScaleCopy& copy = list[blockIdx.y];
  const bool rows = copy.form == ScaleCopy::Form::kRows;
  const std::int64_t count = rows ? copy.rows : std::int64_t{copy.boxes} * copy.groups;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    if (rows) {
      copy.to[i] = copy.by_row && i < copy.of.rows ? scale_at(copy.of, i, 0) : 1.0f;
      continue;
    }
    const auto box = static_cast<int>(i / copy.groups), group = static_cast<int>(i % copy.groups);
    // Rows past the last are multiplied with the others of their tile. They share the last one's
    // scale.
    const std::int64_t row = min(std::int64_t{box} * kTileRows / copy.halves, copy.of.rows - 1);
    const float scale =
        copy.by_row ? 1.0f : scale_at(copy.of, row, std::int64_t{group} * kQuantGroup);
    float* const to = copy.to + (std::int64_t{box} / 2 * copy.groups + group) * 4 + box % 2 * 2;
    if (copy.halves == 2) {
      to[copy.part] = scale;
    } else {
      to[0] = to[1] = scale;
    }
  }
}

constexpr std::int64_t kMostBlocks = 4096;

}  // namespace

void enqueue_copies(const MatrixCopy* list, std::size_t count, std::int64_t most, void* stream) {
  if (count == 0 || most == 0) return;
  const dim3 grid(static_cast<unsigned>(std::min(most, kMostBlocks)), static_cast<unsigned>(count));
  copy_matrices<<<grid, dim3(kEdge, kLines), 0, static_cast<cudaStream_t>(stream)>>>(list);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void enqueue_scales(const ScaleCopy* list, std::size_t count, std::int64_t most, void* stream) {
  if (count == 0 || most == 0) return;
  constexpr unsigned kThreadsOfBlock = 256;
  const std::int64_t blocks = protocol::ceil_div<std::int64_t>(most, kThreadsOfBlock);
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMostBlocks)),
                  static_cast<unsigned>(count));
  copy_scales<<<grid, kThreadsOfBlock, 0, static_cast<cudaStream_t>(stream)>>>(list);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::gpu
