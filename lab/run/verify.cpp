#include "run/verify.h"

#include <cmath>
#include <limits>
#include <vector>

#include "layer/compute.h"
#include "reference/decode.h"
#include "reference/reference.h"
#include "switchyard/routing.h"

namespace switchyard::run {
namespace {

constexpr double kF32Bound = 1e-5;

// The margin below which fp32 logits may decide a token's routing either way. Rounding errors of an
// fp32 dot product grow with the square root of its length. 16 units in the last place also cover
// the score function and the largest error among many tokens.
double routing_margin_bound(int hidden) { return 16 * 0x1p-24 * std::sqrt(hidden); }

std::vector<double> decoded(const MatrixView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.rows * view.cols));
  for (std::int64_t r = 0; r < view.rows; ++r) {
    reference::decode_row(view, r, values.data() + r * view.cols);
  }
  return values;
}

std::vector<float> correction_bias(const MoeWeights& weights) {
  std::vector<double> exact(
      static_cast<std::size_t>(weights.correction_bias.empty() ? 0 : weights.correction_bias.size));
  if (!exact.empty()) reference::decode_vector(weights.correction_bias, exact.data());
  return {exact.begin(), exact.end()};
}

std::int32_t hashed_id(const MatrixView& table, std::int32_t token_id, std::int64_t k) {
  const std::int64_t at = token_id * table.row_stride + k * table.col_stride;
  return table.dtype == DType::kI32
             ? static_cast<const std::int32_t*>(table.data)[at]
             : static_cast<std::int32_t>(static_cast<const std::int64_t*>(table.data)[at]);
}

std::vector<std::int32_t> hashed_ids(const Source& source, const Batch& batch) {
  std::vector<std::int32_t> ids;
  for (const std::int32_t token_id : batch.token_ids) {
    for (int k = 0; k < source.spec.top_k; ++k) {
      ids.push_back(hashed_id(source.weights.hash_table, token_id, k));
    }
  }
  return ids;
}

// Returns the activations as the layer's gate sees them: converted to the type that the layer
// computes in. `values` holds the result of a conversion.
MatrixView seen_by_gate(const MatrixView& x, DType compute, std::vector<float>& values) {
  if (value_type(compute) != DType::kBF16 || x.dtype == DType::kBF16) return x;
  for (const double value : decoded(x))
    values.push_back(reference::round_to_bf16(static_cast<float>(value)));
  return {values.data(), DType::kF32, x.rows, x.cols, x.cols};
}

// The expected content of each slot before drops, and each token's routing margin.
struct Expected {
  reference::Routing routing;
  std::vector<double> margins;
};

Expected expected_routing(const Source& source, const Batch& batch, DType compute) {
  const auto tokens = static_cast<std::size_t>(batch.tokens());
  Expected expected;
  expected.margins.assign(tokens, std::numeric_limits<double>::infinity());
  if (!batch.topk_ids.empty()) {
    expected.routing.ids = batch.topk_ids;
    expected.routing.weights.assign(batch.topk_weights.begin(), batch.topk_weights.end());
    return expected;
  }
  std::vector<float> converted;
  const auto logits = reference::router_logits(source.spec, source.weights,
                                               seen_by_gate(batch.activations, compute, converted));
  const std::vector<float> bias = correction_bias(source.weights);
  expected.routing = reference::route(source.spec, logits, bias, hashed_ids(source, batch));
  if (source.spec.routing.method != RoutingMethod::kHash) {
    expected.margins = reference::routing_margin(source.spec, logits, bias);
  }
  return expected;
}

// Applies GShard's rule to the expected ids of consecutive tokens of each rank.
class CapacityRule {
 public:
  CapacityRule(const LayerSpec& spec, std::int64_t tokens, int ranks)
      : spec_(spec), kept_(static_cast<std::size_t>(spec.num_experts)) {
    for (const std::int64_t count : all_share_sizes(tokens, ranks)) ends_.push_back(count);
  }

  void begin_token() {
    while (seen_in_rank_ == ends_[rank_]) {
      ++rank_;
      seen_in_rank_ = 0;
      kept_.assign(kept_.size(), 0);
    }
    ++seen_in_rank_;
  }
  bool keeps(std::int32_t id) {
    if (spec_.capacity_factor <= 0 || id == kNoExpert) return true;
    return kept_[static_cast<std::size_t>(id)]++ < expert_capacity(spec_, ends_[rank_]);
  }

 private:
  const LayerSpec& spec_;
  std::vector<std::int64_t> ends_;  // tokens of each rank
  std::vector<std::int64_t> kept_;
  std::size_t rank_ = 0;
  std::int64_t seen_in_rank_ = 0;
};

bool close(double actual, double expected, double tolerance) {
  return std::abs(actual - expected) <= tolerance * std::abs(expected) + 1e-6;
}

void check_routing(const Source& source, const Batch& batch, const RunResult& result, DType compute,
                   Verification& verification) {
  const Expected expected = expected_routing(source, batch, compute);
  const auto k = static_cast<std::size_t>(source.spec.top_k);
  verification.margin = routing_margin_bound(source.spec.hidden);
  CapacityRule capacity(source.spec, batch.tokens(), result.ranks);
  for (std::size_t t = 0; t < expected.margins.size(); ++t) {
    capacity.begin_token();
    const bool decided = expected.margins[t] >= verification.margin;
    bool same = true;
    for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
      const std::int32_t id = expected.routing.ids[i];
      const bool kept = capacity.keeps(id);
      // After an undecided token it is also undecided which of the later tokens still found room.
      const bool drop_known =
          source.spec.capacity_factor <= 0 || verification.undecided_tokens == 0;
      if (!kept || !drop_known) {
        same =
            same && (result.topk_ids[i] == kNoExpert || (!drop_known && result.topk_ids[i] == id));
        continue;
      }
      same = same && result.topk_ids[i] == id &&
             close(result.topk_weights[i], expected.routing.weights[i], verification.margin);
    }
    if (!decided) ++verification.undecided_tokens;
    if (decided && !same) ++verification.misrouted_tokens;
  }
}

}  // namespace

Verification verify(const Source& source, const Batch& batch, const RunResult& result,
                    DType compute) {
  Verification verification{.compute = compute, .nan_tokens = result.nan_tokens};
  check_routing(source, batch, result, compute, verification);

  // The reference gets the routing that was used, with its drops. So a near tie that the layer
  // decides differently does not count as an error of the experts.
  reference::ReferenceInput input{.activations = batch.activations,
                                  .topk_ids = result.topk_ids,
                                  .topk_weights = result.topk_weights,
                                  .quantised = compute == DType::kF8E4M3};
  if (result.backend == Backend::kCuda && is_four_bit(source.weights.experts.front().up.dtype)) {
    input.scale_columns = reference::kWholeRow;
  }
  LayerSpec spec = source.spec;
  spec.capacity_factor = 0;
  const auto expected = reference::forward(spec, source.weights, input);
  const std::vector<double> actual = decoded(result.output_view(spec.hidden));
  verification.error = reference::relative_error(actual, expected.output);
  verification.bound = kF32Bound;
  if (compute != DType::kF32) {
    const auto straightforward =
        input.quantised ? reference::straightforward_fp8 : reference::straightforward_bf16;
    verification.yardstick =
        reference::relative_error(straightforward(spec, source.weights, input), expected.output);
    verification.bound = 2 * *verification.yardstick;
  }
  return verification;
}

}  // namespace switchyard::run
