// The forms in which a call may hand over its routing and take its output, against the fp64
// reference on one rank and on several.
#include <gtest/gtest.h>

#include "model/errors.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/calls.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

constexpr int kTokens = 60, kExperts = 16, kTopK = 4;

LayerSpec small_layer() { return spec_of(96, 64, kExperts, kTopK); }

class Calls : public ::testing::TestWithParam<int> {
 protected:
  Calls() {
    const SyntheticRouting routing = synthetic_routing(kTokens, kExperts, kTopK, 0.8, 2);
    batch_.topk_ids = routing.ids;
    batch_.topk_weights = routing.weights;
  }
  Shares shares() const { return Shares::even(kTokens, GetParam()); }
  BatchResult run(const Batch& batch, LayerOptions options = {},
                  const AdjustCall& adjust = {}) const {
    return run_batch(spec_, weights_, batch, shares(), DType::kF32, options, adjust);
  }
  // On one rank: the others would wait for the one that is refused.
  void refuse(ErrorCode code, const char* what, const Batch& batch, LayerOptions options = {},
              const AdjustCall& adjust = {}) const {
    EXPECT_ERROR(
        run_batch(spec_, weights_, batch, Shares::even(kTokens, 1), DType::kF32, options, adjust),
        code, what);
  }
  std::int64_t bad_slots(const BatchResult& result) const {
    std::int64_t all = 0;
    for (const ForwardStats& stats : result.stats) all += stats.bad_slots;
    return all;
  }

  LayerSpec spec_ = small_layer();
  MoeWeights weights_ = generate_weights(spec_, DType::kF32, 3, {});
  Batch batch_{Matrix::random(kTokens, spec_.hidden, DType::kF32, 17), {}, {}, {}};
};
INSTANTIATE_TEST_SUITE_P(Ranks, Calls, ::testing::Values(1, 2, 4));

TEST_P(Calls, IdsInI64AndWeightsInBf16) {
  const WideRouting wide(batch_);
  const BatchResult expected = run(wide.rounded);
  EXPECT_LE(output_error(spec_, weights_, wide.rounded, expected), 1e-5);
  const BatchResult result =
      run(batch_, {}, [&](ForwardInput& input, ForwardOutput&, std::size_t first) {
        const std::size_t slots = input.topk_ids.size();
        input.topk_ids = std::span(wide.ids).subspan(first * kTopK, slots);
        input.topk_weights = {wide.weights.data() + first * kTopK, DType::kBF16, slots};
      });
  EXPECT_EQ(result.ids, wide.rounded.topk_ids);
  EXPECT_EQ(result.weights, wide.rounded.topk_weights);
  EXPECT_TRUE(result.output == expected.output);
}

TEST_P(Calls, OtherTypesOfIdsAndWeightsAreRefused) {
  const auto refused = [&](const char* what, const AdjustCall& adjust) {
    refuse(ErrorCode::kDTypeMismatch, what, batch_, {}, adjust);
  };
  refused("topk_ids are f32; use i32 or i64", [](ForwardInput& in, ForwardOutput&, std::size_t) {
    in.topk_ids = {in.topk_ids.data(), DType::kF32, in.topk_ids.size()};
  });
  refused("topk_weights are f16; use f32 or bf16",
          [](ForwardInput& in, ForwardOutput&, std::size_t) {
            in.topk_weights = {in.topk_weights.data(), DType::kF16, in.topk_weights.size()};
          });
}

// Ids that frameworks give slots of experts elsewhere: the number of experts, or any above.
TEST_P(Calls, LargeIdsAreNoneWhereAsked) {
  Sentinels sentinels(batch_, kExperts);
  const BatchResult expected = run(sentinels.without);
  const LayerOptions options{.large_ids_are_none = true};
  const BatchResult result = run(sentinels.with, options);
  EXPECT_EQ(result.ids, sentinels.without.topk_ids);
  EXPECT_TRUE(result.output == expected.output);
  EXPECT_EQ(bad_slots(result), 0);
  refuse(ErrorCode::kInvalidArgument, "is 16; expert ids are 0 to 15", sentinels.with);
  sentinels.with.topk_ids[kTopK * 7] = -2;
  refuse(ErrorCode::kInvalidArgument, "is -2; expert ids are 0", sentinels.with, options);
}

TEST_P(Calls, BadIdsAreSkippedAndCountedWhereAsked) {
  BadRouting routing(batch_, kExperts, kTopK);
  routing.spoil(3 * kTopK, 1 << 30);
  const BatchResult expected = run(routing.good);
  LayerOptions options{.bad_ids = BadIds::kSkip};
  const BatchResult result = run(routing.bad, options);
  EXPECT_EQ(result.ids, routing.good.topk_ids);
  EXPECT_TRUE(result.output == expected.output);
  EXPECT_EQ(bad_slots(result), routing.count);
  EXPECT_LE(output_error(spec_, weights_, routing.good, result), 1e-5);
  refuse(ErrorCode::kInvalidArgument, "is 16;", routing.bad);
  // An id that means none is not bad.
  options.large_ids_are_none = true;
  EXPECT_EQ(bad_slots(run(routing.bad, options)), routing.count - 2);
}

