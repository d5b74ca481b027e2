#include "layer/agreement.h"

#include <fmt/core.h>

#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fabric/hash.h"
#include "switchyard/error.h"

namespace switchyard {

namespace {

static_assert(std::is_trivially_copyable_v<Declaration>, "it travels as its bytes");

const char* name_of(RoutingMethod method) {
  switch (method) {
    case RoutingMethod::kTopK:
      return "top-k";
    case RoutingMethod::kSparseMixer:
      return "sparse mixer";
    case RoutingMethod::kHash:
      return "hash";
  }
  return "unknown";
}

const char* name_of(GroupScore score) {
  switch (score) {
    case GroupScore::kMax:
      return "max";
    case GroupScore::kSumTopTwo:
      return "sum of two";
  }
  return "unknown";
}

const char* name_of(CapacityRule rule) {
  switch (rule) {
    case CapacityRule::kSlots:
      return "of slots";
    case CapacityRule::kTokens:
      return "of tokens";
  }
  return "unknown";
}

// A field's value as a user knows it.
template <typename T>
auto shown(const T& value) {
  if constexpr (std::is_same_v<T, DType>) {
    return to_string(value);
  } else if constexpr (std::is_enum_v<T>) {
    return name_of(value);
  } else {
    return value;
  }
}

// The first field in which two declarations differ, as "name: a here, b there"; empty if none.
std::string difference(const Declaration& here, const Declaration& there) {
  std::string found;
  const auto compare = [&found](const char* name, const auto& a, const auto& b) {
    if (!found.empty() || a == b) return;
    found = fmt::format("{}: {} here, {} there", name, shown(a), shown(b));
  };
#define SWITCHYARD_COMPARE(field) compare(#field, here.field, there.field)
  SWITCHYARD_COMPARE(spec.hidden);
  SWITCHYARD_COMPARE(spec.intermediate);
  SWITCHYARD_COMPARE(spec.num_experts);
  SWITCHYARD_COMPARE(spec.top_k);
  // The kind and whether it is gated, e.g. "swiglu".
  compare("spec.activation", std::string_view(name_of(here.spec.activation)),
          std::string_view(name_of(there.spec.activation)));
  SWITCHYARD_COMPARE(spec.activation.alpha);
  SWITCHYARD_COMPARE(spec.activation.limit);
  SWITCHYARD_COMPARE(spec.activation.up_bias);
  SWITCHYARD_COMPARE(spec.routing.method);
  SWITCHYARD_COMPARE(spec.routing.score);
  SWITCHYARD_COMPARE(spec.routing.top_k_before_score);
  SWITCHYARD_COMPARE(spec.routing.renormalize);
  SWITCHYARD_COMPARE(spec.routing.renormalize_epsilon);
  SWITCHYARD_COMPARE(spec.routing.has_correction_bias);
  SWITCHYARD_COMPARE(spec.routing.num_groups);
  SWITCHYARD_COMPARE(spec.routing.top_k_groups);
  SWITCHYARD_COMPARE(spec.routing.group_score);
  SWITCHYARD_COMPARE(spec.routing.scale);
  SWITCHYARD_COMPARE(spec.routing.jitter_eps);
  SWITCHYARD_COMPARE(spec.router_bias);
  SWITCHYARD_COMPARE(spec.expert_bias);
  SWITCHYARD_COMPARE(spec.shared_intermediate);
  SWITCHYARD_COMPARE(spec.shared_sigmoid_gate);
  SWITCHYARD_COMPARE(spec.weight_on_input);
  SWITCHYARD_COMPARE(spec.capacity_factor);
  SWITCHYARD_COMPARE(spec.capacity_rule);
  SWITCHYARD_COMPARE(max_tokens);
  SWITCHYARD_COMPARE(compute);
  SWITCHYARD_COMPARE(pre_sum_per_host);
  if (found.empty() && here.placement != there.placement) {
    found = "placement: another table of experts here than there";
  }
#undef SWITCHYARD_COMPARE
  return found;
}

}  // namespace

std::uint64_t summary_of(const ExpertPlacement& placement) {
  if (placement.expert_at.empty()) return 0;
  return fnv1a(kFnvBasis,
               std::string_view(reinterpret_cast<const char*>(placement.expert_at.data()),
                                placement.expert_at.size() * sizeof(placement.expert_at[0]))) |
         1;
}

void agree_on_placement(Fabric& fabric, const ExpertPlacement& mine) {
  const std::vector<std::uint64_t> all = gather(fabric, summary_of(mine));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == summary_of(mine)) continue;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("rank {} and rank {} disagree on the placement of experts; give every "
                            "rank the same table",
                            fabric.rank(), r));
  }
}

void agree(Fabric& fabric, const Declaration& mine) {
  const std::vector<Declaration> all = gather(fabric, mine);
  for (int r = 0; r < fabric.size(); ++r) {
    const std::string found = difference(mine, all[static_cast<std::size_t>(r)]);
    if (!found.empty()) {
      throw Error(ErrorCode::kSpecMismatch,
                  fmt::format("rank {} and rank {} disagree on {}; give every rank the same layer "
                              "and limits",
                              fabric.rank(), r, found));
    }
  }
}

}  // namespace switchyard
