#include "routing/route.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "routing/score.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace routing {
namespace {

// Experts are handled in blocks of this many: loops of this fixed length unroll into a few vector
// instructions, and finding the best of E costs one block and one scan over E / 16 block maxima.
constexpr int kBlock = 16;
constexpr int kMaxBlocks = kMaxExperts / kBlock;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr int round_up_to_block(int n) { return (n + kBlock - 1) / kBlock * kBlock; }

OrderKey best_of_block(const OrderKey* keys) {
  OrderKey lanes[kBlock / 2];
  for (int i = 0; i < kBlock / 2; ++i) lanes[i] = std::max(keys[i], keys[i + kBlock / 2]);
  for (int i = 0; i < kBlock / 4; ++i) lanes[i] = std::max(lanes[i], lanes[i + kBlock / 4]);
  return std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
}

// Index of the first of `count` keys that equals `key`; one of them must.
int first_equal(const OrderKey* keys, int count, OrderKey key) {
  int found = 0;
  for (int i = count - 1; i >= 0; --i) found = keys[i] == key ? i : found;
  return found;
}

// The indices of the k best of `padded` keys (a multiple of kBlock), best first, kNoExpert once
// only kNeverChosen is left. Overwrites the chosen keys.
void take_best(OrderKey* keys, int padded, int k, std::int32_t* ids) {
  OrderKey block_best[kMaxBlocks];
  const int num_blocks = padded / kBlock;
  for (int b = 0; b < num_blocks; ++b) block_best[b] = best_of_block(keys + b * kBlock);
  for (int slot = 0; slot < k; ++slot) {
    OrderKey best = kNeverChosen;
    for (int b = 0; b < num_blocks; ++b) best = std::max(best, block_best[b]);
    if (best == kNeverChosen) {
      std::fill(ids + slot, ids + k, kNoExpert);
      return;
    }
    const int b = first_equal(block_best, num_blocks, best);
    OrderKey* block = keys + b * kBlock;
    const int i = first_equal(block, kBlock, best);
    ids[slot] = b * kBlock + i;
    block[i] = kNeverChosen;
    block_best[b] = best_of_block(block);
  }
}

// Replaces the keys of experts outside the best top_k_groups groups by kNeverChosen. A group
// without candidates is never among them.
void keep_best_groups(const LayerSpec& spec, OrderKey* keys) {
  const int num_groups = spec.routing.num_groups;
  const int group_size = spec.num_experts / num_groups;
  OrderKey group_keys[kMaxExperts];
  std::fill(group_keys, group_keys + round_up_to_block(num_groups), kNeverChosen);
  for (int g = 0; g < num_groups; ++g) {
    // Several independent running maxima, because one would wait for itself at every step.
    constexpr int kLanes = 8;
    OrderKey first[kLanes], second[kLanes];
    std::fill(first, first + kLanes, kNeverChosen);
    std::fill(second, second + kLanes, kNeverChosen);
    const OrderKey* group = keys + g * group_size;
    const auto see = [&](int lane, OrderKey key) {
      second[lane] = std::max(second[lane], std::min(first[lane], key));
      first[lane] = std::max(first[lane], key);
    };
    int i = 0;
    for (; i + kLanes <= group_size; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) see(lane, group[i + lane]);
    }
    for (; i < group_size; ++i) see(0, group[i]);
    for (int lane = 1; lane < kLanes; ++lane) {
      see(0, first[lane]);
      see(0, second[lane]);
    }
    group_keys[g] = first[0];
    if (spec.routing.group_score == GroupScore::kSumTopTwo && second[0] != kNeverChosen) {
      group_keys[g] = order_key(value_of(first[0]) + value_of(second[0]));
    }
  }
  std::int32_t chosen[kMaxExperts];
  take_best(group_keys, round_up_to_block(num_groups), spec.routing.top_k_groups, chosen);
  bool competes[kMaxExperts];
  std::fill(competes, competes + num_groups, false);
  for (int i = 0; i < spec.routing.top_k_groups; ++i) {
    if (chosen[i] != kNoExpert) competes[chosen[i]] = true;
  }
  for (int g = 0; g < num_groups; ++g) {
    if (!competes[g]) {
      std::fill(keys + g * group_size, keys + (g + 1) * group_size, kNeverChosen);
    }
  }
}

