// Test cases of route_warp(), for a GPU and for an emulated warp: tokens of every kind for layers
// of every kind, and route() to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "model/config.h"
#include "models/model_table.h"
#include "routing/families.h"
#include "routing/route_warp.cuh"
#include "switchyard/routing.h"

namespace switchyard::test {

using routing::RouteStatus;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The tokens to route, as the spans that route() takes.
struct Tokens {
  LayerSpec spec;
  std::vector<float> logits;         // [T, E]
  std::vector<float> bias;           // [E] or empty
  std::vector<std::int32_t> hashed;  // [T, K] or empty

  int count() const { return static_cast<int>(logits.size()) / spec.num_experts; }
};

struct Routed {
  std::vector<std::int32_t> ids;  // [T, K]
  std::vector<float> weights;     // [T, K]
  std::vector<RouteStatus> status;
};

// The device sums in the host's order, so that weights agree to the bit as things are; the bound is
// what a different order would keep to.
inline bool same_weight(float actual, float expected) {
  if (std::isnan(expected)) return std::isnan(actual);
  return actual == expected || std::fabs(actual - expected) <= 1e-6f * std::fabs(expected) + 1e-7f;
}

inline std::string row_of(const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
                          std::size_t first, int count) {
  std::string row;
  for (std::size_t i = first; i < first + static_cast<std::size_t>(count); ++i) {
    row.append(" ").append(std::to_string(ids[i])).append(":").append(std::to_string(weights[i]));
  }
  return row;
}

inline void expect_as_on_host(const Tokens& tokens, const Routed& actual, const std::string& name) {
  const LayerSpec& spec = tokens.spec;
  for (int t = 0; t < tokens.count(); ++t) {
    const std::size_t first = static_cast<std::size_t>(t) * spec.top_k;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(spec.top_k));
    std::vector<float> weights(ids.size());
    const std::span<const std::int32_t> hashed(tokens.hashed);
    const std::int64_t num_nan = route(
        spec,
        std::span(tokens.logits)
            .subspan(static_cast<std::size_t>(t) * spec.num_experts, spec.num_experts),
        tokens.bias, hashed.empty() ? hashed : hashed.subspan(first, ids.size()), ids, weights);
    bool same = actual.status[t].num_nan == num_nan && actual.status[t].bad_hashed_id_mask == 0;
    for (int k = 0; k < spec.top_k; ++k) {
      same = same && actual.ids[first + k] == ids[k] &&
             same_weight(actual.weights[first + k], weights[k]);
    }
    ASSERT_TRUE(same) << name << ", token " << t << ": " << describe(spec)
                      << "\n  device:" << row_of(actual.ids, actual.weights, first, spec.top_k)
                      << ", " << actual.status[t].num_nan << " NaN, bad ids "
                      << actual.status[t].bad_hashed_id_mask
                      << "\n  host:  " << row_of(ids, weights, 0, spec.top_k) << ", " << num_nan
                      << " NaN";
  }
}

// Logits of one token each, in turn: ordinary ones, and what goes wrong in practice.
enum class Kind {
  kNormal,
  kWide,      // scores of which many round to 0 or 1
  kManyTies,  // multiples of 1/2
  kAllEqual,
  kZeros,  // of either sign
  kSomeNaN,
  kMostlyNaN,
  kAllNaN,
  kAllMinusInfinity,
  kExtremes,  // NaN, infinities, zeros, the largest numbers
  kTiny,      // subnormal ones among them
  kHuge,
  kCount,
};

inline float draw(Kind kind, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const float value = normal(random);
  const auto die = static_cast<std::uint32_t>(random());
  switch (kind) {
    case Kind::kWide: return 20.0f * value;
    case Kind::kManyTies: return 0.5f * std::round(value);
    case Kind::kAllEqual: return 0.25f;
    case Kind::kZeros: return die % 2 ? 0.0f : -0.0f;
    case Kind::kSomeNaN: return die % 20 ? value : kNaN;
    case Kind::kMostlyNaN: return die % 50 ? kNaN : value;
    case Kind::kAllNaN: return kNaN;
    case Kind::kAllMinusInfinity: return -kInfinity;
    case Kind::kExtremes: {
      const float values[] = {kNaN, kInfinity, -kInfinity, 0.0f, -0.0f, 3e38f, -3e38f, value};
      return values[die % 8];
    }
    case Kind::kTiny: return 1e-38f * value;
    case Kind::kHuge: return die % 4 ? -100.0f * std::fabs(value) : 1e30f * value;
    default: return value;
  }
}

