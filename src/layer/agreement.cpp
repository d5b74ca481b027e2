#include "layer/agreement.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/agreement.h"
#include "fabric/collective.h"
#include "fabric/hash.h"
#include "layer/compute.h"

namespace switchyard {

namespace {

const char* name_of(RoutingMethod method) {
  switch (method) {
    case RoutingMethod::kTopK: return "top-k";
    case RoutingMethod::kSparseMixer: return "sparse mixer";
    case RoutingMethod::kHash: return "hash";
  }
  return "unknown";
}

const char* name_of(GroupScore score) {
  switch (score) {
    case GroupScore::kMax: return "max";
    case GroupScore::kSumTopTwo: return "sum of two";
  }
  return "unknown";
}

const char* name_of(CapacityRule rule) {
  switch (rule) {
    case CapacityRule::kSlots: return "of slots";
    case CapacityRule::kTokens: return "of tokens";
  }
  return "unknown";
}

// Collective. A rank without a type has that of the first rank with one.
std::optional<DType> mine_or_first(Fabric& fabric, std::optional<DType> mine) {
  constexpr std::int32_t kUnknown = -1;
  const std::vector<std::int32_t> all =
      gather(fabric, mine ? static_cast<std::int32_t>(*mine) : kUnknown);
  if (mine) return mine;
  const auto known = std::ranges::find_if(all, [](std::int32_t type) { return type != kUnknown; });
  return known == all.end() ? std::nullopt : std::optional(static_cast<DType>(*known));
}

}  // namespace

DType agree_on_compute(Fabric& fabric, const MoeWeights& weights, std::optional<DType> asked) {
  std::optional<DType> mine;
  attempt_together(fabric, [&] {
    if (asked || type_of_routed(weights)) mine = resolve_compute(weights, asked);
  });
  const std::optional<DType> known = mine_or_first(fabric, mine);
  // (Where no rank knows, all refuse.)
  return known ? *known : resolve_compute(weights, asked);
}

void keep_agreed_compute(const World& world, const LayerSpec& spec, DType agreed,
                         LayerOptions& options) {
  const int places = options.placement.num_places(spec.num_experts);
  const ExpertRange own = own_experts(places, world.rank(), world.size());
  if (own.begin == own.end) options.compute = agreed;
}

std::optional<DType> agree_on_routed_type(Fabric& fabric, const MoeWeights& weights) {
  return mine_or_first(fabric, type_of_routed(weights));
}

std::uint64_t summary_of(const ExpertPlacement& placement) {
  if (placement.expert_at.empty()) return 0;
  return fnv1a(kFnvBasis,
               std::string_view(reinterpret_cast<const char*>(placement.expert_at.data()),
                                placement.expert_at.size() * sizeof(placement.expert_at[0]))) |
         1;
}

std::string table_of(std::uint64_t summary) {
  return summary == 0 ? "none" : fmt::format("table {:016x}", summary);
}

void agree_on_placement(Fabric& fabric, const ExpertPlacement& mine) {
  agree(fabric, {{"the placement of experts", table_of(summary_of(mine))}},
        "give every rank the same table");
}

void agree(Fabric& fabric, const Declaration& mine) {
  agree(fabric,
        {{"spec.hidden", mine.spec.hidden},
         {"spec.intermediate", mine.spec.intermediate},
         {"spec.num_experts", mine.spec.num_experts},
         {"spec.top_k", mine.spec.top_k},
         // The kind and whether it is gated, e.g. "swiglu".
         {"spec.activation", name_of(mine.spec.activation)},
         {"spec.activation.alpha", mine.spec.activation.alpha},
         {"spec.activation.limit", mine.spec.activation.limit},
         {"spec.activation.up_bias", mine.spec.activation.up_bias},
         {"spec.routing.method", name_of(mine.spec.routing.method)},
         {"spec.routing.score", name_of(mine.spec.routing.score)},
         {"spec.routing.top_k_before_score", mine.spec.routing.top_k_before_score},
         {"spec.routing.renormalize", mine.spec.routing.renormalize},
         {"spec.routing.renormalize_epsilon", mine.spec.routing.renormalize_epsilon},
         {"spec.routing.has_correction_bias", mine.spec.routing.has_correction_bias},
         {"spec.routing.num_groups", mine.spec.routing.num_groups},
         {"spec.routing.top_k_groups", mine.spec.routing.top_k_groups},
         {"spec.routing.group_score", name_of(mine.spec.routing.group_score)},
         {"spec.routing.scale", mine.spec.routing.scale},
         {"spec.routing.jitter_eps", mine.spec.routing.jitter_eps},
         {"spec.router_bias", mine.spec.router_bias},
         {"spec.expert_bias", mine.spec.expert_bias},
         {"spec.shared_intermediate", mine.spec.shared_intermediate},
         {"spec.shared_sigmoid_gate", mine.spec.shared_sigmoid_gate},
         {"spec.weight_on_input", mine.spec.weight_on_input},
         {"spec.capacity_factor", mine.spec.capacity_factor},
         {"spec.capacity_rule", name_of(mine.spec.capacity_rule)},
         {"max_tokens", mine.max_tokens},
         {"compute", to_string(mine.compute)},
         {"weights", to_string(mine.weights)},
         {"pre_sum_per_host", mine.pre_sum_per_host},
         {"placement", table_of(mine.placement)}},
        "give every rank the same layer and limits");
}

}  // namespace switchyard
