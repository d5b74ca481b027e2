// Forms in which a call may hand over its routing and take its output, for the tests of both
// engines.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/layers.h"

namespace switchyard::testing {

// A batch's routing with ids in i64 and weights in bf16, and the batch with weights of those
// values.
struct WideRouting {
  explicit WideRouting(const Batch& batch)
      : ids(batch.topk_ids.begin(), batch.topk_ids.end()), rounded(batch) {
    for (float& weight : rounded.topk_weights) {
      weights.push_back(f32_to_bf16(weight));
      weight = bf16_to_f32(weights.back());
    }
    EXPECT_NE(rounded.topk_weights, batch.topk_weights);
  }
  std::vector<std::int64_t> ids;
  std::vector<std::uint16_t> weights;
  Batch rounded;
};

// A batch in which every third slot has an id that stands for none, and a weight that may reach no
// output; and the same batch without them.
struct Sentinels {
  Sentinels(const Batch& batch, int num_experts) : with(batch), without(batch) {
    for (std::size_t i = 0; i < batch.topk_ids.size(); i += 3) {
      with.topk_ids[i] = i % 2 == 0 ? num_experts : 1 << 30;
      without.topk_ids[i] = kNoExpert;
      with.topk_weights[i] = NAN;
    }
  }
  Batch with, without;
};

// A batch with ids as of padding whose logits are NaN: one expert in all slots of a token, or any
// number. And the same batch without them.
struct BadRouting {
  BadRouting(const Batch& batch, int num_experts, int top_k) : bad(batch), good(batch) {
    const auto k = static_cast<std::size_t>(top_k);
    for (std::size_t t = 5; t < static_cast<std::size_t>(batch.x.rows()); t += 6) {
      for (std::size_t i = 1; i < k; ++i) spoil(t * k + i, bad.topk_ids[t * k]);
    }
    spoil(2, num_experts);
    spoil(9, -7);
  }
  void spoil(std::size_t slot, std::int32_t id) {
    bad.topk_ids[slot] = id;
    good.topk_ids[slot] = kNoExpert;
    ++count;
  }
  Batch bad, good;
  std::int64_t count = 0;
};

// Routing as routers with experts that do nothing write it: such a slot has the weight 0 and an
// expert that other slots of the token name, too, before it and behind it.
struct IdleSlots {
  IdleSlots(const Batch& batch, int top_k) : given(batch), without(batch) {
    const auto k = static_cast<std::size_t>(top_k);
    for (std::size_t t = 0; t < static_cast<std::size_t>(batch.x.rows()); ++t) {
      const std::size_t idle = t * k + t % k, named = t * k + (t / k + t % k + 1) % k;
      if (idle == named) continue;
      given.topk_ids[idle] = given.topk_ids[named];
      given.topk_weights[idle] = t % 3 == 0 ? -0.0f : 0.0f;
      without.topk_ids[idle] = kNoExpert;
    }
    // The first of slots that all weigh nothing is the expert's.
    std::fill_n(given.topk_ids.begin(), k, 3);
    std::fill_n(given.topk_weights.begin(), k, 0.0f);
    std::fill_n(without.topk_ids.begin(), k, kNoExpert);
    without.topk_ids[0] = 3;
    without.topk_weights[0] = 0;
  }
  Batch given, without;
};

// Routing by sigmoid over groups of experts.
inline LayerSpec grouped_routing(LayerSpec spec) {
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  spec.routing.num_groups = 4;
  spec.routing.top_k_groups = 2;
  spec.routing.renormalize = true;
  spec.routing.scale = 2.5f;
  return spec;
}

// `added` must be half of `plain` on top of `before`.
inline void expect_half_added(const Matrix& added, const Matrix& before, const Matrix& plain) {
  const DType dtype = before.dtype();
  Matrix expected(1, 1, dtype);
  for (std::int64_t i = 0; i < before.rows() * before.view().cols; ++i) {
    expected.set(0, before.get(i) + 0.5f * plain.get(i));
    const float bound = dtype == DType::kF32 ? 1e-5f : std::abs(expected.get(0)) / 128 + 1e-6f;
    ASSERT_NEAR(added.get(i), expected.get(0), bound) << to_string(dtype) << " " << i;
  }
}

}  // namespace switchyard::testing
