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
#include "gpu/tile/four_bit.h"
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
    case DType::kF32: return static_cast<const float*>(m.data)[at];
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[at]);
    case DType::kF16: return __half2float(static_cast<const __half*>(m.data)[at]);
    default: break;
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

// True if any code of the group of MXFP4's columns that begins at `column` is not zero.
__device__ bool has_weights(const MatrixView& m, std::int64_t row, std::int64_t column) {
  const auto* const bytes =
      static_cast<const std::uint8_t*>(m.data) + (row * m.row_stride + column) / 2;
  std::uint32_t any = 0;
  for (std::int64_t i = 0; i < FourBitBox<DType::kF4E2M1>::kGroup / 2; ++i) any |= bytes[i];
  return (any & 0x77) != 0;
}

// Each block y finds the powers of the rows of the y-th entry of the list, a row by a warp.
__global__ void find_powers(const BoxCopy* list) {
  const BoxCopy& copy = list[blockIdx.y];
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warps = gridDim.x * blockDim.x / 32;
  for (int half = 0; half < copy.halves; ++half) {
    const MatrixView& m = copy.from[half];
    for (std::uint32_t row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < copy.rows;
         row += warps) {
      std::uint32_t top = kLeastTop;
      for (std::int64_t group = lane; row < m.rows && group < m.cols / m.scale_cols; group += 32) {
        const std::uint32_t code =
            static_cast<const std::uint8_t*>(m.scale)[row * m.scale_stride + group];
        if (code > top && has_weights(m, row, group * m.scale_cols)) top = code;
      }
      top = __reduce_max_sync(~0u, top);
      if (lane == 0) copy.powers[half][row] = __uint_as_float(bits_of_row_power(top));
    }
  }
}

// Each block y makes the boxes of the y-th entry of the list, one of them for one stage at a time.
template <DType kType>
__global__ void make_boxes(const BoxCopy* list) {
  using Box = FourBitBox<kType>;
  const BoxCopy& copy = list[blockIdx.y];
  const std::uint32_t total = copy.boxes * copy.k_blocks, lane = threadIdx.x;
  constexpr std::uint32_t kZero = Box::kIsFloat ? 0 : 8;
  for (std::uint32_t b = blockIdx.x; b < total; b += gridDim.x) {
    const std::uint32_t row0 = b / copy.k_blocks * Box::kRows;
    const std::uint32_t column0 = b % copy.k_blocks * Box::kColumns;
    std::byte* const to = copy.to + std::size_t{b} * Box::kBytes;
    const auto code_at = [&](std::uint32_t row, std::uint32_t column) -> std::uint32_t {
      const BoxRow of = box_row(row0 + row, copy.halves);
      const MatrixView& m = copy.from[of.half];
      const std::int64_t c = column0 + column;
      if (of.row >= m.rows || c >= m.cols) return kZero;
      const std::uint8_t pair =
          static_cast<const std::uint8_t*>(m.data)[(of.row * m.row_stride + c) / 2];
      return c % 2 == 0 ? pair & 15u : pair >> 4;
    };
    const auto words_of = [&](std::uint32_t pair) {
      if (copy.powers[0] == nullptr) return box_words<kType>(lane, pair, code_at);
      return CodeWords{code_word(lane, 2 * pair, code_at), code_word(lane, 2 * pair + 1, code_at)};
    };
    const CodeWords low = words_of(0), high = words_of(1);
    reinterpret_cast<uint4*>(to)[lane] = {low.first, low.second, high.first, high.second};
    // Two rows and two groups of columns for each of 64 pairs of rows.
    const std::uint32_t pair = lane / 4, of_row = lane % 2, group = lane / 2 % 2;
    const BoxRow of = box_row(row0 + scales_row(pair) + of_row * 8, copy.halves);
    const MatrixView& m = copy.from[of.half];
    const std::int64_t column = column0 + group * Box::kGroup;
    const bool is_there = of.row < m.rows && column < m.cols;
    const std::int64_t at = is_there ? of.row * m.scale_stride + column / m.scale_cols : 0;
    if constexpr (Box::kIsFloat) {
      std::uint32_t code = is_there ? static_cast<const std::uint8_t*>(m.scale)[at] : 0;
      std::uint32_t byte = box_scale(code);
      bool bad = code > kMostMxScale;
      if (const float* const powers = copy.powers[of.half]; powers != nullptr && !bad) {
        const std::uint32_t least =
            of.row < copy.rows ? least_scale_of(__float_as_uint(powers[of.row])) : 0;
        if (code < least) {
          bad = is_there && has_weights(m, of.row, column);
          // Steps are not negative, whatever the scale of a group of zeros.
          if (!bad) code = least;
        }
        byte = box_step(code - least);
      }
      if (bad) {
        atomicMin(copy.bad,
                  pack(BadScale{copy.number, of.half, of.row,
                                static_cast<std::uint32_t>(column / m.scale_cols), code}));
      }
      reinterpret_cast<std::uint8_t*>(to + Box::kScalesAt)[lane] = static_cast<std::uint8_t>(byte);
    } else {
      const std::uint16_t scale =
          is_there ? static_cast<const std::uint16_t*>(m.scale)[at] : std::uint16_t{0};
      if ((scale & 0x7fffu) > 0x7f80u) {
        atomicMin(copy.bad, pack(BadScale{copy.number, of.half, of.row,
                                          static_cast<std::uint32_t>(column / m.scale_cols), 255}));
      }
      reinterpret_cast<std::uint16_t*>(to + Box::kScalesAt)[lane] = scale;
    }
  }
}

constexpr std::int64_t kMostBlocks = 4096;
constexpr unsigned kPowerBlocks = 32;

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

void enqueue_boxes(const BoxCopy* list, std::size_t count, DType type, bool powers,
                   std::int64_t most, void* stream) {
  if (count == 0 || most == 0) return;
  const dim3 grid(static_cast<unsigned>(std::min(most, kMostBlocks)), static_cast<unsigned>(count));
  const auto on = static_cast<cudaStream_t>(stream);
  if (type == DType::kF4E2M1) {
    if (powers) find_powers<<<dim3(kPowerBlocks, grid.y), 256, 0, on>>>(list);
    make_boxes<DType::kF4E2M1><<<grid, FourBitBox<DType::kF4E2M1>::kLanes, 0, on>>>(list);
  } else {
    make_boxes<DType::kU4><<<grid, FourBitBox<DType::kU4>::kLanes, 0, on>>>(list);
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::gpu