// The largest number among `padded` values; -infinity if there is none.
float max_number(const float* values, int padded) {
  float lanes[kBlock];
  std::fill(lanes, lanes + kBlock, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < padded; i += kBlock) {
    for (int lane = 0; lane < kBlock; ++lane) {
      lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
    }
  }
  return *std::max_element(lanes, lanes + kBlock);
}

float sum_of(const float* values, int padded) {
  float lanes[kBlock] = {};
  for (int i = 0; i < padded; i += kBlock) {
    for (int lane = 0; lane < kBlock; ++lane) lanes[lane] += values[i + lane];
  }
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// scores[i] of all experts. Padding and NaN logits get scores of no meaning.
void score_all(ScoreFunction function, const float* logits, int padded, float* scores) {
  switch (function) {
    case ScoreFunction::kSoftmax: {
      const float max = max_number(logits, padded);
      for (int i = 0; i < padded; ++i) scores[i] = softmax_term(logits[i], max);
      const float inverse = 1.0f / sum_of(scores, padded);
      for (int i = 0; i < padded; ++i) scores[i] *= inverse;
      return;
    }
    case ScoreFunction::kSigmoid:
      for (int i = 0; i < padded; ++i) scores[i] = sigmoid(logits[i]);
      return;
    case ScoreFunction::kSqrtSoftplus:
      for (int i = 0; i < padded; ++i) scores[i] = sqrt_softplus(logits[i]);
      return;
  }
}

// The weights of the chosen experts from their logits alone.
void weigh_by_logit(const LayerSpec& spec, const float* logits, int padded, const std::int32_t* ids,
                    float* weights) {
  const int k = spec.top_k;
  switch (spec.routing.score) {
    case ScoreFunction::kSoftmax: {
      // Dividing a softmax over all experts by the sum over the chosen leaves the softmax over the
      // chosen, so the others' terms are needed only if something is added to that sum.
      const bool over_chosen =
          spec.routing.top_k_before_score ||
          (spec.routing.renormalize && spec.routing.renormalize_epsilon == 0.0f);
      float max = -std::numeric_limits<float>::infinity();
      float sum = 0;
      if (over_chosen) {
        for (int i = 0; i < k; ++i) {
          if (ids[i] != kNoExpert) max = std::max(max, logits[ids[i]]);
        }
      } else {
        max = max_number(logits, padded);
        alignas(64) float terms[kMaxExperts];
        for (int i = 0; i < padded; ++i) terms[i] = softmax_term(logits[i], max);
        sum = sum_of(terms, padded);
      }
      for (int i = 0; i < k; ++i) {
        weights[i] = ids[i] == kNoExpert ? 0.0f : softmax_term(logits[ids[i]], max);
        if (over_chosen) sum += weights[i];
      }
      for (int i = 0; i < k; ++i) weights[i] = sum > 0.0f ? weights[i] / sum : 0.0f;
      return;
    }
    case ScoreFunction::kSigmoid:
      for (int i = 0; i < k; ++i) {
        weights[i] = ids[i] == kNoExpert ? 0.0f : sigmoid(logits[ids[i]]);
      }
      return;
    case ScoreFunction::kSqrtSoftplus:
      for (int i = 0; i < k; ++i) {
        weights[i] = ids[i] == kNoExpert ? 0.0f : sqrt_softplus(logits[ids[i]]);
      }
      return;
  }
}

void renormalize_and_scale(const RoutingSpec& routing, int k, float* weights) {
  if (routing.renormalize) {
    float sum = routing.renormalize_epsilon;
    for (int i = 0; i < k; ++i) sum += weights[i];
    if (sum == std::numeric_limits<float>::infinity()) {
      // An infinite score outweighs every finite one and shares with its equals.
      const auto num_infinite = static_cast<float>(std::count(weights, weights + k, sum));
      for (int i = 0; i < k; ++i) weights[i] = weights[i] == sum ? 1.0f / num_infinite : 0.0f;
    } else if (sum != 0.0f) {
      for (int i = 0; i < k; ++i) weights[i] /= sum;
    }
  }
  for (int i = 0; i < k; ++i) weights[i] *= routing.scale;
}

// Phi-3.5-MoE's inference path: each round takes the best remaining logit, and weighs it by a
// softmax over those remaining logits that sparse_mixer_drops() keeps.
void sparse_mixer(const LayerSpec& spec, const float* logits, OrderKey* keys, int padded,
                  std::int32_t* ids, float* weights) {
  const float threshold = 2.0f * spec.routing.jitter_eps;
  take_best(keys, padded, spec.top_k, ids);
  alignas(64) float remaining[kMaxExperts];
  std::copy(logits, logits + padded, remaining);
  for (int round = 0; round < spec.top_k; ++round) {
    weights[round] = 0.0f;
    if (ids[round] == kNoExpert) continue;
    const float best = logits[ids[round]];
    alignas(64) float terms[kMaxExperts];
    for (int i = 0; i < padded; ++i) {
      const float term = softmax_term(remaining[i], best);
      terms[i] = sparse_mixer_drops(remaining[i], best, threshold) ? 0.0f : term;
    }
    weights[round] = 1.0f / sum_of(terms, padded);
    remaining[ids[round]] = kNaN;
  }
}

}  // namespace