inline Tokens draw_tokens(const LayerSpec& spec, int num_tokens, Kind bias_kind,
                          std::mt19937& random) {
  Tokens tokens{.spec = spec};
  for (int t = 0; t < num_tokens; ++t) {
    const auto kind = static_cast<Kind>(t % static_cast<int>(Kind::kCount));
    for (int e = 0; e < spec.num_experts; ++e) tokens.logits.push_back(draw(kind, random));
    if (spec.routing.method != RoutingMethod::kHash) continue;
    for (int k = 0; k < spec.top_k; ++k) {
      tokens.hashed.push_back(static_cast<std::int32_t>(random() % spec.num_experts));
    }
  }
  if (spec.routing.has_correction_bias) {
    for (int e = 0; e < spec.num_experts; ++e)
      tokens.bias.push_back(0.1f * draw(bias_kind, random));
  }
  return tokens;
}

// route_on(Tokens) is what is tested.
template <typename RouteOn>
void test_layer(const LayerSpec& spec, int num_tokens, std::mt19937& random,
                const std::string& name, RouteOn&& route_on) {
  for (Kind bias_kind : {Kind::kNormal, Kind::kManyTies, Kind::kExtremes}) {
    const Tokens tokens = draw_tokens(spec, num_tokens, bias_kind, random);
    expect_as_on_host(tokens, route_on(tokens), name);
    if (::testing::Test::HasFatalFailure() || !spec.routing.has_correction_bias) return;
  }
}

// All different layers of a model.
template <typename RouteOn>
void test_model(const ModelEntry& model, int num_tokens, RouteOn&& route_on) {
  std::mt19937 random(1);
  std::vector<LayerSpec> seen;
  for (const auto& layer : parse_config(model.config_json, model.name).layers) {
    if (!layer || std::find(seen.begin(), seen.end(), *layer) != seen.end()) continue;
    seen.push_back(*layer);
    ASSERT_NO_FATAL_FAILURE(test_layer(*layer, num_tokens, random, model.name, route_on));
  }
  EXPECT_FALSE(seen.empty());
}

// num_groups of 1, and at most four other divisors of num_experts.
inline std::vector<int> draw_group_counts(int num_experts, std::mt19937& random) {
  std::vector<int> counts;
  for (int g = 2; g <= num_experts; ++g) {
    if (num_experts % g == 0) counts.push_back(g);
  }
  std::shuffle(counts.begin(), counts.end(), random);
  counts.resize(std::min<std::size_t>(counts.size(), 4));
  counts.push_back(1);
  return counts;
}

// Every combination of method, score, bias, groups and renormalisation.
template <typename RouteOn>
void test_combinations(int num_experts, int num_tokens, RouteOn&& route_on) {
  std::mt19937 random(static_cast<std::uint32_t>(num_experts));
  const auto draw_in = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<std::uint32_t>(high - low + 1));
  };
  for (RoutingMethod method :
       {RoutingMethod::kTopK, RoutingMethod::kSparseMixer, RoutingMethod::kHash}) {
    for (ScoreFunction score :
         {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      for (int flags = 0; flags < 4; ++flags) {
        for (int num_groups : draw_group_counts(num_experts, random)) {
          for (GroupScore group_score : {GroupScore::kMax, GroupScore::kSumTopTwo}) {
            const RoutingSpec routing{.method = method,
                                      .score = score,
                                      .top_k_before_score = (flags & 1) != 0,
                                      .renormalize = draw_in(0, 1) == 1,
                                      .renormalize_epsilon = draw_in(0, 1) == 1 ? 0.25f : 0.0f,
                                      .has_correction_bias = (flags & 2) != 0,
                                      .num_groups = num_groups,
                                      .top_k_groups = draw_in(1, num_groups),
                                      .group_score = group_score,
                                      .scale = draw_in(0, 1) == 1 ? 2.5f : 1.0f,
                                      .jitter_eps = draw_in(0, 1) == 1 ? 0.4f : 0.01f};
            const int top_k = draw_in(1, std::min(num_experts, draw_in(0, 1) == 1 ? 8 : 32));
            ASSERT_NO_FATAL_FAILURE(test_layer(routing_layer(num_experts, top_k, routing),
                                               num_tokens, random, "combination", route_on));
          }
        }
      }
    }
  }
}

}  // namespace switchyard::test
