#include "support/fp8.h"

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

double expect_accurate_fp8(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                           const BatchResult& result, double closeness) {
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick, true);
  EXPECT_LE(error, 2 * yardstick);
  EXPECT_GT(yardstick, 1e-4);  // or the comparison means nothing
  EXPECT_LT(yardstick, 0.1);
  const double distance = distance_to_fp8_program(spec, weights, batch, result);
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
