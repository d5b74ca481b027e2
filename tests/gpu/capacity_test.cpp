// Layers with a capacity on GPUs: what they drop is what the reference drops, and what they keep
// has the bits of a layer that was told to leave the rest out.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

using GpuCapacity = OnGpu<::testing::Test>;

// The batch without the slots that each rank drops, counted here in the plainest way.
Batch kept_of(const LayerSpec& spec, Batch batch, const Shares& shares, std::int64_t& dropped) {
  for (std::size_t r = 0; r < shares.count.size(); ++r) {
    const std::uint32_t capacity = expert_capacity(spec, shares.count[r]);
    std::map<std::int32_t, std::uint32_t> used;
    for (std::int64_t i = shares.first[r] * spec.top_k;
         i < (shares.first[r] + shares.count[r]) * spec.top_k; ++i) {
      std::int32_t& id = batch.topk_ids[static_cast<std::size_t>(i)];
      if (id == kNoExpert || used[id]++ < capacity) continue;
      id = kNoExpert;
      batch.topk_weights[static_cast<std::size_t>(i)] = 0;
      ++dropped;
    }
  }
  return batch;
}

void expect_drops_of_reference(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                               const Shares& shares, bool fp8) {
  std::int64_t dropped = 0;
  const Batch kept = kept_of(spec, batch, shares, dropped);
  EXPECT_EQ(reference::forward(spec, weights,
                               {.activations = batch.x.view(),
                                .topk_ids = batch.topk_ids,
                                .topk_weights = batch.topk_weights,
                                .quantised = fp8,
                                .tokens_per_rank = shares.count})
                .num_dropped,
            dropped);

  const BatchResult result = run_on_gpus(spec, weights, batch, shares, DType::kBF16);
  EXPECT_EQ(result.ids, kept.topk_ids);
  EXPECT_EQ(result.weights, kept.topk_weights);
  std::int64_t counted = 0;
  for (const ForwardStats& stats : result.stats) counted += stats.dropped_slots;
  EXPECT_EQ(counted, dropped);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : kept.topk_ids) {
    if (id != kNoExpert) ++rows[static_cast<std::size_t>(id)];
  }
  EXPECT_EQ(result.stats[0].tokens_per_expert, rows);

  LayerSpec without = spec;
  without.capacity_factor = 0;
  const BatchResult told = run_on_gpus(without, weights, kept, shares, DType::kBF16);
  EXPECT_TRUE(result.output == told.output);
  if (fp8) {
    expect_accurate_fp8(without, weights, kept, told, 1.0);
  } else {
    expect_accurate(without, weights, kept, told);
  }
}

TEST_F(GpuCapacity, DropsWhatTheReferenceDrops) {
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(fp8 ? 592 : 584, 360, 24, 3);
    spec.shared_intermediate = 200;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16, 3);
    for (const CapacityRule rule : {CapacityRule::kSlots, CapacityRule::kTokens}) {
      for (const float factor : {0.25f, 1.0f, 1.5f}) {
        spec.capacity_rule = rule;
        spec.capacity_factor = factor;
        // Small passes, whose blocks each route all tokens, and large ones.
        for (const std::int64_t tokens : {1, 7, 32, 33, 500, 3000}) {
          for (const double beta : {1.0, 0.5}) {
            SCOPED_TRACE(::testing::Message()
                         << (fp8 ? "fp8" : "bf16") << ", factor " << factor << ", rule "
                         << static_cast<int>(rule) << ", " << tokens << " tokens, beta " << beta);
            expect_drops_of_reference(spec, w, routed(spec, tokens, beta), Shares::even(tokens, 1),
                                      fp8);
            if (HasFatalFailure() || HasNonfatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(GpuCapacity, EachRankHasACapacityOfItsOwn) {
  for (const bool fp8 : {false, true}) {
    LayerSpec spec = spec_of(fp8 ? 592 : 584, 360, 27, 3);
    spec.capacity_factor = 1;
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16, 3);
    for (const CapacityRule rule : {CapacityRule::kSlots, CapacityRule::kTokens}) {
      spec.capacity_rule = rule;
      for (const Shares& shares :
           {Shares::even(8, 2), Shares::even(1500, 2), Shares::of({700, 0, 33, 200})}) {
        const std::int64_t tokens =
            std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
        SCOPED_TRACE(::testing::Message()
                     << (fp8 ? "fp8, " : "bf16, ") << tokens << " tokens on " << shares.count.size()
                     << " ranks, rule " << static_cast<int>(rule));
        expect_drops_of_reference(spec, w, routed(spec, tokens, 0.6), shares, fp8);
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

// The gate's choices are dropped, too, and a full expert is full of its first tokens.
TEST_F(GpuCapacity, TheGatesChoicesAreDropped) {
  LayerSpec spec = spec_of(256, 128, 16, 2);
  // The kernel for few tokens, which sums in another order, takes no shared expert.
  spec.shared_intermediate = 64;
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {5, 32, 1000}) {
    SCOPED_TRACE(tokens);
    const Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 5), {}, {}, {}};
    spec.capacity_factor = 0;
    Batch all = batch;
    const Shares shares = Shares::even(tokens, 1);
    const BatchResult free = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    all.topk_ids = free.ids;
    all.topk_weights = free.weights;
    spec.capacity_factor = 0.75f;
    std::int64_t dropped = 0;
    const Batch kept = kept_of(spec, all, shares, dropped);
    const BatchResult result = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    EXPECT_GT(dropped, 0);
    EXPECT_EQ(result.ids, kept.topk_ids);
    EXPECT_EQ(result.weights, kept.topk_weights);
    EXPECT_EQ(result.stats[0].dropped_slots, dropped);
    spec.capacity_factor = 0;
    EXPECT_TRUE(result.output == run_on_gpus(spec, w, kept, shares, DType::kBF16).output);
  }
}

// Places of experts have capacities as experts do: a rank's rows of an expert go to one place.
TEST_F(GpuCapacity, WithExpertsInOtherPlaces) {
  LayerSpec spec = spec_of(256, 128, 4, 2);
  spec.capacity_factor = 0.5f;
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  MoeWeights placed = w;
  LayerOptions options;
  options.placement.expert_at = {2, 0, 3, 1};
  for (std::size_t p = 0; p < 4; ++p) {
    placed.experts[p] = w.experts[static_cast<std::size_t>(options.placement.expert_at[p])];
  }
  for (const int tokens : {20, 600}) {
    SCOPED_TRACE(tokens);
    const Batch batch = routed(spec, tokens, 0.8);
    const Shares shares = Shares::even(tokens, 1);
    const BatchResult plain = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    const BatchResult moved = run_on_gpus(spec, placed, batch, shares, DType::kBF16, 2, options);
    EXPECT_EQ(moved.ids, plain.ids);
    EXPECT_TRUE(moved.output == plain.output);
  }
}

}  // namespace
}  // namespace switchyard::testing
