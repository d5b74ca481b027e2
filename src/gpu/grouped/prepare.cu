// Gathers, converts and quantises rows, where the multiplying kernel cannot take them as they are.
#include <algorithm>

#include "gpu/grouped/rows.cuh"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/load_eight.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {
namespace {

constexpr int kPrepareThreads = 256;

// Returns eight elements from `column` on as bf16 or fp16, whichever `as` is; zeros past the last
// column. The number of columns is a multiple of eight.
__device__ __forceinline__ uint4 columns_of(const PrepareCall& call, DType as, std::int64_t row,
                                            int column) {
  if (row < 0 || column >= call.columns) return {0, 0, 0, 0};
  return load_eight(call.x, call.type, row * call.x_stride + column, as);
}

__device__ __forceinline__ uint4 load_codes(const PrepareCall& call, std::int64_t row, int column) {
  const auto* const from = static_cast<const std::uint8_t*>(call.x) + row * call.x_stride + column;
  if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= std::uint32_t{__ldg(from + i)} << 8 * (i % 4);
  return {words[0], words[1], words[2], words[3]};
}

// The scale that all columns of a row share. Called by all threads of the block.
__device__ GroupScale scale_of_row(const PrepareCall& call, std::int64_t row) {
  float most = 0;
  if (call.type == DType::kF8E4M3) {
    for (int column = 16 * static_cast<int>(threadIdx.x); row >= 0 && column < call.columns;
         column += 16 * kPrepareThreads) {
      const float scale = __ldg(call.x_scales + row * call.scale_stride + column / kQuantGroup);
      most = at_least(most, fabsf(scale) * largest_code(load_codes(call, row, column)));
    }
  } else {
    std::uint32_t pair = 0;
    for (int column = 8 * static_cast<int>(threadIdx.x); column < call.columns;
         column += 8 * kPrepareThreads) {
      pair = larger_magnitudes(pair, largest_pair(columns_of(call, DType::kBF16, row, column)));
    }
    most = largest_magnitude(pair);
  }
  return group_scale(largest_of_block<kPrepareThreads>(most));
}

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ PrepareCall call) {
  __shared__ RowTable table;
  if (threadIdx.x < 32) place_rows(call, call.num_experts, {}, table);
  __syncthreads();
  const auto num_experts = static_cast<std::uint32_t>(call.num_experts);
  const std::uint32_t rows = table.packed_begin[num_experts];
  const int groups = protocol::ceil_div(call.columns, kQuantGroup);
  for (std::uint32_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const std::uint32_t expert = find_expert(table.packed_begin, num_experts, r);
    const std::uint32_t place =
        first_row(call.in, table, table.in_begin, expert) + r - table.packed_begin[expert];
    std::int64_t row =
        call.index != nullptr ? std::int64_t{__ldg(call.index + place)} : std::int64_t{place};
    if (row >= call.x_rows) row = -1;
    if (call.to_type != DType::kF8E4M3) {
      auto* const to = static_cast<std::uint16_t*>(call.to) + std::int64_t{r} * call.columns;
      for (int column = 8 * static_cast<int>(threadIdx.x); column < call.columns;
           column += 8 * kPrepareThreads) {
        store_vector(to + column, columns_of(call, call.to_type, row, column));
      }
      continue;
    }
    auto* const to = static_cast<std::uint8_t*>(call.to) + std::int64_t{r} * call.columns;
    const GroupScale of_row = call.by_row ? scale_of_row(call, row) : GroupScale{};
    float* const scales = call.to_scales + std::int64_t{r} * (call.by_row ? 1 : groups);
    if (call.by_row && threadIdx.x == 0) *scales = of_row.scale;
    if (call.type == DType::kF8E4M3) {
      const float* const given = call.x_scales + row * call.scale_stride;
      for (int column = 16 * static_cast<int>(threadIdx.x); column < call.columns;
           column += 16 * kPrepareThreads) {
        uint4 codes = row < 0 ? uint4{0, 0, 0, 0} : load_codes(call, row, column);
        if (call.by_row && row >= 0) {
          codes = rescale(codes, __ldg(given + column / kQuantGroup) * of_row.inverse);
        }
        store_vector(to + column, codes);
      }
      for (int group = static_cast<int>(threadIdx.x); !call.by_row && group < groups;
           group += kPrepareThreads) {
        scales[group] = row < 0 ? 0 : __ldg(given + group);
      }
      continue;
    }
    // All lanes of a group take part, also those past the last column.
    for (int first = 0; first < groups * kQuantGroup;
         first += static_cast<int>(kLaneColumns) * kPrepareThreads) {
      const int column = first + static_cast<int>(kLaneColumns * threadIdx.x);
      const uint4 first_half = columns_of(call, DType::kBF16, row, column);
      const uint4 second_half = columns_of(call, DType::kBF16, row, column + 8);
      float scale;
      const uint4 codes = call.by_row ? quantize(first_half, second_half, of_row.inverse)
                                      : quantize_together(first_half, second_half, scale);
      if (column < call.columns) store_vector(to + column, codes);
      if (!call.by_row && threadIdx.x % kGroupLanes == 0 && column < call.columns) {
        scales[column / kQuantGroup] = scale;
      }
    }
  }
}

}  // namespace

cudaError_t prepare_rows(const PrepareCall& call, std::int64_t rows, int num_sms,
                         cudaStream_t stream) {
  constexpr int kBlocksPerSm = 6;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(rows, kBlocksPerSm * num_sms));
  prepare_kernel<<<blocks, kPrepareThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
