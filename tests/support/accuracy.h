// The accuracy that the outputs of both engines must have, against the fp64 reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "reference/reference.h"
#include "support/layers.h"

namespace switchyard::testing {

// Rows of the token-id table of hash-routed layers.
inline constexpr int kVocabulary = 50;

inline Batch random_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype,
                          std::uint64_t seed) {
  Batch batch{Matrix::random(tokens, spec.hidden, dtype, seed), {}, {}, {}};
  if (spec.routing.method == RoutingMethod::kHash) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      batch.token_ids.push_back(static_cast<std::int32_t>((t * 7 + 3) % kVocabulary));
    }
  }
  return batch;
}

inline MoeWeights make_weights(const LayerSpec& spec, DType dtype, std::uint64_t seed = 3,
                               int num_threads = 0) {
  GenerateOptions options;
  options.vocabulary = kVocabulary;
  options.num_threads = num_threads;
  return generate_weights(spec, dtype, seed, options);
}

// Engine routing against fp64 routing: equal ids wherever fp32 logits can decide, and close
// weights.
inline void expect_same_routing(const LayerSpec& spec, const MoeWeights& weights,
                                const Batch& batch, const BatchResult& result) {
  reference::ReferenceInput input;
  input.activations = batch.x.view();
  input.token_ids = batch.token_ids;
  const auto expected = reference::forward(spec, weights, input);
  const auto logits = reference::router_logits(spec, weights, batch.x.view());
  std::vector<float> bias;
  for (std::int64_t e = 0; e < weights.correction_bias.size; ++e) {
    bias.push_back(static_cast<const float*>(weights.correction_bias.data)[e]);
  }
  const bool hashed = spec.routing.method == RoutingMethod::kHash;
  const std::vector<double> margins =
      hashed ? std::vector<double>(static_cast<std::size_t>(batch.x.rows()), 1.0)
             : reference::routing_margin(spec, logits, bias);
  std::int64_t undecided = 0;
  const auto k = static_cast<std::size_t>(spec.top_k);
  for (std::size_t t = 0; t < margins.size(); ++t) {
    if (margins[t] < 1e-5) {
      ++undecided;
      continue;
    }
    for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
      ASSERT_EQ(result.ids[i], expected.ids[i]) << "token " << t << " margin " << margins[t];
      ASSERT_NEAR(result.weights[i], expected.weights[i],
                  1e-5 * std::abs(expected.weights[i]) + 1e-6)
          << "token " << t;
    }
  }
  EXPECT_LE(undecided, 2 + static_cast<std::int64_t>(margins.size()) / 50);
}

// The output against fp64, with the routing that the engine used. The yardstick is the error of a
// straightforward program. `quantised`: the layer computes in FP8, the problem is the quantised
// one, and so is what the program solves; else the program computes in bf16.
inline double output_error(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                           const BatchResult& result, double* yardstick = nullptr,
                           bool quantised = false) {
  reference::ReferenceInput input;
  input.quantised = quantised;
  input.activations = batch.x.view();
  input.topk_ids = result.ids;
  input.topk_weights = result.weights;
  const auto expected = reference::forward(spec, weights, input);
  if (yardstick != nullptr) {
    const auto straightforward =
        quantised ? reference::straightforward_fp8 : reference::straightforward_bf16;
    *yardstick = reference::relative_error(straightforward(spec, weights, input), expected.output);
  }
  return reference::relative_error(result.output.floats(), expected.output);
}

// The output's error against fp64 must be below twice a plain bf16 program's, with the routing that
// the engine used.
inline void expect_accurate(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                            const BatchResult& result) {
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick);
  EXPECT_LE(error, 2 * yardstick);
  EXPECT_GT(yardstick, 1e-4);  // or the comparison means nothing
}

// How far an FP8 layer's output is from that of the straightforward program: bits in the last
// place, where both round the same values. A bound of half the yardstick notices what twice the
// yardstick cannot, a layer that does not quantise h: it is three times as far or more.
inline double distance_to_fp8_program(const LayerSpec& spec, const MoeWeights& weights,
                                      const Batch& batch, const BatchResult& result) {
  reference::ReferenceInput input;
  input.activations = batch.x.view();
  input.topk_ids = result.ids;
  input.topk_weights = result.weights;
  const std::vector<float> program = reference::straightforward_fp8(spec, weights, input);
  return reference::relative_error(result.output.floats(),
                                   std::vector<double>(program.begin(), program.end()));
}

}  // namespace switchyard::testing