void check_routable(const LayerSpec& spec) {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  };
  if (spec.num_experts < 1 || spec.num_experts > kMaxExperts) {
    fail(
        fmt::format("num_experts is {}, but routing needs 1 to {}", spec.num_experts, kMaxExperts));
  }
  const int max_top_k = std::min(spec.num_experts, kMaxTopK);
  if (spec.top_k < 1 || spec.top_k > max_top_k) {
    fail(fmt::format("top_k is {}, but routing among {} experts needs 1 to {}", spec.top_k,
                     spec.num_experts, max_top_k));
  }
  const RoutingSpec& routing = spec.routing;
  if (routing.num_groups < 1 || spec.num_experts % routing.num_groups != 0) {
    fail(fmt::format("num_groups is {}, which does not divide {} experts", routing.num_groups,
                     spec.num_experts));
  }
  if (routing.top_k_groups < 1 || routing.top_k_groups > routing.num_groups) {
    fail(fmt::format("top_k_groups is {}, but must be 1 to num_groups, {}", routing.top_k_groups,
                     routing.num_groups));
  }
}

int route_token(const LayerSpec& spec, const float* logits, const float* correction_bias,
                const std::int32_t* hashed_ids, std::int32_t* ids, float* weights) {
  const RoutingSpec& routing = spec.routing;
  const int num_experts = spec.num_experts;
  const int padded = round_up_to_block(num_experts);

  // Padding is NaN, because a NaN is never chosen and adds nothing to a softmax.
  alignas(64) float padded_logits[kMaxExperts];
  std::copy(logits, logits + num_experts, padded_logits);
  std::fill(padded_logits + num_experts, padded_logits + padded, kNaN);
  alignas(64) OrderKey keys[kMaxExperts];
  int num_nan = num_experts - padded;
  for (int i = 0; i < padded; ++i) {
    keys[i] = order_key(padded_logits[i]);
    num_nan += keys[i] == kNeverChosen ? 1 : 0;
  }

  if (routing.method == RoutingMethod::kSparseMixer) {
    sparse_mixer(spec, padded_logits, keys, padded, ids, weights);
    renormalize_and_scale(routing, spec.top_k, weights);
    return num_nan;
  }

  if (routing.method == RoutingMethod::kHash) {
    for (int i = 0; i < spec.top_k; ++i) {
      if (hashed_ids[i] < 0 || hashed_ids[i] >= num_experts) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("hashed_ids names expert {} in slot {}, but experts are 0 to {}; "
                                "check the model's token-id table",
                                hashed_ids[i], i, num_experts - 1));
      }
      ids[i] = keys[hashed_ids[i]] == kNeverChosen ? kNoExpert : hashed_ids[i];
    }
    weigh_by_logit(spec, padded_logits, padded, ids, weights);
    renormalize_and_scale(routing, spec.top_k, weights);
    return num_nan;
  }

  alignas(64) float scores[kMaxExperts];
  const bool scores_needed = !chooses_by_logit(routing);
  if (scores_needed) score_all(routing.score, padded_logits, padded, scores);
  if (scores_needed || routing.has_correction_bias) {
    const float* values = scores_needed ? scores : padded_logits;
    for (int i = 0; i < num_experts; ++i) {
      const float value = routing.has_correction_bias ? values[i] + correction_bias[i] : values[i];
      keys[i] = keys[i] == kNeverChosen ? kNeverChosen : order_key(value);
    }
  }
  if (routing.num_groups > 1) keep_best_groups(spec, keys);
  take_best(keys, padded, spec.top_k, ids);

  if (scores_needed) {
    for (int i = 0; i < spec.top_k; ++i) weights[i] = ids[i] == kNoExpert ? 0.0f : scores[ids[i]];
  } else {
    weigh_by_logit(spec, padded_logits, padded, ids, weights);
  }
  renormalize_and_scale(routing, spec.top_k, weights);
  return num_nan;
}

