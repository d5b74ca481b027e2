// Routing by sorting: every step computes all experts and sorts them, in fp64.
#include "switchyard/routing.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "reference/reference.h"
#include "switchyard/error.h"

namespace switchyard::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A value that decides a choice, with the magnitude of the numbers that it was computed from.
struct Candidate {
  int index = 0;
  double value = 0;
  double magnitude = 0;
};

std::vector<Candidate> without_nan(std::vector<Candidate> candidates) {
  std::erase_if(candidates, [](const Candidate& c) { return std::isnan(c.value); });
  return candidates;
}

void sort_best_first(std::vector<Candidate>& candidates) {
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
}

double relative_gap(const Candidate& better, const Candidate& worse) {
  if (better.value == worse.value) return 0;
  if (std::isinf(better.value) || std::isinf(worse.value)) return kInfinity;
  return (better.value - worse.value) / std::max(better.magnitude, worse.magnitude);
}

std::vector<double> softmax(const std::vector<double>& logits) {
  double max = -kInfinity;
  for (double logit : logits) {
    if (logit > max) max = logit;
  }
  std::vector<double> result(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    // For infinite logits, this is the limit as they grow together.
    result[i] = logits[i] == max ? 1.0 : std::exp(logits[i] - max);
    sum += result[i];
  }
  for (double& value : result) value = sum > 0 ? value / sum : 0;
  return result;
}

std::vector<double> scores_of(ScoreFunction function, const std::vector<double>& logits) {
  if (function == ScoreFunction::kSoftmax) return softmax(logits);
  std::vector<double> result(logits.size());
  std::transform(logits.begin(), logits.end(), result.begin(), [&](double x) {
    if (std::isnan(x)) return 0.0;
    if (function == ScoreFunction::kSigmoid) return 1 / (1 + std::exp(-x));
    return std::sqrt(x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)));
  });
  return result;
}

struct TokenRouting {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  double margin = kInfinity;
};

void renormalize_and_scale(const RoutingSpec& routing, std::vector<double>& weights) {
  if (routing.renormalize) {
    const double sum =
        std::accumulate(weights.begin(), weights.end(), double{routing.renormalize_epsilon});
    const auto num_infinite =
        static_cast<double>(std::count(weights.begin(), weights.end(), kInfinity));
    for (double& weight : weights) {
      if (num_infinite > 0) {
        weight = std::isinf(weight) ? 1 / num_infinite : 0;
      } else if (sum != 0) {
        weight /= sum;
      }
    }
  }
  for (double& weight : weights) weight *= double{routing.scale};
}

TokenRouting sparse_mixer(const LayerSpec& spec, const std::vector<double>& logits) {
  const double threshold = 2 * double{spec.routing.jitter_eps};
  TokenRouting result;
  std::vector<double> remaining = logits;
  for (int round = 0; round < spec.top_k; ++round) {
    std::vector<Candidate> candidates;
    for (int e = 0; e < spec.num_experts; ++e) {
      candidates.push_back({e, remaining[e], std::abs(remaining[e])});
    }
    candidates = without_nan(candidates);
    if (candidates.empty()) {
      result.ids.push_back(kNoExpert);
      result.weights.push_back(0);
      continue;
    }
    sort_best_first(candidates);
    const Candidate& best = candidates.front();
    if (candidates.size() > 1) {
      result.margin = std::min(result.margin, relative_gap(best, candidates[1]));
    }
    std::vector<double> kept = remaining;
    for (const Candidate& c : candidates) {
      const double distance = (best.value - c.value) / std::max(std::abs(c.value), best.value);
      if (distance > threshold) kept[c.index] = std::numeric_limits<double>::quiet_NaN();
      if (std::isfinite(distance)) {
        result.margin = std::min(result.margin, std::abs(distance - threshold));
      }
    }
    result.ids.push_back(best.index);
    result.weights.push_back(softmax(kept)[best.index]);
    remaining[best.index] = std::numeric_limits<double>::quiet_NaN();
  }
  return result;
}

