// A gate whose own choice has a wanted balancedness.
//
// Column 0 of the router holds each expert's popularity: 1/2 for top_k of them, drawn by seed, then
// 1/2 - 1, 1/2 - 2, ... Column 0 of the activations holds one number, the skew, in every row. Thus
//   logit[t][e] = (the other columns' product, about N(0, 1)) + skew * popularity[e]:
// skew 0 leaves the routing uniform, a large one sends every token to the same top_k experts, and
// the gate computes all of it itself. The skew for a given balancedness is found by bisection over
// the tokens' real routing. One router serves all batches, because only the activations change.
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

  // The skew that brings the first `tokens` tokens nearest to `beta`. It is 0 if they are no more
  // balanced without skew. Below lowest_balancedness() that is the nearest.
  float skew_for(std::int64_t tokens, double beta) const;

  // How often each expert is chosen by (at most kSampleTokens of) the first `tokens` tokens, by the
  // host's route() over fp32 logits.
  std::vector<std::int64_t> histogram(std::int64_t tokens, float skew) const;

  // The first `tokens` rows, column 0 set. Valid until the next call.
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
