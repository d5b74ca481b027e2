// Quantizes rows in bf16, f16 or f32 to FP8 codes, with a row's scales behind its codes.
#include <algorithm>

#include "gpu/operators/launch.h"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/load_eight.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;

// A block has a row at a time, a thread 16 columns.
__global__ void __launch_bounds__(kThreads) quantize_rows(const QuantizeCall call) {
  const std::uint32_t groups = protocol::ceil_div(call.columns, std::uint32_t{kQuantGroup});
  for (std::int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    std::uint8_t* const codes = call.to + row * call.to_bytes;
    auto* const scales = reinterpret_cast<float*>(codes + call.columns);
    const auto load = [&](std::uint32_t column, std::uint32_t i) {
      if (column >= call.columns) return uint4{0, 0, 0, 0};
      return load_eight(call.x, call.type, row * call.x_stride + column + 8 * i, DType::kBF16);
    };
    GroupScale of_row{};
    if (call.by_row) {
      std::uint32_t most = 0;
      for (std::uint32_t column = kLaneColumns * threadIdx.x; column < call.columns;
           column += kLaneColumns * kThreads) {
        most = larger_magnitudes(
            most, larger_magnitudes(largest_pair(load(column, 0)), largest_pair(load(column, 1))));
      }
      of_row = group_scale(largest_of_block<kThreads>(largest_magnitude(most)));
    }
    // All lanes of a group take part, also those past the last column.
    for (std::uint32_t first = 0; first < groups * kQuantGroup; first += kLaneColumns * kThreads) {
      const std::uint32_t column = first + kLaneColumns * threadIdx.x;
      const bool has = column < call.columns;
      const uint4 halves[2] = {load(column, 0), load(column, 1)};
      float scale = of_row.scale;
      const uint4 sixteen = call.by_row ? quantize(halves[0], halves[1], of_row.inverse)
                                        : quantize_together(halves[0], halves[1], scale);
      if (!has) continue;
      store_vector(codes + column, sixteen);
      if (threadIdx.x % kGroupLanes == 0) scales[column / kQuantGroup] = scale;
    }
  }
}

}  // namespace

cudaError_t load_quantize_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, quantize_rows);
}

cudaError_t launch_quantize(const QuantizeCall& call, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1024;
  const auto blocks = static_cast<unsigned>(std::min(call.rows, kMostBlocks));
  quantize_rows<<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
