// Experts that are shared by host, for worlds whose hosts have equally many ranks: rows of tokens
// and sums go from the memory of one rank straight into that of another, host memory or a device's,
// and the exchange carries only their slots.
#pragma once

#include <memory>

#include "exchange/staged_experts.h"

namespace switchyard {

// Rank i of a host sends to rank i of every other.
bool can_put_rows(const StagedSite& site);
// Collective.
std::unique_ptr<StagedExperts> make_experts_by_rows(StagedSite& site, const MoeWeights& weights);

}  // namespace switchyard
