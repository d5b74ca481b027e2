// Routing of logits in the C interface.
#include <span>

#include "base/overlap.h"
#include "c_api/guard.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/routing.h"

namespace switchyard::c_api {
namespace {

template <typename T>
std::span<T> numbers(const char* name, const sy_tensor* tensor, int ndim, DType dtype,
                     sy_device_type device = SY_CPU) {
  require(name, tensor);
  const SlotView view = elements(name, *tensor, ndim, device, {dtype});
  return {static_cast<T*>(tensor->data), view.size()};
}

std::int64_t route_on_host(const sy_routing& routing, int top_k, const sy_tensor* logits,
                           const sy_tensor* correction_bias, const sy_tensor* ids,
                           const sy_tensor* weights) {
  const auto scores = numbers<const float>("logits", logits, 2, DType::kF32);
  LayerSpec spec;
  // Fields that route() does not look at must make sense, too.
  spec.hidden = spec.intermediate = 1;
  spec.num_experts = whole("num_experts", logits->shape[1]);
  spec.top_k = top_k;
  spec.routing = routing_of(routing);
  require_valid(spec);
  std::span<const float> bias;
  if (correction_bias != nullptr) {
    bias = numbers<const float>("correction_bias", correction_bias, 1, DType::kF32);
  }
  if (spec.routing.method == RoutingMethod::kHash) {
    throw Error(ErrorCode::kUnsupported, "hash routing needs a table; make a layer with a router");
  }
  const std::span<std::int32_t> chosen = numbers<std::int32_t>("ids", ids, 2, DType::kI32);
  const std::span<float> factors = numbers<float>("weights", weights, 2, DType::kF32);
  require_apart({{"ids", chosen}, {"weights", factors}},
                {{"logits", scores}, {"correction_bias", bias}});
  return route(spec, scores, bias, {}, chosen, factors);
}

void route_on_device(const sy_topk_call& call) {
  MatrixView logits = matrix("logits", call.logits, SY_CUDA);
  if (logits.cols <= 1) logits.col_stride = 1;
  std::span<const float> bias;
  if (is_given(call.correction_bias)) {
    bias = numbers<const float>("correction_bias", &call.correction_bias, 1, DType::kF32, SY_CUDA);
  }
  topk(routing_of(*call.routing), call.top_k, logits, bias,
       numbers<std::int32_t>("ids", &call.ids, 2, DType::kI32, SY_CUDA),
       numbers<float>("weights", &call.weights, 2, DType::kF32, SY_CUDA),
       {call.stream, call.logits.device_id});
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_topk(const sy_routing* routing, int32_t top_k, const sy_tensor* logits,
                  const sy_tensor* correction_bias, const sy_tensor* ids, const sy_tensor* weights,
                  int64_t* nan_logits) {
  return guarded([&] {
    require("sy_routing", routing);
    const std::int64_t nans = route_on_host(*routing, top_k, logits, correction_bias, ids, weights);
    if (nan_logits != nullptr) *nan_logits = nans;
  });
}

sy_status sy_topk_run(const sy_topk_call* given) {
  return guarded([&] {
    const sy_topk_call call = read_struct("sy_topk_call", given);
    require("sy_routing", call.routing);
    if (call.logits.device_type == SY_CUDA) return route_on_device(call);
    if (call.stream != nullptr) {
      throw switchyard::Error(
          switchyard::ErrorCode::kInvalidArgument,
          "a stream is given, but the tensors are in host memory; leave it null");
    }
    route_on_host(*call.routing, call.top_k, &call.logits,
                  is_given(call.correction_bias) ? &call.correction_bias : nullptr, &call.ids,
                  &call.weights);
  });
}
