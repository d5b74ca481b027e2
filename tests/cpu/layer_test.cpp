// The CPU engine's output against the fp64 reference, for every model of the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "model/errors.h"
#include "protocol/partition.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

class EveryModel : public ::testing::TestWithParam<ModelEntry> {
 protected:
  LayerSpec spec_ = small_spec(GetParam());
  MoeWeights weights(DType dtype) const { return make_weights(spec_, dtype, 11, 1); }
};

TEST_P(EveryModel, Fp32MatchesFp64) {
  const MoeWeights w = weights(DType::kF32);
  for (const int tokens : {1, 7, 64, 1000}) {
    for (const int ranks : {1, 2, 4, 8}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << ranks << " ranks");
      const Batch batch = random_batch(spec_, tokens, DType::kF32, 100 + tokens);
      const BatchResult result =
          run_batch(spec_, w, batch, Shares::even(tokens, ranks), DType::kF32);
      expect_same_routing(spec_, w, batch, result);
      EXPECT_LE(output_error(spec_, w, batch, result), 1e-5);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(EveryModel, Bf16IsAsGoodAsAStraightforwardProgram) {
  const MoeWeights w = weights(DType::kBF16);
  for (const int tokens : {1, 7, 64, 1000}) {
    for (const int ranks : {1, 4}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << ranks << " ranks");
      const Batch batch = random_batch(spec_, tokens, DType::kBF16, 200 + tokens);
      const BatchResult result =
          run_batch(spec_, w, batch, Shares::even(tokens, ranks), DType::kBF16);
      expect_same_routing(spec_, w, batch, result);
      expect_accurate(spec_, w, batch, result);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(EveryModel, SameBitsOnEveryRepetitionAndRankCount) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    expect_same_bits(spec_, weights(dtype), dtype, {203, {1, 2, 4}});
  }
}

// Shapes at which the GEMM library changes its instructions with the number of tokens: the gate of
// few experts and a small shared expert.
TEST(SameBits, HoweverTokensAreDealt) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    LayerSpec spec = spec_of(128, 256, 8, 2);
    spec.shared_intermediate = 40;
    const MoeWeights w = generate_weights(spec, dtype, 21, {.num_threads = 1});
    for (const std::int64_t tokens : {5, 61, 130}) {
      const Batch batch = random_batch(spec, tokens, dtype, 22);
      const BatchResult alone = run_batch(spec, w, batch, Shares::even(tokens, 1), dtype);
      for (const int ranks : {2, 3, 4, 8}) {
        const BatchResult result = run_batch(spec, w, batch, Shares::even(tokens, ranks), dtype);
        EXPECT_EQ(result.weights, alone.weights) << tokens << " tokens, " << ranks << " ranks";
        EXPECT_TRUE(result.output == alone.output) << tokens << " tokens, " << ranks << " ranks";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModel, ::testing::ValuesIn(model_table()), name_of_model);

LayerSpec plain_spec(int experts, int top_k) { return spec_of(96, 64, experts, top_k); }

// Batches with a given routing, checked in fp32 on several rank counts.
void expect_exact(const LayerSpec& spec, const SyntheticRouting& routing, std::int64_t tokens,
                  const std::vector<Shares>& shares) {
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {});
  Batch batch{
      Matrix::random(tokens, spec.hidden, DType::kF32, 17), routing.ids, routing.weights, {}};
  for (const Shares& s : shares) {
    const BatchResult result = run_batch(spec, w, batch, s, DType::kF32);
    EXPECT_EQ(result.ids, routing.ids);
    EXPECT_LE(output_error(spec, w, batch, result), 1e-5) << s.count.size() << " ranks";
  }
}

std::vector<Shares> all_rank_counts(std::int64_t tokens) {
  return {Shares::even(tokens, 1), Shares::even(tokens, 2), Shares::even(tokens, 4),
          Shares::even(tokens, 8)};
}

TEST(Routing, EverySkew) {
  for (const int top_k : {1, 2, 8, 16}) {
    const LayerSpec spec = plain_spec(24, top_k);
    for (const double beta : {1.0, 0.8, 0.5, 0.3, 0.1}) {
      SCOPED_TRACE(::testing::Message() << "top-" << top_k << " beta " << beta);
      expect_exact(spec, synthetic_routing(300, 24, top_k, beta, 9), 300, all_rank_counts(300));
    }
  }
}

TEST(Routing, OneHotAndUnpickedExperts) {
  const LayerSpec spec = plain_spec(24, 1);
  SyntheticRouting one_hot{std::vector<std::int32_t>(150, 5), std::vector<float>(150, 0.75f)};
  expect_exact(spec, one_hot, 150, all_rank_counts(150));
}

TEST(Routing, ExpertsNotDivisibleByRanks) {
  for (const int experts : {1, 3, 7, 13}) {
    const LayerSpec spec = plain_spec(experts, 1);
    expect_exact(spec, synthetic_routing(77, experts, 1, 0.8, 4), 77, all_rank_counts(77));
  }
}

// As many as routing takes, and one more.
TEST(Routing, AThousandExperts) {
  for (const int experts : {513, 1024}) {
    const LayerSpec spec = spec_of(64, 48, experts, 8);
    const MoeWeights w = make_weights(spec, DType::kBF16);
    for (const int tokens : {1, 40, 300}) {
      for (const int ranks : {1, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << experts << " experts, " << tokens << " tokens, " << ranks << " ranks");
        const Batch batch = random_batch(spec, tokens, DType::kBF16, 7);
        const BatchResult result =
            run_batch(spec, w, batch, Shares::even(tokens, ranks), DType::kBF16);
        expect_same_routing(spec, w, batch, result);
        expect_accurate(spec, w, batch, result);
      }
    }
  }
  const LayerSpec spec = spec_of(64, 48, 1025, 8);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  EXPECT_ERROR(
      run_batch(spec, w, random_batch(spec, 1, DType::kBF16, 7), Shares::even(1, 1), DType::kBF16),
      kInvalidArgument, "num_experts is 1025", "1 to 1024");
}

TEST(Routing, RanksWithDifferentTokenCounts) {
  const LayerSpec spec = plain_spec(16, 4);
  const SyntheticRouting routing = synthetic_routing(101, 16, 4, 0.7, 2);
  expect_exact(spec, routing, 101,
               {Shares::of({0, 101}), Shares::of({100, 1}), Shares::of({1, 0, 99, 1}),
                Shares::of({0, 0, 0, 101, 0, 0, 0, 0})});
}

TEST(Routing, EmptySlotsContributeNothing) {
  const LayerSpec spec = plain_spec(16, 4);
  SyntheticRouting routing = synthetic_routing(90, 16, 4, 1.0, 2);
  for (std::size_t i = 0; i < routing.ids.size(); i += 3) routing.ids[i] = kNoExpert;
  for (std::size_t i = 0; i < 8; ++i) routing.ids[i] = kNoExpert;  // two tokens without any expert
  expect_exact(spec, routing, 90, all_rank_counts(90));
}

TEST(Routing, NoTokensAtAll) {
  const LayerSpec spec = plain_spec(16, 4);
  expect_exact(spec, {}, 0, all_rank_counts(0));
}

TEST(Capacity, DropsAreCountedAndContributeNothing) {
  LayerSpec spec = plain_spec(8, 2);
  spec.capacity_factor = 1.0f;
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {});
  const SyntheticRouting routing = synthetic_routing(128, 8, 2, 0.6, 1);
  const Batch batch{
      Matrix::random(128, spec.hidden, DType::kF32, 1), routing.ids, routing.weights, {}};
  std::int64_t dropped_by_slots = 0;
  for (const CapacityRule rule : {CapacityRule::kSlots, CapacityRule::kTokens}) {
    spec.capacity_rule = rule;
    for (const int ranks : {1, 4}) {
      const Shares shares = Shares::even(128, ranks);
      const BatchResult result = run_batch(spec, w, batch, shares, DType::kF32);
      const auto expected = reference::forward(spec, w,
                                               {.activations = batch.x.view(),
                                                .topk_ids = routing.ids,
                                                .topk_weights = routing.weights,
                                                .tokens_per_rank = shares.count});
      std::int64_t dropped = 0;
      for (const ForwardStats& stats : result.stats) dropped += stats.dropped_slots;
      EXPECT_GT(dropped, 0);
      EXPECT_EQ(dropped, expected.num_dropped);
      EXPECT_LE(reference::relative_error(result.output.floats(), expected.output), 1e-5);
      if (rule == CapacityRule::kSlots) dropped_by_slots = dropped;
    }
  }
  // FlashDMoE's rule: 8 experts keep 16 of 256 slots each at most.
  const BatchResult half = run_batch(spec, w, batch, Shares::even(128, 1), DType::kF32);
  EXPECT_GE(half.stats[0].dropped_slots, 128);
  EXPECT_GT(half.stats[0].dropped_slots, dropped_by_slots);
}

// A rank that refuses what it was given tells the others, which would wait for it.
TEST(MakingALayer, EndsOnAllRanksWhereOneRefuses) {
  const LayerSpec spec = plain_spec(6, 2);
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  const auto refused = [&](ErrorCode code, const char* part, const auto& change) {
    const auto begin = std::chrono::steady_clock::now();
    expect_thrown(run_ranks(World::threads(3),
                            [&](const World& world) {
                              LayerSpec its = spec;
                              MoeWeights mine = weights_of_rank(weights, world.rank(), 3);
                              LayerOptions options;
                              if (world.rank() == 1) change(its, mine, options);
                              MoeLayer(world, its, mine, options);
                            }),
                  code, part);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, World::threads(1)[0].deadline() / 2);
  };
  refused(ErrorCode::kInvalidArgument, "num_threads is -1",
          [](LayerSpec&, MoeWeights&, LayerOptions& o) { o.cpu.num_threads = -1; });
  refused(ErrorCode::kInvalidArgument, "top_k is 9",
          [](LayerSpec& s, MoeWeights&, LayerOptions&) { s.top_k = 9; });
  refused(ErrorCode::kShapeMismatch, "experts[2].down",
          [](LayerSpec&, MoeWeights& w, LayerOptions&) { w.experts[2].down.rows = 3; });
  refused(ErrorCode::kInvalidArgument, "compute type f16",
          [](LayerSpec&, MoeWeights&, LayerOptions& o) { o.compute = DType::kF16; });
}

