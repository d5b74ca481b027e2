#include "switchyard/layer_spec.h"

#include <fmt/core.h>

#include <charconv>
#include <cmath>

#include "model/layer_problem.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// Limits far above any model, and low enough that a product of three of them fits in 64 bits.
constexpr int kMaxHidden = 1 << 20;
constexpr int kMaxIntermediate = 1 << 22;
constexpr int kMaxExperts = 1 << 16;

// An exception that never leaves this file.
struct Problem {
  std::string text;
};

template <class Value>
[[noreturn]] void reject(const char* field, Value value, const std::string& remedy) {
  throw Problem{fmt::format("{} is {}: {}", field, value, remedy)};
}

void require_range(const char* field, int value, int low, int high) {
  if (value < low || value > high)
    reject(field, value, fmt::format("set it to a value in [{}, {}]", low, high));
}

void validate_activation(const Activation& activation) {
  if (activation.kind > ActivationKind::kSitu)
    reject("activation.kind", static_cast<int>(activation.kind), "use a named ActivationKind");
  if (!std::isfinite(activation.alpha) || activation.alpha <= 0)
    reject("activation.alpha", activation.alpha, "set it to a finite value above 0 (usually 1)");
  if (activation.alpha != 1.0f && activation.kind != ActivationKind::kSilu &&
      activation.kind != ActivationKind::kSitu)
    reject("activation.alpha", activation.alpha, "only silu and situ have an alpha; leave it at 1");
  // (Kernels multiply by the reciprocals of both.)
  constexpr float kLeastBend = 1e-30f, kMostBend = 1e30f;
  const auto bends = [](float bound) { return bound >= kLeastBend && bound <= kMostBend; };
  if (activation.kind == ActivationKind::kSitu && !bends(activation.alpha))
    reject("activation.alpha", activation.alpha, "situ takes 1e-30 to 1e30 (Kimi-K3: 4)");
  if (activation.kind == ActivationKind::kSitu && std::isfinite(activation.limit) &&
      !bends(activation.limit))
    reject("activation.limit", activation.limit,
           "situ takes 1e-30 to 1e30 (Kimi-K3: 25), or infinity for none");
  if (activation.kind == ActivationKind::kSitu && !activation.gated)
    reject("activation.gated", activation.gated, "situ is of gated FFNs; set it to true");
  if (!(activation.limit > 0))
    reject("activation.limit", activation.limit, "set it above 0, or to infinity for no clamp");
  if (!std::isfinite(activation.up_bias))
    reject("activation.up_bias", activation.up_bias, "set it to a finite value");
  if (!activation.gated && std::isfinite(activation.limit))
    reject("activation.limit", activation.limit, "a plain FFN has no clamp; leave it infinite");
  if (!activation.gated && activation.up_bias != 0)
    reject("activation.up_bias", activation.up_bias, "a plain FFN has none; leave it at 0");
}

void validate_routing(const LayerSpec& spec) {
  const RoutingSpec& routing = spec.routing;
  if (routing.method > RoutingMethod::kHash)
    reject("routing.method", static_cast<int>(routing.method), "use a named RoutingMethod");
  if (routing.score > ScoreFunction::kSqrtSoftplus)
    reject("routing.score", static_cast<int>(routing.score), "use a named ScoreFunction");
  if (routing.group_score > GroupScore::kSumTopTwo)
    reject("routing.group_score", static_cast<int>(routing.group_score), "use a named GroupScore");
  if (!std::isfinite(routing.renormalize_epsilon) || routing.renormalize_epsilon < 0)
    reject("routing.renormalize_epsilon", routing.renormalize_epsilon,
           "set it to a finite value of at least 0");
  if (!std::isfinite(routing.scale) || routing.scale <= 0)
    reject("routing.scale", routing.scale, "set it to a finite value above 0 (usually 1)");
  require_range("routing.num_groups", routing.num_groups, 1, spec.num_experts);
  if (spec.num_experts % routing.num_groups != 0)
    reject("routing.num_groups", routing.num_groups,
           fmt::format("it must divide num_experts = {}", spec.num_experts));
  require_range("routing.top_k_groups", routing.top_k_groups, 1, routing.num_groups);
  const int experts_per_group = spec.num_experts / routing.num_groups;
  if (spec.top_k > routing.top_k_groups * experts_per_group)
    reject("top_k", spec.top_k,
           fmt::format("the {} chosen groups of {} experts cannot supply as many; lower top_k or "
                       "raise routing.top_k_groups",
                       routing.top_k_groups, experts_per_group));
  if (routing.num_groups > 1 && routing.method != RoutingMethod::kTopK)
    reject("routing.num_groups", routing.num_groups, "only RoutingMethod::kTopK has groups; set 1");
  if (routing.num_groups > 1 && routing.group_score == GroupScore::kSumTopTwo &&
      experts_per_group < 2)
    reject("routing.num_groups", routing.num_groups,
           "GroupScore::kSumTopTwo needs two experts in each group; use fewer groups or kMax");
  if (routing.method == RoutingMethod::kSparseMixer) {
    if (spec.top_k != 2)
      reject("top_k", spec.top_k, "the sparse mixer is a top-2 rule; set it to 2");
    if (!std::isfinite(routing.jitter_eps) || routing.jitter_eps < 0)
      reject("routing.jitter_eps", routing.jitter_eps, "set it to a finite value of at least 0");
  }
}

