#include "c_api/specs.h"

#include <fmt/format.h>

#include <cstddef>

#include "c_api/structs.h"
#include "model/layer_problem.h"
#include "switchyard/error.h"

namespace switchyard::c_api {
namespace {

// The enumerations of both interfaces have the same numbers.
static_assert(SY_SILU == static_cast<int>(ActivationKind::kSilu));
static_assert(SY_GELU == static_cast<int>(ActivationKind::kGelu));
static_assert(SY_GELU_TANH == static_cast<int>(ActivationKind::kGeluTanh));
static_assert(SY_RELU == static_cast<int>(ActivationKind::kRelu));
static_assert(SY_RELU2 == static_cast<int>(ActivationKind::kRelu2));
static_assert(SY_IDENTITY == static_cast<int>(ActivationKind::kIdentity));
static_assert(SY_SITU == static_cast<int>(ActivationKind::kSitu));
static_assert(SY_TOP_K == static_cast<int>(RoutingMethod::kTopK));
static_assert(SY_SPARSE_MIXER == static_cast<int>(RoutingMethod::kSparseMixer));
static_assert(SY_HASH == static_cast<int>(RoutingMethod::kHash));
static_assert(SY_SOFTMAX == static_cast<int>(ScoreFunction::kSoftmax));
static_assert(SY_SIGMOID == static_cast<int>(ScoreFunction::kSigmoid));
static_assert(SY_SQRT_SOFTPLUS == static_cast<int>(ScoreFunction::kSqrtSoftplus));
static_assert(SY_GROUP_MAX == static_cast<int>(GroupScore::kMax));
static_assert(SY_GROUP_SUM_TOP_TWO == static_cast<int>(GroupScore::kSumTopTwo));
static_assert(SY_GATE_UP == static_cast<int>(GateOrder::kGateUp));
static_assert(SY_UP_GATE == static_cast<int>(GateOrder::kUpGate));
static_assert(SY_INTERLEAVED == static_cast<int>(GateOrder::kInterleaved));
static_assert(SY_ROWS_PACKED == static_cast<int>(RowLayout::Kind::kPacked));
static_assert(SY_ROWS_BLOCKED == static_cast<int>(RowLayout::Kind::kBlocked));
static_assert(SY_ROWS_PADDED == static_cast<int>(RowLayout::Kind::kPadded));

template <typename Enum>
Enum checked(const char* name, int value, Enum last) {
  if (value < 0 || value > static_cast<int>(last)) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is {}; it is a number from 0 to {}",
                                                         name, value, static_cast<int>(last)));
  }
  return static_cast<Enum>(value);
}

}  // namespace

RoutingSpec routing_of(const sy_routing& pointed) {
  const sy_routing given = read_struct("sy_routing", &pointed);
  RoutingSpec routing;
  routing.method = checked("routing.method", given.method, RoutingMethod::kHash);
  routing.score = checked("routing.score", given.score, ScoreFunction::kSqrtSoftplus);
  routing.top_k_before_score = given.top_k_before_score != 0;
  routing.renormalize = given.renormalize != 0;
  routing.renormalize_epsilon = given.renormalize_epsilon;
  routing.has_correction_bias = given.has_correction_bias != 0;
  routing.num_groups = given.num_groups;
  routing.top_k_groups = given.top_k_groups;
  routing.group_score = checked("routing.group_score", given.group_score, GroupScore::kSumTopTwo);
  routing.scale = given.scale;
  routing.jitter_eps = given.jitter_eps;
  return routing;
}

Activation activation_of(const sy_activation& given) {
  Activation activation;
  activation.kind = checked("activation.kind", given.kind, ActivationKind::kSitu);
  activation.gated = given.gated != 0;
  activation.alpha = given.alpha;
  activation.limit = given.limit;
  activation.up_bias = given.up_bias;
  return activation;
}

GateOrder order_of(sy_gate_order given) { return checked("order", given, GateOrder::kInterleaved); }

RowLayout layout_of(const sy_row_layout& given) {
  return {checked("layout.kind", given.kind, RowLayout::Kind::kPadded), given.size};
}

LayerSpec spec_of(const sy_layer_spec& pointed) {
  const sy_layer_spec given = read_struct("sy_layer_spec", &pointed);
  LayerSpec spec;
  spec.hidden = given.hidden;
  spec.intermediate = given.intermediate;
  spec.num_experts = given.num_experts;
  spec.top_k = given.top_k;
  spec.router_bias = given.router_bias != 0;
  spec.expert_bias = given.expert_bias != 0;
  spec.shared_intermediate = given.shared_intermediate;
  spec.shared_sigmoid_gate = given.shared_sigmoid_gate != 0;
  spec.weight_on_input = given.weight_on_input != 0;
  spec.capacity_factor = given.capacity_factor;
  spec.capacity_rule = checked("capacity_rule", given.capacity_rule, CapacityRule::kTokens);
  spec.activation = activation_of(given.activation);
  if (given.routing != nullptr) spec.routing = routing_of(*given.routing);
  require_valid(spec);
  return spec;
}

void require_valid(const LayerSpec& spec) {
  const std::string problem = layer_problem(spec);
  if (!problem.empty()) throw Error(ErrorCode::kInvalidArgument, problem);
}

std::vector<LayerSpec> specs_of(const sy_layer_spec* specs, std::int32_t count) {
  std::vector<LayerSpec> result;
  if (count <= 0) return result;
  check_size("sy_layer_spec", specs);
  const std::uint32_t size = specs->struct_size;
  const auto* at = reinterpret_cast<const std::byte*>(specs);
  for (std::int32_t i = 0; i < count; ++i, at += size) {
    const auto* spec = reinterpret_cast<const sy_layer_spec*>(at);
    if (size % alignof(sy_layer_spec) != 0 || spec->struct_size != size) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("specs[{}].struct_size is {}, and specs[0].struct_size {}; set all to "
                      "sizeof(sy_layer_spec)",
                      i, spec->struct_size, size));
    }
    result.push_back(spec_of(*spec));
  }
  return result;
}

Backend backend_of(sy_device_type given) {
  if (given == SY_CPU) return Backend::kCpu;
  if (given == SY_CUDA) return Backend::kCuda;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("backend is {}; use SY_CPU ({}) or SY_CUDA ({})", given, +SY_CPU, +SY_CUDA));
}

sy_activation to_c(const Activation& activation) {
  return {static_cast<sy_activation_kind>(activation.kind),
          activation.gated ? 1 : 0,
          activation.alpha,
          activation.limit,
          activation.up_bias,
          0};
}

}  // namespace switchyard::c_api