TEST(MakingALayer, RanksWithoutExpertsComputeInTheTypeOfTheOthers) {
  const LayerSpec spec = plain_spec(2, 1);
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF8E4M3}) {
    const MoeWeights w = make_weights(spec, dtype), other = make_weights(spec, dtype, 77);
    const Batch batch = random_batch(spec, 20, DType::kBF16, 5);
    const Shares shares = Shares::even(20, 4);
    BatchResult result = empty_result(spec, batch, 4, DType::kF32), expected = result;
    const auto own = [&](const MoeWeights& all, const World& world) {
      MoeWeights mine = all;
      const ExpertRange range = own_experts(2, world.rank(), 4);
      for (int e = 0; e < 2; ++e) {
        if (e < range.begin || e >= range.end) mine.experts[static_cast<std::size_t>(e)] = {};
      }
      return mine;
    };
    run_all_ranks(World::threads(4), [&](const World& world) {
      MoeLayer layer(world, spec, own(other, world));
      MoeLayer told(world, spec, own(w, world), {.compute = layer.compute()});
      layer.rebind(own(w, world));
      forward_share(layer, batch, shares, world.rank(), result);
      forward_share(told, batch, shares, world.rank(), expected);
    });
    EXPECT_TRUE(result.output == expected.output) << to_string(dtype);
  }
}

