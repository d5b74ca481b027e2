#include "support/accuracy.h"

namespace switchyard::testing {

Batch random_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype, std::uint64_t seed) {
  Batch batch{Matrix::random(tokens, spec.hidden, dtype, seed), {}, {}, {}};
  if (spec.routing.method == RoutingMethod::kHash) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      batch.token_ids.push_back(static_cast<std::int32_t>((t * 7 + 3) % kVocabulary));
    }
  }
  return batch;
}

MoeWeights make_weights(const LayerSpec& spec, DType dtype, std::uint64_t seed, int num_threads) {
  GenerateOptions options;
  options.vocabulary = kVocabulary;
  options.num_threads = num_threads;
  return generate_weights(spec, dtype, seed, options);
}

void expect_same_routing(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                         const BatchResult& result) {
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

reference::ReferenceInput problem_of(const Batch& batch, std::span<const std::int32_t> ids,
                                     std::span<const float> weights, bool quantised,
                                     std::int64_t scale_columns) {
  reference::ReferenceInput input;
  input.activations = batch.x.view();
  input.topk_ids = ids;
  input.topk_weights = weights;
  input.quantised = quantised;
  input.scale_columns = scale_columns;
  return input;
}

double output_error(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                    const BatchResult& result, double* yardstick, bool quantised,
                    std::int64_t scale_columns) {
  const auto input = problem_of(batch, result.ids, result.weights, quantised, scale_columns);
  const auto expected = reference::forward(spec, weights, input);
  if (yardstick != nullptr) {
    const auto straightforward =
        quantised ? reference::straightforward_fp8 : reference::straightforward_bf16;
    *yardstick = reference::relative_error(straightforward(spec, weights, input), expected.output);
  }
  return reference::relative_error(result.output.floats(), expected.output);
}

void expect_accurate(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                     const BatchResult& result) {
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick);
  EXPECT_LE(error, 2 * yardstick);
  EXPECT_GT(yardstick, 1e-4);  // or the comparison means nothing
}

void expect_same_bits(const LayerSpec& spec, const MoeWeights& weights, DType dtype,
                      const OnRanks& on) {
  const Batch batch = random_batch(spec, on.tokens, dtype, 5);
  const BatchResult first = run_batch(spec, weights, batch, Shares::even(on.tokens, 1), dtype);
  for (const int ranks : on.ranks) {
    for (const int threads : {1, 3}) {
      const BatchResult again = run_batch(spec, weights, batch, Shares::even(on.tokens, ranks),
                                          dtype, {.cpu = {.num_threads = threads}});
      EXPECT_TRUE(again.output == first.output)
          << ranks << " ranks, " << threads << " threads, " << to_string(dtype);
    }
  }
}

double distance_to_fp8_program(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                               const BatchResult& result, std::int64_t scale_columns) {
  const auto input = problem_of(batch, result.ids, result.weights, false, scale_columns);
  const std::vector<float> program = reference::straightforward_fp8(spec, weights, input);
  return reference::relative_error(result.output.floats(),
                                   std::vector<double>(program.begin(), program.end()));
}

}  // namespace switchyard::testing
