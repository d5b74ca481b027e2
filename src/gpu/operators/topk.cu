// topk(): a warp for each token, by the layers' own route_warp().
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/operators/launch.h"

namespace switchyard::gpu {
namespace {

// Small blocks: a batch of a few hundred tokens shall reach all SMs.
constexpr std::uint32_t kThreads = 128, kWarps = kThreads / 32;

template <typename T, typename Convert, int kPerLane>
__device__ __forceinline__ void load(const TopkCall& call, std::uint32_t token, Convert convert,
                                     float (&logits)[kPerLane]) {
  const T* const row =
      static_cast<const T*>(call.logits) + std::int64_t{token} * call.logits_stride;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int expert = static_cast<int>(threadIdx.x % 32) + 32 * j;
    // A lane without an expert has NaN, which is never chosen.
    logits[j] = expert < call.routing.num_experts ? convert(row[expert]) : routing::warp::nan();
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) route_tokens(const TopkCall call) {
  // The shuffle shows the compiler that all lanes have the same token.
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const std::uint32_t token = blockIdx.x * kWarps + warp;
  if (token >= call.tokens) return;
  float logits[kPerLane];
  switch (call.logits_type) {
    case DType::kF32:
      load<float>(
          call, token, [](float value) { return value; }, logits);
      break;
    case DType::kF16:
      load<__half>(
          call, token, [](__half value) { return __half2float(value); }, logits);
      break;
    default:
      load<__nv_bfloat16>(
          call, token, [](__nv_bfloat16 value) { return __bfloat162float(value); }, logits);
  }
  routing::Choice mine{};
  routing::route_warp(call.routing, logits, call.correction_bias, nullptr, mine);
  if (lane >= static_cast<std::uint32_t>(call.routing.top_k)) return;
  const std::size_t slot = std::size_t{token} * static_cast<std::size_t>(call.routing.top_k) + lane;
  call.ids[slot] = mine.id;
  call.weights[slot] = mine.weight;
}

}  // namespace

cudaError_t launch_topk(const TopkCall& call, cudaStream_t stream) {
  routing::with_per_lane(call.routing.num_experts, [&](auto per_lane) {
    route_tokens<decltype(per_lane)::value>
        <<<protocol::ceil_div(call.tokens, kWarps), kThreads, 0, stream>>>(call);
  });
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
