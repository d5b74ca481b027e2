#include <fmt/core.h>

#include "base/plural.h"
#include "base/printable.h"
#include "switchyard/routing.h"
#include "switchyard/tuner.h"

namespace switchyard::tuner {

std::vector<std::int64_t> draw_counts(Generator generator, int tokens, int num_experts, int top_k,
                                      double beta, std::uint64_t seed) {
  if (top_k < 1 || top_k > num_experts || tokens < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} cannot choose {} of {}; use 0 tokens or more, and a "
                            "top_k from 1 to the experts",
                            plural(tokens, "token"), top_k, plural(num_experts, "expert")));
  }
  // Draws with repetition are those of tokens that choose one expert each.
  const bool distinct = generator == Generator::kDistinct;
  const SyntheticRouting routing = synthetic_routing(distinct ? tokens : tokens * top_k,
                                                     num_experts, distinct ? top_k : 1, beta, seed);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
  for (const std::int32_t expert : routing.ids) ++counts[static_cast<std::size_t>(expert)];
  return counts;
}

}  // namespace switchyard::tuner
