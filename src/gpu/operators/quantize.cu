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
    // All lanes of a group take part, also those past the last column.
    for (std::uint32_t first = 0; first < groups * kQuantGroup; first += kLaneColumns * kThreads) {
      const std::uint32_t column = first + kLaneColumns * threadIdx.x;
      const bool has = column < call.columns;
      uint4 halves[2] = {};
#pragma unroll
      for (std::uint32_t i = 0; i < 2; ++i) {
        if (!has) continue;
        halves[i] =
            load_eight(call.x, call.type, row * call.x_stride + column + 8 * i, DType::kBF16);
      }
      float scale;
      const uint4 sixteen = quantize_together(halves[0], halves[1], scale);
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