TEST(MakingALayer, HandlesThatWereMovedFromSaySo) {
  const LayerSpec spec = plain_spec(2, 1);
  MoeLayer layer(World::single(), spec, make_weights(spec, DType::kBF16));
  const MoeLayer taken = std::move(layer);
  EXPECT_EQ(taken.spec(), spec);
  const char* const words = "the layer was moved out of this variable";
  EXPECT_ERROR(layer.spec(), kInvalidArgument, words);
  EXPECT_ERROR(layer.check(), kInvalidArgument, words);
  EXPECT_ERROR(layer.forward({}, {}), kInvalidArgument, words);
}

TEST(Capacity, RulesRoundUp) {
  LayerSpec spec = plain_spec(8, 3);
  EXPECT_EQ(expert_capacity(spec, 100), kNoCapacity);
  spec.capacity_factor = 1;
  EXPECT_EQ(expert_capacity(spec, 100), 38u);  // 300 / 8
  EXPECT_EQ(expert_capacity(spec, 8), 3u);
  spec.capacity_rule = CapacityRule::kTokens;
  EXPECT_EQ(expert_capacity(spec, 100), 13u);  // 100 / 8
  EXPECT_EQ(expert_capacity(spec, 8), 1u);
  EXPECT_EQ(expert_capacity(spec, 0), 0u);
  spec.capacity_factor = 1e30f;
  EXPECT_EQ(expert_capacity(spec, 100), kNoCapacity);
}

// Most decimals have no float of their own value, and half of those that stand for them are larger.
TEST(Capacity, IsThatOfTheFactorsDecimals) {
  LayerSpec spec = plain_spec(10, 1);
  for (int tenths = 1; tenths <= 40; ++tenths) {
    for (const int share : {10, 30, 70, 1000}) {
      spec.capacity_factor = static_cast<float>(tenths) / 10;
      EXPECT_EQ(expert_capacity(spec, 10 * share), static_cast<std::uint32_t>(tenths * share / 10));
    }
  }
  spec.capacity_factor = 1.21f;
  EXPECT_EQ(expert_capacity(spec, 100), 13u);
}

