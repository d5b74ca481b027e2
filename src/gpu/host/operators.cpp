#include "gpu/operators.h"

#include <cuda_runtime_api.h>

#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/operators/launch.h"
#include "layer/engine.h"

namespace switchyard::gpu {
namespace {

// Asks for only two attributes: device_info() takes too long for a call of some microseconds, and
// may not be called while a graph is captured.
bool runs_our_kernels(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, device) == cudaSuccess) return value;
    (void)cudaGetLastError();
    return -1;
  };
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

int checked_device(const DeviceStream& where) {
  int device = where.device;
  if (device < 0 && cudaGetDevice(&device) != cudaSuccess) (void)cudaGetLastError();
  if (device >= 0 && runs_our_kernels(device)) return device;
  LayerOptions options;
  options.backend = Backend::kCuda;
  options.cuda.device = where.device;
  return choose_device(options);  // throws, and says why
}

cudaStream_t stream_of(const DeviceStream& where) {
  return static_cast<cudaStream_t>(where.stream);
}

}  // namespace

std::size_t permute_workspace_bytes(std::int64_t slots, int num_experts) {
  return PermutePlan(static_cast<std::uint32_t>(slots)).workspace_bytes(num_experts);
}

void permute(SlotView ids, int top_k, int num_experts, const DevicePermutation& out,
             const DeviceStream& where) {
  PermuteCall call{};
  call.ids = ids.data();
  call.wide_ids = ids.dtype() == DType::kI64;
  call.slots = static_cast<std::uint32_t>(ids.size());
  call.top_k = static_cast<std::uint32_t>(top_k);
  call.num_experts = static_cast<std::uint32_t>(num_experts);
  call.layout = out.layout;
  const PermutePlan plan(call.slots);
  call.chunks = plan.chunks;
  call.chunk = plan.chunk;
  call.ends = out.ends;
  call.positions = out.positions;
  call.tokens = out.tokens;
  call.rows = out.rows;
  call.dropped = out.dropped;
  call.totals = static_cast<std::uint32_t*>(out.workspace);
  call.counts = call.totals + num_experts;
  const DeviceScope scope(checked_device(where));
  SWITCHYARD_CUDA(launch_permute(call, stream_of(where)));
}

void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out, const DeviceStream& where) {
  UnpermuteCall call{};
  call.rows = rows.data;
  call.in = rows.dtype;
  call.num_rows = rows.rows;
  call.columns = rows.cols;
  call.row_stride = rows.row_stride;
  call.positions = static_cast<const std::int32_t*>(positions.data());
  call.weights = weights.empty() ? nullptr : weights.data();
  call.bf16_weights = weights.dtype() == DType::kBF16;
  call.top_k = static_cast<std::uint32_t>(top_k);
  call.tokens = static_cast<std::uint32_t>(positions.size()) / call.top_k;
  call.out = out.data;
  call.to = out.dtype;
  call.out_stride = out.row_stride == 0 ? rows.cols : out.row_stride;
  call.scale = out.scale;
  call.accumulate = out.accumulate;
  const DeviceScope scope(checked_device(where));
  SWITCHYARD_CUDA(launch_unpermute(call, stream_of(where)));
}

void topk(const LayerSpec& spec, const MatrixView& logits, const float* correction_bias,
          std::int32_t* ids, float* weights, const DeviceStream& where) {
  TopkCall call{};
  call.routing = routing::make_device_routing(spec);
  call.logits = logits.data;
  call.logits_type = logits.dtype;
  call.logits_stride = logits.row_stride;
  call.correction_bias = correction_bias;
  call.tokens = static_cast<std::uint32_t>(logits.rows);
  call.ids = ids;
  call.weights = weights;
  const DeviceScope scope(checked_device(where));
  SWITCHYARD_CUDA(launch_topk(call, stream_of(where)));
}

}  // namespace switchyard::gpu
