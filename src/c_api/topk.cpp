#include "c_api/guard.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::c_api {
namespace {

template <typename T>
std::span<T> numbers(const char* name, const sy_tensor* tensor, int ndim, DType dtype) {
  require(name, tensor);
  const SlotView view = elements(name, *tensor, ndim, SY_CPU, {dtype});
  return {static_cast<T*>(tensor->data), view.size()};
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;
using switchyard::DType;

sy_status sy_topk(const sy_routing* routing, int32_t top_k, const sy_tensor* logits,
                  const sy_tensor* correction_bias, const sy_tensor* ids, const sy_tensor* weights,
                  int64_t* nan_logits) {
  return guarded([&] {
    require("sy_routing", routing);
    const auto scores = numbers<const float>("logits", logits, 2, DType::kF32);
    switchyard::LayerSpec spec;
    // What route() does not look at must make sense, too.
    spec.hidden = spec.intermediate = 1;
    spec.num_experts = static_cast<int>(logits->shape[1]);
    spec.top_k = top_k;
    spec.routing = routing_of(*routing);
    switchyard::validate(spec);
    std::span<const float> bias;
    if (correction_bias != nullptr) {
      bias = numbers<const float>("correction_bias", correction_bias, 1, DType::kF32);
    }
    if (spec.routing.method == switchyard::RoutingMethod::kHash) {
      throw switchyard::Error(switchyard::ErrorCode::kUnsupported,
                              "hash routing needs a table; make a layer with a router");
    }
    const std::int64_t nans =
        switchyard::route(spec, scores, bias, {}, numbers<std::int32_t>("ids", ids, 2, DType::kI32),
                          numbers<float>("weights", weights, 2, DType::kF32));
    if (nan_logits != nullptr) *nan_logits = nans;
  });
}
