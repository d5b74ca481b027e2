// Makes a router and activations for which a layer's own gate reaches a wanted balancedness.
//
// Column 0 of the router holds each expert's popularity. It is 1/2 for top_k experts, which the
// seed chooses, and 1/2 - 1, 1/2 - 2, ... for the others. Column 0 of the activations holds one
// number, the skew, in every row. Thus
//   logit[t][e] = (the other columns' product, about N(0, 1)) + skew * popularity[e]
// A skew of 0 leaves the routing uniform. A large skew sends every token to the same top_k experts.
// Bisection over the tokens' real routing finds the skew for a given balancedness. One router
// serves all batches, because only the activations change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/weights.h"

namespace switchyard::bench {

class SkewedGate {
 public:
  // Replaces weights.router by a copy with popularities, and draws activations of `max_tokens`
  // tokens in bf16 or f32. Throws Error{kInvalidArgument} for other types.
  SkewedGate(const LayerSpec& spec, MoeWeights& weights, std::int64_t max_tokens, DType dtype,
             std::uint64_t seed);

  // Returns the skew that brings the first `tokens` tokens nearest to `beta`. It is 0 if the tokens
  // are no more balanced than `beta` even without skew. No routing is below lowest_balancedness(),
  // so a lower `beta` counts as that.
  float skew_for(std::int64_t tokens, double beta) const;

  // Returns how often each expert is chosen by the first `tokens` tokens, or by kSampleTokens of
  // them if they are more. The host's route() chooses, from fp32 logits.
  std::vector<std::int64_t> histogram(std::int64_t tokens, float skew) const;

  // Returns the first `tokens` rows, with `skew` in column 0. They are valid until the next call.
  MatrixView activations(std::int64_t tokens, float skew);

  static constexpr std::int64_t kSampleTokens = 2048;

 private:
  LayerSpec spec_;
  DType dtype_;
  std::int64_t max_tokens_;
  std::int64_t sample_;
  std::vector<std::byte> activations_;  // [max_tokens, H]
  std::vector<float> popularity_;       // [E], as the router's dtype holds them
  std::vector<float> logits_;           // [sample, E], at skew 0
  std::vector<float> correction_bias_;  // [E] or empty
};

}  // namespace switchyard::bench