TEST_P(Calls, IdleSlotsMayNameAnExpertOnceMore) {
  const IdleSlots slots(batch_, kTopK);
  for (const BadIds rule : {BadIds::kRaise, BadIds::kSkip}) {
    const BatchResult expected = run(slots.without, {.bad_ids = rule});
    const BatchResult result = run(slots.given, {.bad_ids = rule});
    EXPECT_EQ(result.ids, slots.without.topk_ids);
    EXPECT_TRUE(result.output == expected.output);
    EXPECT_EQ(result.stats[0].bad_slots, 0);
  }
}

TEST_P(Calls, IdsThatNoI32HoldsAreBad) {
  std::vector<std::int64_t> wide(batch_.topk_ids.begin(), batch_.topk_ids.end());
  wide[6] = (std::int64_t{1} << 32) + 3;  // whose lower half is an expert's
  const AdjustCall adjust = [&](ForwardInput& input, ForwardOutput&, std::size_t first) {
    input.topk_ids = std::span(wide).subspan(first * kTopK, input.topk_ids.size());
  };
  refuse(ErrorCode::kInvalidArgument, "topk_ids[1][2] is 4294967299", batch_, {}, adjust);
  const BatchResult result = run(batch_, {.bad_ids = BadIds::kSkip}, adjust);
  EXPECT_EQ(result.ids[6], kNoExpert);
  EXPECT_EQ(bad_slots(result), 1);
}

TEST_P(Calls, TokensOutsideTheHashTableAreSkippedWhereAsked) {
  spec_.routing.method = RoutingMethod::kHash;
  weights_ = generate_weights(spec_, DType::kF32, 3, {});
  Batch batch = random_batch(spec_, kTokens, DType::kF32, 4);
  const BatchResult good = run(batch);
  batch.token_ids[7] = -5;
  batch.token_ids[58] = static_cast<std::int32_t>(weights_.hash_table.rows);
  refuse(ErrorCode::kInvalidArgument, "token id -5 is outside", batch);
  const BatchResult result = run(batch, {.bad_ids = BadIds::kSkip});
  EXPECT_EQ(bad_slots(result), 2 * kTopK);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const bool bad = t == 7 || t == 58;
    for (std::int64_t i = t * kTopK; i < (t + 1) * kTopK; ++i) {
      EXPECT_EQ(result.ids[i], bad ? kNoExpert : good.ids[i]);
    }
    for (std::int64_t i = t * spec_.hidden; i < (t + 1) * spec_.hidden; ++i) {
      ASSERT_EQ(result.output.get(i), bad ? 0 : good.output.get(i)) << "token " << t;
    }
  }
}

// The layer's routing of logits that somebody else made: as of its own gate's, without a router.
class Logits : public ::testing::TestWithParam<std::tuple<int, DType>> {};
INSTANTIATE_TEST_SUITE_P(RanksAndTypes, Logits,
                         ::testing::Combine(::testing::Values(1, 2, 4),
                                            ::testing::Values(DType::kF32, DType::kBF16)));

TEST_P(Logits, AreRoutedAsTheLayerRoutes) {
  const auto [ranks, dtype] = GetParam();
  const LayerSpec grouped = grouped_routing(small_layer());
  LayerSpec shared = small_layer();
  shared.shared_intermediate = 48;
  shared.shared_sigmoid_gate = true;
  LayerSpec hashed = small_layer();
  hashed.routing.method = RoutingMethod::kHash;
  for (const LayerSpec& spec : {small_layer(), grouped, shared, hashed}) {
    MoeWeights weights = generate_weights(spec, DType::kF32, 3, {});
    const Batch batch = random_batch(spec, kTokens, DType::kF32, 4);
    // Rows further apart than they are long.
    constexpr int kStride = kExperts + 5;
    const Matrix logits = Matrix::random(kTokens, kStride, dtype, 9);
    weights.router = {};
    weights.router_bias = {};
    const BatchResult result = run_batch(
        spec, weights, batch, Shares::even(kTokens, ranks), DType::kF32, {},
        [&](ForwardInput& input, ForwardOutput&, std::size_t first) {
          input.logits = logits.rows_from(static_cast<std::int64_t>(first), input.activations.rows);
          input.logits.cols = kExperts;
        });
    std::vector<double> exact;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t e = 0; e < kExperts; ++e) exact.push_back(logits.get(t * kStride + e));
    }
    std::vector<float> bias;
    if (spec.routing.has_correction_bias) {
      const auto* const values = static_cast<const float*>(weights.correction_bias.data);
      ASSERT_EQ(weights.correction_bias.dtype, DType::kF32);
      bias.assign(values, values + kExperts);
    }
    std::vector<std::int32_t> table_rows;
    for (const std::int32_t id : batch.token_ids) {
      for (int k = 0; k < kTopK; ++k) {
        const void* const row = weights.hash_table.row(id);
        table_rows.push_back(weights.hash_table.dtype == DType::kI64
                                 ? static_cast<int>(static_cast<const std::int64_t*>(row)[k])
                                 : static_cast<const std::int32_t*>(row)[k]);
      }
    }
    const reference::Routing expected = reference::route(spec, exact, bias, table_rows);
    EXPECT_EQ(result.ids, expected.ids);
    for (std::size_t i = 0; i < expected.weights.size(); ++i) {
      ASSERT_NEAR(result.weights[i], expected.weights[i], 1e-5);
    }
    EXPECT_LE(output_error(spec, weights, batch, result), 1e-5);
  }
}

