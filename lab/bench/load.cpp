#include "bench/load.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard::bench {

Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks) {
  const protocol::ExpertPartition experts{spec.num_experts, ranks};
  const double flops_per_width = 2.0 * (spec.activation.gated ? 3 : 2) * spec.hidden;
  Load most;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> own(tokens_per_expert.size());
    const auto first = tokens_per_expert.begin() + experts.begin(rank);
    std::copy(first, first + experts.count(rank), own.begin() + experts.begin(rank));
    const auto rows = static_cast<double>(std::accumulate(own.begin(), own.end(), std::int64_t{0}));
    const double shared = static_cast<double>(tokens_per_rank) * spec.shared_intermediate;
    most.flops = std::max(most.flops, flops_per_width * (rows * spec.intermediate + shared));
    most.touched_bytes = std::max(most.touched_bytes, touched_weight_bytes(weights, own));
  }
  return most;
}

std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert) {
  constexpr std::size_t kMost = 64;
  const auto sum = std::accumulate(tokens_per_expert.begin(), tokens_per_expert.end(), 0.0);
  if (sum == 0) return {};
  std::sort(tokens_per_expert.begin(), tokens_per_expert.end());
  const double mean = sum / static_cast<double>(tokens_per_expert.size());
  const std::size_t last = tokens_per_expert.size() - 1;
  const std::size_t count = std::min(tokens_per_expert.size(), kMost);
  std::vector<double> quantiles;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = count == 1 ? last : (i * last + (count - 1) / 2) / (count - 1);
    quantiles.push_back(static_cast<double>(tokens_per_expert[at]) / mean);
  }
  return quantiles;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "a percentile of no values; measure at least once");
  }
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = static_cast<std::ptrdiff_t>(std::lround(share * last));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

}  // namespace switchyard::bench