void require_valid(const LayerSpec& spec) {
  require_range("hidden", spec.hidden, 1, kMaxHidden);
  require_range("intermediate", spec.intermediate, 1, kMaxIntermediate);
  require_range("num_experts", spec.num_experts, 1, kMaxExperts);
  require_range("top_k", spec.top_k, 1, spec.num_experts);
  validate_activation(spec.activation);
  validate_routing(spec);
  require_range("shared_intermediate", spec.shared_intermediate, 0, kMaxIntermediate);
  if (spec.shared_sigmoid_gate && spec.shared_intermediate == 0)
    reject("shared_sigmoid_gate", true,
           "there is no shared expert to gate; set shared_intermediate, or this to false");
  if (!std::isfinite(spec.capacity_factor) || spec.capacity_factor < 0)
    reject("capacity_factor", spec.capacity_factor,
           "set it to 0 (nothing is dropped) or to a finite value above 0");
  if (spec.capacity_rule != CapacityRule::kSlots && spec.capacity_rule != CapacityRule::kTokens)
    reject("capacity_rule", static_cast<int>(spec.capacity_rule),
           "use CapacityRule::kSlots (0) or kTokens (1)");
}

template <class Check>
std::string problem_of(Check check) {
  try {
    check();
  } catch (const Problem& problem) {
    return problem.text;
  }
  return {};
}

}  // namespace

std::string layer_problem(const LayerSpec& spec) {
  return problem_of([&] { require_valid(spec); });
}

std::string activation_problem(const Activation& activation) {
  return problem_of([&] { validate_activation(activation); });
}

void validate(const LayerSpec& spec) {
  const std::string problem = layer_problem(spec);
  if (!problem.empty()) throw Error(ErrorCode::kInvalidArgument, "LayerSpec::" + problem);
}

const char* name_of(const Activation& activation) {
  const bool gated = activation.gated;
  switch (activation.kind) {
    case ActivationKind::kSilu: return gated ? "swiglu" : "silu";
    case ActivationKind::kGelu: return gated ? "geglu" : "gelu";
    case ActivationKind::kGeluTanh: return gated ? "geglu (tanh)" : "gelu (tanh)";
    case ActivationKind::kRelu: return gated ? "reglu" : "relu";
    case ActivationKind::kRelu2: return gated ? "gated relu2" : "relu2";
    case ActivationKind::kIdentity: return gated ? "bilinear" : "linear";
    case ActivationKind::kSitu: return "situ";
  }
  return "unknown";
}

const char* name_of(ScoreFunction score) {
  switch (score) {
    case ScoreFunction::kSoftmax: return "softmax";
    case ScoreFunction::kSigmoid: return "sigmoid";
    case ScoreFunction::kSqrtSoftplus: return "sqrt-softplus";
  }
  return "unknown";
}

std::string describe(const LayerSpec& spec) {
  const RoutingSpec& routing = spec.routing;
  std::string line = fmt::format("H {}, I {}, {} experts, top-{}, ", spec.hidden, spec.intermediate,
                                 spec.num_experts, spec.top_k);
  switch (routing.method) {
    case RoutingMethod::kTopK:
      line += name_of(routing.score);
      if (routing.top_k_before_score) line += " over the top-k";
      break;
    case RoutingMethod::kSparseMixer:
      line += fmt::format("sparse mixer (eps {})", routing.jitter_eps);
      break;
    case RoutingMethod::kHash:
      line += fmt::format("hash-routed, {}", name_of(routing.score));
      break;
  }
  if (routing.renormalize) line += ", renormalised";
  if (routing.has_correction_bias) line += ", correction bias";
  if (routing.num_groups > 1)
    line += fmt::format(", groups {} -> {} by {}", routing.num_groups, routing.top_k_groups,
                        routing.group_score == GroupScore::kMax ? "max" : "top-2 sum");
  if (routing.scale != 1.0f) line += fmt::format(", scale {}", routing.scale);
  if (spec.router_bias) line += ", router bias";
  if (spec.weight_on_input) line += ", weight on input";
  line += fmt::format(", {}", name_of(spec.activation));
  if (spec.activation.alpha != 1.0f) line += fmt::format(", alpha {}", spec.activation.alpha);
  if (std::isfinite(spec.activation.limit))
    line += fmt::format(", clamp {}", spec.activation.limit);
  if (spec.activation.up_bias != 0) line += fmt::format(", up + {}", spec.activation.up_bias);
  if (spec.expert_bias) line += ", expert biases";
  if (spec.shared_intermediate > 0)
    line += fmt::format(", shared {}{}", spec.shared_intermediate,
                        spec.shared_sigmoid_gate ? " (sigmoid-gated)" : "");
  if (spec.capacity_factor > 0) {
    line += fmt::format(", capacity {}{}", spec.capacity_factor,
                        spec.capacity_rule == CapacityRule::kTokens ? " of T/E" : "");
  }
  return line;
}

namespace {

// The number that a caller means who wrote it in few decimals: 1.2 is a little more in fp32, and
// 1.2 times an even share of 10 slots would be 13.
double as_written(float value) {
  char text[32];
  const char* const end = std::to_chars(text, text + sizeof(text), value).ptr;
  double exact = value;
  std::from_chars(text, end, exact);
  return exact;
}

}  // namespace

std::uint32_t expert_capacity(const LayerSpec& spec, std::int64_t tokens) {
  if (spec.capacity_factor <= 0) return kNoCapacity;
  const int choices = spec.capacity_rule == CapacityRule::kSlots ? spec.top_k : 1;
  const double slots =
      as_written(spec.capacity_factor) * choices * static_cast<double>(tokens) / spec.num_experts;
  // (A product that should be whole may be off by some units in the last place.)
  const double capacity = std::ceil(slots * (1 - 1e-12));
  return capacity < static_cast<double>(kNoCapacity) ? static_cast<std::uint32_t>(capacity)
                                                     : kNoCapacity;
}

}  // namespace switchyard