TEST_P(Calls, NanLogitsLoseOnlyTheirExperts) {
  Matrix logits = Matrix::random(kTokens, kExperts, DType::kF32, 9);
  for (int e = 0; e < kExperts; ++e) logits.set(7 * kExperts + e, NAN);
  logits.set(40 * kExperts + 3, NAN);
  Batch batch = batch_;
  batch.topk_ids.clear();
  batch.topk_weights.clear();
  const BatchResult result =
      run(batch, {}, [&](ForwardInput& input, ForwardOutput&, std::size_t first) {
        input.logits = logits.rows_from(static_cast<std::int64_t>(first), input.activations.rows);
      });
  std::int64_t nan_logits = 0, nan_tokens = 0;
  for (const ForwardStats& stats : result.stats) {
    nan_logits += stats.nan_logits;
    nan_tokens += stats.nan_tokens;
  }
  EXPECT_EQ(nan_logits, kExperts + 1);
  EXPECT_EQ(nan_tokens, 2);
  for (int k = 0; k < kTopK; ++k) EXPECT_EQ(result.ids[7 * kTopK + k], kNoExpert);
  EXPECT_LE(output_error(spec_, weights_, batch, result), 1e-5);
}

TEST_P(Calls, LogitsThatDoNotFitAreRefused) {
  const Matrix logits = Matrix::random(kTokens, kExperts, DType::kF32, 9);
  Batch batch = batch_;
  batch.topk_ids.clear();
  batch.topk_weights.clear();
  const auto with = [&](const auto& change) -> AdjustCall {
    return [&logits, change](ForwardInput& input, ForwardOutput&, std::size_t) {
      input.logits = logits.view();
      change(input.logits);
    };
  };
  const auto same = [](MatrixView&) {};
  refuse(ErrorCode::kInvalidArgument, "both logits and topk_ids", batch_, {}, with(same));
  refuse(ErrorCode::kShapeMismatch, "logits are [60, 15]", batch, {},
         with([](MatrixView& m) { m.cols = 15; }));
  refuse(ErrorCode::kDTypeMismatch, "logits are f16", batch, {},
         with([](MatrixView& m) { m.dtype = DType::kF16; }));
  refuse(ErrorCode::kInvalidArgument, "col_stride of 2", batch, {},
         with([](MatrixView& m) { m.col_stride = 2; }));
  spec_.routing.has_correction_bias = true;
  weights_.router = {};
  refuse(ErrorCode::kMissingTensor, "correction_bias", batch, {}, with(same));
}

// y = scale * sum, and y += that.
TEST_P(Calls, OutputsAreScaledAndAdded) {
  spec_.shared_intermediate = 48;
  weights_ = generate_weights(spec_, DType::kF32, 3, {});
  const BatchResult plain = run(batch_);
  const BatchResult scaled =
      run(batch_, {}, [](ForwardInput&, ForwardOutput& output, std::size_t) { output.scale = -2; });
  for (std::int64_t i = 0; i < kTokens * spec_.hidden; ++i) {
    ASSERT_EQ(scaled.output.get(i), -2 * plain.output.get(i)) << i;
  }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Matrix before = Matrix::random(kTokens, spec_.hidden, dtype, 31);
    const BatchResult added =
        run_batch(spec_, weights_, batch_, shares(), dtype, {},
                  [&](ForwardInput& input, ForwardOutput& output, std::size_t first) {
                    const auto row = static_cast<std::int64_t>(first);
                    std::memcpy(output.data, before.rows_from(row, 1).data,
                                static_cast<std::size_t>(input.activations.rows * spec_.hidden) *
                                    size_of(dtype));
                    output.scale = 0.5f;
                    output.accumulate = true;
                  });
    expect_half_added(added.output, before, plain.output);
  }
  refuse(ErrorCode::kInvalidArgument, "scale is inf", batch_, {},
         [](ForwardInput&, ForwardOutput& output, std::size_t) { output.scale = INFINITY; });
}

// A token without an expert adds nothing.
TEST_P(Calls, NothingIsAddedWhereThereIsNoExpert) {
  Batch none = batch_;
  std::fill(none.topk_ids.begin(), none.topk_ids.end(), kNoExpert);
  const BatchResult result =
      run(none, {}, [&](ForwardInput& input, ForwardOutput& output, std::size_t) {
        auto* const y = static_cast<float*>(output.data);
        std::fill_n(y, input.activations.rows * spec_.hidden, 1.5f);
        output.accumulate = true;
      });
  for (const float y : result.output.floats()) ASSERT_EQ(y, 1.5f);
}

}  // namespace
}  // namespace switchyard::testing