void append_hashed_ids(const MatrixView& table, std::int64_t token_id,
                       std::vector<std::int32_t>& ids) {
  const auto first = static_cast<std::ptrdiff_t>(ids.size());
  for (std::int64_t k = 0; k < table.cols; ++k) {
    const void* const row = table.row(token_id);
    const std::int64_t at = k * table.col_stride;
    const std::int64_t wide = table.dtype == DType::kI64
                                  ? static_cast<const std::int64_t*>(row)[at]
                                  : static_cast<const std::int32_t*>(row)[at];
    if (!std::in_range<std::int32_t>(wide)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("hash_table has expert {} for token id {}; there is no such expert, "
                              "check the model's token-id table",
                              wide, token_id));
    }
    const auto id = static_cast<std::int32_t>(wide);
    if (id >= 0 && std::find(ids.begin() + first, ids.end(), id) != ids.end()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("hash_table names expert {} twice for token id {}; a token's experts "
                              "must be distinct",
                              id, token_id));
    }
    ids.push_back(id);
  }
}

}  // namespace routing

std::int64_t route(const LayerSpec& spec, std::span<const float> logits,
                   std::span<const float> correction_bias, std::span<const std::int32_t> hashed_ids,
                   std::span<std::int32_t> ids, std::span<float> weights) {
  routing::check_routable(spec);
  const auto num_experts = static_cast<std::size_t>(spec.num_experts);
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  if (logits.size() % num_experts != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("logits has {} elements, which is not a multiple of {} experts",
                            logits.size(), num_experts));
  }
  const std::size_t num_tokens = logits.size() / num_experts;
  const auto require_size = [](const char* name, std::size_t size, std::size_t expected) {
    if (size != expected) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} has {} elements, expected {}", name, size, expected));
    }
  };
  const bool hashed = spec.routing.method == RoutingMethod::kHash;
  require_size("correction_bias", correction_bias.size(),
               spec.routing.has_correction_bias ? num_experts : 0);
  require_size("hashed_ids", hashed_ids.size(), hashed ? num_tokens * top_k : 0);
  require_size("ids", ids.size(), num_tokens * top_k);
  require_size("weights", weights.size(), num_tokens * top_k);

  std::int64_t num_nan = 0;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    const std::int32_t* row = hashed ? hashed_ids.data() + t * top_k : nullptr;
    num_nan += routing::route_token(spec, logits.data() + t * num_experts, correction_bias.data(),
                                    row, ids.data() + t * top_k, weights.data() + t * top_k);
  }
  return num_nan;
}

}  // namespace switchyard
