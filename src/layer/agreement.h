// The agreement of a layer's ranks, before any of them sends a byte.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fabric/fabric.h"
#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"
#include "switchyard/world.h"

namespace switchyard {

struct Declaration {
  LayerSpec spec;
  std::int32_t max_tokens;
  DType compute;
  // The summary of LayerOptions::placement; see summary_of().
  std::uint64_t placement = 0;
  bool pre_sum_per_host = false;
  // The type of the weights that the engine multiplies, where ranks with others would have other
  // kernels and layouts; else the same number on all ranks.
  DType weights{};
};

// A number that is the same for equal placements, and hardly ever for others; 0 for none.
std::uint64_t summary_of(const ExpertPlacement& placement);
// Messages name a table by this text.
std::string table_of(std::uint64_t summary);
// Collective. Like agree(), for placements only.
void agree_on_placement(Fabric& fabric, const ExpertPlacement& mine);

// Collective. As resolve_compute(); but a rank that was given no expert's weights takes the type of
// the first rank that was.
DType agree_on_compute(Fabric& fabric, const MoeWeights& weights, std::optional<DType> asked);
// For rebind(): a rank without experts has no weights that would say what to compute in, so its
// options keep what was agreed on.
void keep_agreed_compute(const World& world, const LayerSpec& spec, DType agreed,
                         LayerOptions& options);
// Collective. The type of the routed experts' weights, by the first rank that was given some; none
// if no rank was.
std::optional<DType> agree_on_routed_type(Fabric& fabric, const MoeWeights& weights);

// Collective. Throws Error{kSpecMismatch} naming the first rank and field that differ from this
// rank's, with both values.
void agree(Fabric& fabric, const Declaration& mine);

}  // namespace switchyard
