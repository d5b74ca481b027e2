#include "gpu/grouped_gemm.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/device.h"
#include "gpu/grouped/params.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/tensor_map.h"
#include "gpu/host/weights.h"
#include "gpu/layer/policy.h"
#include "layer/engine.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

// Longest wait within a block, where nothing waits for anything but memory.
constexpr std::uint64_t kDeadlineNs = 10'000'000'000;

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::kUnsupported, message);
}

GroupedEntry find_grouped(const GroupedGemmSpec& spec) {
  const bool activates = spec.epilogue.has_value();
  const Activation activation =
      spec.epilogue.value_or(Activation{ActivationKind::kIdentity, false});
#define SWITCHYARD_GROUPED(name, is_gated, with_activation)                        \
  if (activation.kind == ActivationKind::name && activation.gated == (is_gated) && \
      activates == (with_activation)) {                                            \
    return grouped_entry<ActivationKind::name, is_gated, with_activation>();       \
  }
#include "gpu/grouped_list.inc"
#undef SWITCHYARD_GROUPED
  unsupported(
      fmt::format("no kernel of GroupedGemm was compiled for a {} '{}'; see "
                  "src/gpu/CMakeLists.txt",
                  activation.gated ? "gated" : "plain", name_of(activation)));
}

// An expert's matrix as a layer has it: gate and up with an activation, else down.
FfnWeights as_ffn(const GroupedGemmSpec& spec, const MatrixView& matrix, const VectorView& bias) {
  FfnWeights ffn;
  if (!spec.epilogue) {
    ffn.down = matrix;
    ffn.down_bias = bias;
    return ffn;
  }
  if (!spec.epilogue->gated) {
    ffn.up = matrix;
    ffn.up_bias = bias;
    return ffn;
  }
  const int half = spec.n / 2;
  const bool in_turn = spec.order == GateOrder::kInterleaved;
  const auto part = [&](bool second, MatrixView& rows, VectorView& values) {
    const std::int64_t first = !second ? 0 : in_turn ? 1 : half;
    rows = matrix;
    rows.rows = half;
    rows.data = matrix.row(first);
    rows.row_stride = matrix.row_stride * (in_turn ? 2 : 1);
    values = bias;
    if (bias.empty()) return;
    values.size = half;
    values.data = static_cast<const std::byte*>(bias.data) +
                  static_cast<std::size_t>(first * bias.stride) * size_of(bias.dtype);
    values.stride = bias.stride * (in_turn ? 2 : 1);
  };
  const bool up_first = spec.order == GateOrder::kUpGate;
  part(up_first, ffn.gate, ffn.gate_bias);
  part(!up_first, ffn.up, ffn.up_bias);
  return ffn;
}

int checked_device(const GroupedGemmOptions& options) {
  LayerOptions layer;
  layer.backend = Backend::kCuda;
  layer.device = options.device;
  layer.reserved_sms = options.reserved_sms;
  return choose_device(layer);
}

void require_multiple_of_8(const char* what, std::int64_t value) {
  if (value % 8 == 0) return;
  unsupported(
      fmt::format("{} is {}; the GPU moves 16 bytes at a time, use a multiple of 8", what, value));
}

void require_aligned(const char* what, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} starts at {}; the GPU moves 16 bytes at a time, use a multiple of 16",
                          what, data));
}

}  // namespace

struct GroupedGemmEngine::State {
  GroupedGemmSpec spec;
  int device;
  unsigned blocks = 0;
  GroupedEntry entry{};
  DeviceFfn weights;
  DeviceBuffer nowhere;
  MappedMemory<Failures> failures;
  GroupedParams params{};

  State(const GroupedGemmSpec& its, int on) : spec(its), device(on) {}
};

