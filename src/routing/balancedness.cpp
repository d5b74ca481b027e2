#include <cmath>

#include "switchyard/routing.h"

namespace switchyard {

double balancedness(std::span<const std::int64_t> tokens_per_expert) {
  double total = 0;
  for (std::int64_t count : tokens_per_expert) total += static_cast<double>(count);
  if (total == 0 || tokens_per_expert.size() <= 1) return 1;
  double entropy = 0;
  for (std::int64_t count : tokens_per_expert) {
    if (count == 0) continue;
    const double share = static_cast<double>(count) / total;
    entropy -= share * std::log(share);
  }
  return entropy / std::log(static_cast<double>(tokens_per_expert.size()));
}

double lowest_balancedness(int num_experts, int top_k) {
  if (num_experts <= 1) return 1;
  return std::log(static_cast<double>(top_k)) / std::log(static_cast<double>(num_experts));
}

}  // namespace switchyard
