// Turns router logits into expert ids and weights, on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/layer_spec.h"

namespace switchyard {

// The id that means "no expert": the slot is skipped and contributes nothing.
inline constexpr std::int32_t kNoExpert = -1;

// Chooses K experts and their weights for each of T tokens.
//   logits           [T, E] fp32, router bias already added
//   correction_bias  [E] fp32, or empty if the spec has none
//   hashed_ids       [T, K], RoutingMethod::kHash only: the table's rows for these tokens;
//                    else empty
//   ids, weights     [T, K], out: in descending order of the quantity chosen by; ties go to
//                    the lower expert index
//
// A NaN logit ranks below every number and its expert is never chosen: a slot for which no expert
// is left gets kNoExpert and weight 0. A NaN never spreads to the token's other experts. Returns
// the number of NaN logits seen. Throws Error{kInvalidArgument} if a span's size does not match, or
// a hashed id is out of range.
std::int64_t route(const LayerSpec& spec, std::span<const float> logits,
                   std::span<const float> correction_bias, std::span<const std::int32_t> hashed_ids,
                   std::span<std::int32_t> ids, std::span<float> weights);

// beta = H(c) / ln E: the entropy of the expert histogram over its maximum, in [0, 1]; 1 is
// uniform. (RaMP, arXiv 2604.26039, section II-A.) 1 if nothing was routed or E == 1.
double balancedness(std::span<const std::int64_t> tokens_per_expert);

// The lowest beta that top-k routing can reach, since a token's experts are distinct: ln K / ln E.
double lowest_balancedness(int num_experts, int top_k);

// Routing drawn at random so that the histogram's expected balancedness is `beta` (clamped to
// lowest_balancedness): experts get popularities p_e ~ exp(-lambda * rank(e)), ranks shuffled by
// seed, lambda found by bisection; each token draws K distinct experts. The weights are uniform in
// [0.5, 1.5] / K. Deterministic in (arguments, seed), on every platform.
struct SyntheticRouting {
  std::vector<std::int32_t> ids{};  // [T, K]
  std::vector<float> weights{};     // [T, K]
};
SyntheticRouting synthetic_routing(int num_tokens, int num_experts, int top_k, double beta,
                                   std::uint64_t seed);

}  // namespace switchyard