GroupedGemmEngine::GroupedGemmEngine(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights,
                                     DType compute, const GroupedGemmOptions& options) {
  const int device = checked_device(options);
  if (compute != DType::kBF16) {
    unsupported(
        fmt::format("GroupedGemm computes in {} here, and on the GPU in bf16 only; set "
                    "compute to kBF16, or use Backend::kCpu",
                    to_string(compute)));
  }
  require_multiple_of_8("k", spec.k);
  require_multiple_of_8("the number of output columns", spec.output_columns());
  const DeviceScope scope(device);
  state_ = std::make_unique<State>(spec, device);
  State& state = *state_;
  state.entry = find_grouped(spec);
  state.blocks = static_cast<unsigned>(device_info(device).num_sms - options.reserved_sms);
  SWITCHYARD_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(state.entry.kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(state.entry.shared_bytes)));
  std::vector<FfnWeights> experts;
  for (std::size_t e = 0; e < weights.matrices.size(); ++e) {
    experts.push_back(as_ffn(spec, weights.matrices[e],
                             weights.biases.empty() ? VectorView{} : weights.biases[e]));
  }
  const bool first = spec.epilogue.has_value();
  state.weights = DeviceFfn(facts_of<BF16Policy>(), experts, first ? spec.k : spec.n,
                            first ? spec.output_columns() : spec.k, first && spec.epilogue->gated);
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
  state.nowhere = DeviceBuffer(static_cast<std::size_t>(spec.output_columns()) * 2);

  GroupedParams& params = state.params;
  params.routed = state.weights.params();
  params.num_experts = spec.num_experts;
  params.hidden = first ? spec.k : spec.n;
  params.alpha = 1;
  params.limit = INFINITY;
  if (first) {
    params.alpha = spec.epilogue->alpha;
    params.limit = spec.epilogue->limit;
    params.up_bias = spec.epilogue->up_bias;
  }
  params.clamps = std::isfinite(params.limit) || params.up_bias != 0;
  FfnParams& ffn = params.routed;
  ffn.more_of_first = params.clamps || ffn.up_bias != nullptr;
  ffn.more_of_second = ffn.down_bias != nullptr;
  params.k_blocks = static_cast<std::uint32_t>(protocol::ceil_div(spec.k * 2, kStageRowBytes));
  params.row_blocks = protocol::ceil_div(first ? ffn.gemm1_rows : ffn.gemm2_rows,
                                         static_cast<std::uint32_t>(kTileRows));
  params.deadline_ns = kDeadlineNs;
  params.block_deadline_ns = block_deadline(kDeadlineNs);
  params.failures = state.failures.on_device();
}
GroupedGemmEngine::~GroupedGemmEngine() = default;

void GroupedGemmEngine::run(const GroupedInput& input, const GroupedOutput& output) {
  State& state = *state_;
  const GroupedGemmSpec& spec = state.spec;
  if ((*state.failures).given_up != 0) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("an earlier call of GroupedGemm waited {} s for the GPU's memory, and "
                            "gave up; make the operator anew",
                            kDeadlineNs / 1'000'000'000));
  }
  const MatrixView& x = input.x;
  if (x.rows == 0) return;
  if (x.dtype != DType::kBF16 || output.dtype != DType::kBF16) {
    unsupported(
        fmt::format("x is {} and the output {}; on the GPU GroupedGemm takes and gives bf16",
                    to_string(x.dtype), to_string(output.dtype)));
  }
  if (!input.index.empty()) {
    unsupported(
        "the input has an index; on the GPU GroupedGemm takes rows that are gathered, or use "
        "Backend::kCpu");
  }
  if (!output.weights.empty() || output.products != nullptr) {
    unsupported(
        "row weights, or products that are stored, are not there on the GPU; leave them out, or "
        "use "
        "Backend::kCpu");
  }
  const std::int64_t stride = output.row_stride == 0 ? spec.output_columns() : output.row_stride;
  require_multiple_of_8("x's row_stride", x.rows > 1 ? x.row_stride : 0);
  require_multiple_of_8("the output's row_stride", stride);
  require_aligned("x", x.data);
  require_aligned("the output", output.data);
  if (x.rows > 1 && x.row_stride < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("x has a row_stride of {}; on the GPU rows stand in order, pass a copy",
                            x.row_stride));
  }
  GroupedCall call{};
  call.x_maps = token_maps(static_cast<const std::byte*>(x.data), 2, x.rows, spec.k,
                           x.rows > 1 ? x.row_stride : spec.k);
  call.ends = input.ends.data();
  call.wide_ends = input.ends.dtype() == DType::kI64;
  call.in = input.layout;
  call.out = output.layout;
  call.index = static_cast<const std::int32_t*>(output.index.data());
  call.y = static_cast<std::uint16_t*>(output.data);
  call.y_stride = stride;
  call.nowhere = reinterpret_cast<std::uint16_t*>(state.nowhere.data());
  const DeviceScope scope(state.device);
  void* arguments[] = {&state.params, &call};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(state.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = state.entry.shared_bytes;
  config.stream = static_cast<cudaStream_t>(input.stream);
  SWITCHYARD_CUDA(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(state.entry.kernel), arguments));
}

}  // namespace switchyard::gpu
