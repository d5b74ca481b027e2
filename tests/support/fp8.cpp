#include "support/fp8.h"

#include <algorithm>

namespace switchyard::testing {

LayerSpec grouped(LayerSpec spec) {
  spec.hidden = 320;
  spec.intermediate = 272;
  if (spec.shared_intermediate > 0) spec.shared_intermediate = 200;
  return spec;
}

Batch routed_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype) {
  Batch batch = random_batch(spec, tokens, dtype, 6);
  SyntheticRouting routing =
      synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, 0.9, 4);
  batch.topk_ids = std::move(routing.ids);
  batch.topk_weights = std::move(routing.weights);
  return batch;
}

namespace {

// A straightforward program's error with 64 tokens.
double yardstick_of_many(const LayerSpec& spec, const MoeWeights& weights,
                         std::int64_t scale_columns) {
  const Batch batch = routed_batch(spec, 64, DType::kBF16);
  const auto input = problem_of(batch, batch.topk_ids, batch.topk_weights, true, scale_columns);
  return reference::relative_error(reference::straightforward_fp8(spec, weights, input),
                                   reference::forward(spec, weights, input).output);
}

}  // namespace

double expect_accurate_fp8(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                           const BatchResult& result, double closeness,
                           std::int64_t scale_columns) {
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick, true, scale_columns);
  // Few codes of h: how many of them the program rounds otherwise than fp64 does is a matter of
  // chance, and so is its error.
  if (scale_columns == reference::kWholeRow &&
      batch.x.rows() * spec.top_k * spec.intermediate < 9000) {
    yardstick = std::max(yardstick, yardstick_of_many(spec, weights, scale_columns));
  }
  EXPECT_LE(error, 2 * yardstick);
  EXPECT_GT(yardstick, 1e-4);  // or the comparison means nothing
  EXPECT_LT(yardstick, 0.1);
  const double distance = distance_to_fp8_program(spec, weights, batch, result, scale_columns);
  EXPECT_LE(distance, closeness * yardstick);
  ::testing::Test::RecordProperty(
      "error_and_yardstick",
      std::to_string(error) + ", " + std::to_string(yardstick) + ", " + std::to_string(distance));
  return distance / yardstick;
}

void for_each_matrix(MoeWeights& weights, const std::function<void(MatrixView&)>& visit) {
  const auto all_of = [&](FfnWeights& ffn) {
    for (MatrixView* matrix : {&ffn.gate, &ffn.up, &ffn.down}) {
      if (!matrix->empty()) visit(*matrix);
    }
  };
  for (FfnWeights& expert : weights.experts) all_of(expert);
  all_of(weights.shared);
}

}  // namespace switchyard::testing