TokenRouting choose(const LayerSpec& spec, const std::vector<double>& logits,
                    std::span<const float> correction_bias) {
  const RoutingSpec& routing = spec.routing;
  const std::vector<double> scores = scores_of(routing.score, logits);
  std::vector<Candidate> candidates;
  for (int e = 0; e < spec.num_experts; ++e) {
    const double base = routing.top_k_before_score ? logits[e] : scores[e];
    const double bias = routing.has_correction_bias ? double{correction_bias[e]} : 0.0;
    const double value = std::isnan(logits[e]) ? logits[e] : base + bias;
    candidates.push_back({e, value, std::abs(base) + std::abs(bias)});
  }

  TokenRouting result;
  if (routing.num_groups > 1) {
    const int group_size = spec.num_experts / routing.num_groups;
    std::vector<Candidate> groups;
    for (int g = 0; g < routing.num_groups; ++g) {
      const auto begin = candidates.begin() + g * group_size;
      std::vector<Candidate> members = without_nan({begin, begin + group_size});
      if (members.empty()) continue;
      sort_best_first(members);
      Candidate group{g, members[0].value, members[0].magnitude};
      if (routing.group_score == GroupScore::kSumTopTwo && members.size() > 1) {
        group.value += members[1].value;
        group.magnitude += members[1].magnitude;
      }
      groups.push_back(group);
    }
    groups = without_nan(groups);
    sort_best_first(groups);
    const auto num_kept = static_cast<std::size_t>(routing.top_k_groups);
    if (groups.size() > num_kept) {
      result.margin = relative_gap(groups[num_kept - 1], groups[num_kept]);
      groups.resize(num_kept);
    }
    std::erase_if(candidates, [&](const Candidate& c) {
      return std::none_of(groups.begin(), groups.end(), [&](const Candidate& group) {
        return group.index == c.index / group_size;
      });
    });
  }

  candidates = without_nan(candidates);
  sort_best_first(candidates);
  for (int k = 0; k < spec.top_k; ++k) {
    const auto i = static_cast<std::size_t>(k);
    result.ids.push_back(i < candidates.size() ? candidates[i].index : kNoExpert);
    if (i + 1 < candidates.size()) {
      result.margin = std::min(result.margin, relative_gap(candidates[i], candidates[i + 1]));
    }
  }
  return result;
}

void weigh(const LayerSpec& spec, const std::vector<double>& logits, TokenRouting& result) {
  std::vector<double> scored = logits;
  if (spec.routing.top_k_before_score) {
    std::fill(scored.begin(), scored.end(), std::numeric_limits<double>::quiet_NaN());
    for (std::int32_t id : result.ids) {
      if (id != kNoExpert) scored[id] = logits[id];
    }
  }
  const std::vector<double> scores = scores_of(spec.routing.score, scored);
  for (std::int32_t id : result.ids) result.weights.push_back(id == kNoExpert ? 0 : scores[id]);
}

std::vector<double> token_logits(const LayerSpec& spec, std::span<const double> logits,
                                 std::size_t t) {
  const auto row = logits.subspan(t * spec.num_experts, spec.num_experts);
  return {row.begin(), row.end()};
}

std::size_t check_sizes(const LayerSpec& spec, std::span<const double> logits,
                        std::span<const float> correction_bias) {
  const auto num_experts = static_cast<std::size_t>(spec.num_experts);
  if (spec.num_experts < 1 || logits.size() % num_experts != 0) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} logits are not rows of {} experts",
                                                         logits.size(), spec.num_experts));
  }
  if (correction_bias.size() != (spec.routing.has_correction_bias ? num_experts : 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("correction_bias has {} elements for {} experts",
                            correction_bias.size(), num_experts));
  }
  return logits.size() / num_experts;
}

}  // namespace

Routing route(const LayerSpec& spec, std::span<const double> logits,
              std::span<const float> correction_bias, std::span<const std::int32_t> hashed_ids) {
  const std::size_t num_tokens = check_sizes(spec, logits, correction_bias);
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  const bool hashed = spec.routing.method == RoutingMethod::kHash;
  if (hashed_ids.size() != (hashed ? num_tokens * top_k : 0)) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("hashed_ids has {} elements for {} tokens",
                                                         hashed_ids.size(), num_tokens));
  }
  Routing routing;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    const std::vector<double> row = token_logits(spec, logits, t);
    TokenRouting token;
    if (spec.routing.method == RoutingMethod::kSparseMixer) {
      token = sparse_mixer(spec, row);
    } else {
      if (hashed) {
        for (std::int32_t id : hashed_ids.subspan(t * top_k, top_k)) {
          if (id < 0 || id >= spec.num_experts) {
            throw Error(ErrorCode::kInvalidArgument,
                        fmt::format("hashed id {} of token {} is no expert; experts are 0 to {}",
                                    id, t, spec.num_experts - 1));
          }
          token.ids.push_back(std::isnan(row[id]) ? kNoExpert : id);
        }
      } else {
        token = choose(spec, row, correction_bias);
      }
      weigh(spec, row, token);
    }
    renormalize_and_scale(spec.routing, token.weights);
    routing.ids.insert(routing.ids.end(), token.ids.begin(), token.ids.end());
    routing.weights.insert(routing.weights.end(), token.weights.begin(), token.weights.end());
  }
  return routing;
}

std::vector<double> routing_margin(const LayerSpec& spec, std::span<const double> logits,
                                   std::span<const float> correction_bias) {
  std::vector<double> margins(check_sizes(spec, logits, correction_bias), kInfinity);
  if (spec.routing.method == RoutingMethod::kHash) return margins;
  for (std::size_t t = 0; t < margins.size(); ++t) {
    const std::vector<double> row = token_logits(spec, logits, t);
    margins[t] = spec.routing.method == RoutingMethod::kSparseMixer
                     ? sparse_mixer(spec, row).margin
                     : choose(spec, row, correction_bias).margin;
  }
  return margins;
}

}  // namespace switchyard::reference
