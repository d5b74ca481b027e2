#include "bench/skew.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/convert.h"
#include "base/mix64.h"
#include "base/plural.h"
#include "base/threads.h"
#include "bench/activations.h"
#include "machine/host.h"
#include "reference/decode.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

// Makes the numbers drawn here independent of the weights, which are drawn from the same seed.
enum class Draw : std::uint64_t { kActivations = 0xbe7c, kPopularity = 0x90b1 };

std::uint64_t seed_of(Draw draw, std::uint64_t seed) {
  return mix64(mix64(seed) ^ static_cast<std::uint64_t>(draw));
}

// At a skew of 16, the most popular of the unpopular experts is behind the popular ones by 16
// standard deviations of the other columns' product.
constexpr float kMaxSkew = 16;
constexpr int kBisectionSteps = 16;
// The bisection ends when it is this near to the wanted balancedness.
constexpr double kBetaTolerance = 1e-3;

void store(DType dtype, float value, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const std::uint16_t code = dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(to, &code, sizeof code);
}

std::vector<float> decoded_rows(const MatrixView& view, std::int64_t rows) {
  std::vector<double> row(static_cast<std::size_t>(view.cols));
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(rows * view.cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    reference::decode_row(view, r, row.data());
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

std::vector<float> decoded(const VectorView& view) {
  std::vector<double> values(view.empty() ? 0 : static_cast<std::size_t>(view.size));
  if (!values.empty()) reference::decode_vector(view, values.data());
  return {values.begin(), values.end()};
}

// Returns popularity[e], which follows from the expert's place in a random order.
std::vector<float> draw_popularity(const LayerSpec& spec, std::uint64_t seed) {
  std::vector<int> order(static_cast<std::size_t>(spec.num_experts));
  std::iota(order.begin(), order.end(), 0);
  const std::uint64_t key = seed_of(Draw::kPopularity, seed);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[mix64(key + i) % i]);
  }
  std::vector<float> popularity(order.size());
  for (int place = 0; place < spec.num_experts; ++place) {
    // Popular experts get 1/2 instead of 0, so that a sigmoid score puts them above any correction
    // bias of the others.
    popularity[static_cast<std::size_t>(order[static_cast<std::size_t>(place)])] =
        0.5f - static_cast<float>(std::max(0, place - spec.top_k + 1));
  }
  return popularity;
}

// Replaces the router by a copy with the popularities in column 0. Rounds `popularity` to the
// values that the router's type can hold.
void plant(MoeWeights& weights, std::vector<float>& popularity) {
  MatrixView& router = weights.router;
  const std::size_t row_bytes = static_cast<std::size_t>(router.cols) * size_of(router.dtype);
  struct Owner {
    std::shared_ptr<const void> others;
    std::vector<std::byte> router;
  };
  const auto owner = std::make_shared<Owner>();
  owner->others = std::move(weights.owner);
  owner->router.resize(static_cast<std::size_t>(router.rows) * row_bytes);
  for (std::int64_t e = 0; e < router.rows; ++e) {
    std::byte* const row = owner->router.data() + static_cast<std::size_t>(e) * row_bytes;
    std::memcpy(row, router.row(e), row_bytes);
    store(router.dtype, popularity[static_cast<std::size_t>(e)], row);
  }
  router.data = owner->router.data();
  router.row_stride = router.cols;
  std::vector<double> row(static_cast<std::size_t>(router.cols));
  for (std::int64_t e = 0; e < router.rows; ++e) {
    reference::decode_row(router, e, row.data());
    popularity[static_cast<std::size_t>(e)] = static_cast<float>(row[0]);
  }
  weights.owner = owner;
}

float dot(const float* a, const float* b, std::size_t count) {
  constexpr std::size_t kLanes = 16;  // partial sums, so that the compiler may use vectors
  float sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  float total = 0;
  for (; i < count; ++i) total += a[i] * b[i];
  return std::accumulate(sums, sums + kLanes, total);
}