TEST(Types, Fp16Fp8AndMixedTypes) {
  const LayerSpec spec = plain_spec(8, 2);
  struct Case {
    DType weights, input, output;
    double bound;
  };
  for (const Case& c : {Case{DType::kF16, DType::kF32, DType::kF32, 1e-5},
                        Case{DType::kF16, DType::kF16, DType::kF16, 1e-3},
                        Case{DType::kF8E4M3, DType::kBF16, DType::kBF16, 0},
                        Case{DType::kF8E4M3, DType::kF32, DType::kF32, 0},
                        Case{DType::kF32, DType::kBF16, DType::kF32, 1e-5},
                        Case{DType::kBF16, DType::kF16, DType::kF32, 0}}) {
    SCOPED_TRACE(::testing::Message() << to_string(c.weights) << " weights, " << to_string(c.input)
                                      << " in, " << to_string(c.output) << " out");
    const MoeWeights w = generate_weights(spec, c.weights, 3, {});
    const Batch batch = random_batch(spec, 130, c.input, 6);
    for (const int ranks : {1, 2}) {
      const BatchResult result = run_batch(spec, w, batch, Shares::even(130, ranks), c.output);
      double yardstick = 0;
      const double error =
          output_error(spec, w, batch, result, &yardstick, c.weights == DType::kF8E4M3);
      EXPECT_LE(error, c.bound > 0 ? c.bound : 2 * yardstick);
    }
  }
}

TEST(Types, Fp8InFp32IsExactArithmetic) {
  const LayerSpec spec = plain_spec(8, 2);
  const MoeWeights w = generate_weights(spec, DType::kF8E4M3, 3, {});
  const Batch batch = random_batch(spec, 130, DType::kF32, 6);
  const BatchResult result =
      run_batch(spec, w, batch, Shares::even(130, 2), DType::kF32, {.compute = DType::kF32});
  EXPECT_LE(output_error(spec, w, batch, result), 1e-5);
}

TEST(Gate, NanLogitsLoseOnlyTheirExperts) {
  LayerSpec spec = plain_spec(8, 2);
  const MoeWeights clean = generate_weights(spec, DType::kF32, 3, {});
  Batch batch = random_batch(spec, 40, DType::kF32, 6);
  batch.x.set(7 * spec.hidden + 3, NAN);  // every logit of token 7 becomes NaN
  const BatchResult result = run_batch(spec, clean, batch, Shares::even(40, 2), DType::kF32);
  EXPECT_EQ(result.stats[0].nan_logits, 8);
  EXPECT_EQ(result.stats[0].nan_tokens, 1);
  EXPECT_EQ(result.stats[1].nan_tokens, 0);
  EXPECT_EQ(result.ids[14], kNoExpert);
  EXPECT_EQ(result.ids[15], kNoExpert);
  for (std::int64_t i = 0; i < 40 * spec.hidden; ++i) {
    ASSERT_TRUE(std::isfinite(result.output.get(i))) << i;
  }
}

TEST(Stats, BytesEqualTheClosedForm) {
  const LayerSpec spec = plain_spec(16, 4);
  const int ranks = 4, tokens = 200;
  const SyntheticRouting routing = synthetic_routing(tokens, 16, 4, 0.8, 2);
  const Batch batch{
      Matrix::random(tokens, spec.hidden, DType::kF32, 1), routing.ids, routing.weights, {}};
  const MoeWeights w = generate_weights(spec, DType::kF32, 3, {});
  const Shares shares = Shares::even(tokens, ranks);
  const BatchResult result = run_batch(spec, w, batch, shares, DType::kF32);
  const Batch empty{Matrix(0, spec.hidden, DType::kF32), {}, {}, {}};
  const BatchResult nothing = run_batch(spec, w, empty, Shares::even(0, ranks), DType::kF32);
  const std::uint64_t row = 96 * 4;
  std::vector<std::uint64_t> sent(ranks), returned(ranks), received_tokens(ranks);
  for (int r = 0; r < ranks; ++r) {
    for (std::int64_t t = shares.first[r]; t < shares.first[r] + shares.count[r]; ++t) {
      std::map<int, int> slots_on;
      for (int k = 0; k < 4; ++k) ++slots_on[routing.ids[static_cast<std::size_t>(t * 4 + k)] / 4];
      for (const auto& [rank, slots] : slots_on) {
        if (rank == r) continue;
        sent[r] += row + 4 * slots;
        returned[rank] += row * slots;
        ++received_tokens[rank];
      }
    }
  }
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(result.stats[r].dispatch_bytes, sent[r]);
    EXPECT_EQ(result.stats[r].combine_bytes, returned[r]);
    EXPECT_EQ(result.stats[r].signal_bytes, 3 * 16 * 8u);
    // Beside what a pass of no tokens uses: the tokens and entries that came, and cells.
    EXPECT_EQ(result.stats[r].heap_bytes_used - nothing.stats[r].heap_bytes_used,
              received_tokens[r] * row + returned[r] / row * 4 + 50 * 4 * row);
    EXPECT_LT(result.stats[r].dispatch_bytes + result.stats[r].combine_bytes,
              result.stats[r].padded_all_to_all_bytes);
  }
}

}  // namespace
}  // namespace switchyard::testing
