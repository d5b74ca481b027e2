#include <fmt/format.h>

#include "c_api/guard.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::c_api {
namespace {

template <typename T>
std::span<T> elements(const char* name, const sy_tensor* tensor, int ndim, sy_dtype dtype) {
  require(name, tensor);
  check_tensor(name, *tensor, ndim, SY_CPU);
  if (tensor->dtype != dtype) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} has the dtype {}; it must be {}", name, tensor->dtype,
                            to_string(dtype_of(name, dtype))));
  }
  std::int64_t size = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (tensor->shape[d] > 1 && tensor->strides[d] != size) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is not contiguous; pass a contiguous copy", name));
    }
    size *= tensor->shape[d];
  }
  return {static_cast<T*>(tensor->data), static_cast<std::size_t>(size)};
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_topk(const sy_routing* routing, int32_t top_k, const sy_tensor* logits,
                  const sy_tensor* correction_bias, const sy_tensor* ids, const sy_tensor* weights,
                  int64_t* nan_logits) {
  return guarded([&] {
    require("sy_routing", routing);
    const auto scores = elements<const float>("logits", logits, 2, SY_F32);
    switchyard::LayerSpec spec;
    // What route() does not look at must make sense, too.
    spec.hidden = spec.intermediate = 1;
    spec.num_experts = static_cast<int>(logits->shape[1]);
    spec.top_k = top_k;
    spec.routing = routing_of(*routing);
    switchyard::validate(spec);
    std::span<const float> bias;
    if (correction_bias != nullptr) {
      bias = elements<const float>("correction_bias", correction_bias, 1, SY_F32);
    }
    if (spec.routing.method == switchyard::RoutingMethod::kHash) {
      throw switchyard::Error(switchyard::ErrorCode::kUnsupported,
                              "hash routing needs a table; make a layer with a router");
    }
    const std::int64_t nans =
        switchyard::route(spec, scores, bias, {}, elements<std::int32_t>("ids", ids, 2, SY_I32),
                          elements<float>("weights", weights, 2, SY_F32));
    if (nan_logits != nullptr) *nan_logits = nans;
  });
}