// Returns the logits [tokens, E] without the share of column 0. x is [tokens, H], router [E, H].
std::vector<float> logits_without_skew(const std::vector<float>& x,
                                       const std::vector<float>& router,
                                       const std::vector<float>& router_bias, std::size_t hidden) {
  const std::size_t tokens = x.size() / hidden;
  const std::size_t experts = router.size() / hidden;
  std::vector<float> logits(tokens * experts);
  const auto work = [&](std::size_t first, std::size_t step) {
    for (std::size_t t = first; t < tokens; t += step) {
      for (std::size_t e = 0; e < experts; ++e) {
        logits[t * experts + e] = dot(&x[t * hidden + 1], &router[e * hidden + 1], hidden - 1) +
                                  (router_bias.empty() ? 0.0f : router_bias[e]);
      }
    }
  };
  const auto num_threads = static_cast<std::size_t>(machine::hardware_threads());
  Threads threads(1, machine::hardware_threads(), kThreadRemedy,
                  [&](int i) { work(static_cast<std::size_t>(i), num_threads); });
  work(0, num_threads);
  threads.join();
  return logits;
}

}  // namespace

SkewedGate::SkewedGate(const LayerSpec& spec, MoeWeights& weights, std::int64_t max_tokens,
                       DType dtype, std::uint64_t seed)
    : spec_(spec),
      dtype_(dtype),
      max_tokens_(max_tokens),
      sample_(std::min(max_tokens, kSampleTokens)),
      correction_bias_(decoded(weights.correction_bias)) {
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("activations of {} were asked for; use bf16 or f32", to_string(dtype)));
  }
  popularity_ = draw_popularity(spec, seed);
  plant(weights, popularity_);

  activations_ =
      random_activations(dtype, max_tokens, spec.hidden, seed_of(Draw::kActivations, seed));

  const MatrixView x{activations_.data(), dtype, max_tokens, spec.hidden, spec.hidden};
  logits_ =
      logits_without_skew(decoded_rows(x, sample_), decoded_rows(weights.router, spec.num_experts),
                          decoded(weights.router_bias), static_cast<std::size_t>(spec.hidden));
}

std::vector<std::int64_t> SkewedGate::histogram(std::int64_t tokens, float skew) const {
  const auto experts = static_cast<std::size_t>(spec_.num_experts);
  const auto sampled = static_cast<std::size_t>(std::min(tokens, sample_));
  std::vector<float> logits(logits_.begin(),
                            logits_.begin() + static_cast<std::ptrdiff_t>(sampled * experts));
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += skew * popularity_[i % experts];
  std::vector<std::int32_t> ids(sampled * static_cast<std::size_t>(spec_.top_k));
  std::vector<float> weights(ids.size());
  route(spec_, logits, correction_bias_, {}, ids, weights);
  std::vector<std::int64_t> counts(experts);
  for (const std::int32_t id : ids) {
    if (id != kNoExpert) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

float SkewedGate::skew_for(std::int64_t tokens, double beta) const {
  const double target = std::max(beta, lowest_balancedness(spec_.num_experts, spec_.top_k));
  float best = 0;
  double best_beta = balancedness(histogram(tokens, 0));
  if (best_beta <= target) return best;
  float low = 0, high = kMaxSkew;
  for (int step = 0; step < kBisectionSteps; ++step) {
    if (std::abs(best_beta - target) <= kBetaTolerance) break;
    // The skew is rounded to bf16, so that activations of either type hold exactly this value.
    const float skew = bf16_to_f32(f32_to_bf16((low + high) / 2));
    const double reached = balancedness(histogram(tokens, skew));
    if (std::abs(reached - target) < std::abs(best_beta - target)) {
      best = skew;
      best_beta = reached;
    }
    (reached > target ? low : high) = skew;
  }
  return best;
}

MatrixView SkewedGate::activations(std::int64_t tokens, float skew) {
  if (tokens < 0 || tokens > max_tokens_) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} were asked for, but {} were drawn",
                                                         plural(tokens, "token"), max_tokens_));
  }
  const std::size_t row_bytes = static_cast<std::size_t>(spec_.hidden) * size_of(dtype_);
  for (std::int64_t t = 0; t < tokens; ++t) {
    store(dtype_, skew, activations_.data() + static_cast<std::size_t>(t) * row_bytes);
  }
  return {activations_.data(), dtype_, tokens, spec_.hidden, spec_.hidden};
}

}  // namespace switchyard::bench
