// Four-bit experts over ranks on GPUs. Where there are fewer GPUs than ranks, ranks share them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

class FourBitsOnRanks : public OnGpu<::testing::TestWithParam<DType>> {};
INSTANTIATE_TEST_SUITE_P(Types, FourBitsOnRanks, ::testing::Values(DType::kF4E2M1, DType::kU4),
                         [](const auto& type) {
                           return type.param == DType::kF4E2M1 ? "Mxfp4" : "Int4";
                         });

TEST_P(FourBitsOnRanks, EverySkew) {
  for (const int top_k : {1, 8}) {
    const LayerSpec spec = spec_of(608, 352, 27, top_k);
    const MoeWeights w = make_weights(spec, GetParam());
    for (const int ranks : {2, 4}) {
      for (const double beta : {1.0, 0.1}) {
        for (const int tokens : {8, 1500}) {
          SCOPED_TRACE(::testing::Message() << "top-" << top_k << " on " << ranks << " ranks, beta "
                                            << beta << ", " << tokens << " tokens");
          const Batch batch = routed(spec, tokens, beta);
          expect_accurate(spec, w, batch,
                          run_on_gpus(spec, w, batch, Shares::even(tokens, ranks), DType::kBF16));
        }
      }
    }
  }
}

// Also of ranks without an expert, or without a token.
TEST_P(FourBitsOnRanks, TheSameBitsHoweverMany) {
  for (const int experts : {6, 64}) {
    const LayerSpec spec = spec_of(608, 352, experts, 4);
    const MoeWeights w = make_weights(spec, GetParam());
    const Batch batch = routed(spec, 900, 0.9);
    const BatchResult one = run_on_gpus(spec, w, batch, Shares::even(900, 1), DType::kBF16);
    expect_accurate(spec, w, batch, one);
    for (const Shares& shares : {Shares::even(900, 2), Shares::even(900, 5), Shares::even(900, 8),
                                 Shares::of({0, 900}), Shares::of({700, 0, 0, 200})}) {
      SCOPED_TRACE(::testing::Message()
                   << experts << " experts on " << shares.count.size() << " ranks");
      const BatchResult many = run_on_gpus(spec, w, batch, shares, DType::kBF16);
      EXPECT_EQ(many.ids, one.ids);
      EXPECT_TRUE(many.output == one.output);
    }
  }
}

// Where ranks promise how many tokens they have, passes of few rows per expert run the kernels for
// low ones, on GPUs of their own: with 11 rows per expert and more (a promise of 132 tokens) that
// of tiles up to 32. The bits are those of other kernels, and a rank without tokens runs one. Where
// layers choose the experts themselves, a launch does so before the pass.
template <typename Check>
void expect_low_passes(DType dtype, const LayerOptions& options, Check&& check) {
  const LayerSpec spec = spec_of(608, 352, 96, 4);
  const MoeWeights w = make_weights(spec, dtype);
  for (const std::optional<double> beta : {std::optional(1.0), std::optional(0.2), {}}) {
    for (const auto& [first, second] :
         {std::pair{90, 110}, {120, 0}, {3, 120}, {150, 200}, {0, 260}}) {
      SCOPED_TRACE(::testing::Message()
                   << (beta ? fmt::format("beta {}", *beta) : "experts chosen by the layers")
                   << ", ranks of " << first << " and " << second << " tokens");
      const Shares shares = Shares::of({first, second});
      const Batch batch = beta ? routed(spec, first + second, *beta)
                               : random_batch(spec, first + second, DType::kBF16, 9);
      const AdjustCall promise = [most = std::max(first, second)](ForwardInput& input,
                                                                  ForwardOutput&, std::size_t) {
        input.max_tokens_per_rank = most;
      };
      const BatchResult low =
          run_on_gpus(spec, w, batch, shares, DType::kBF16, 20, options, promise);
      check(spec, w, batch, low);
      EXPECT_TRUE(run_on_gpus(spec, w, batch, shares, DType::kBF16, 2, options).output ==
                  low.output);
    }
  }
}
TEST_P(FourBitsOnRanks, LowPasses) {
  expect_low_passes(GetParam(), {},
                    [](const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                       const BatchResult& result) { expect_accurate(spec, w, batch, result); });
}

// Ranks that promise few tokens give the routing, also where a launch could find it.
TEST_P(FourBitsOnRanks, FewTokensWhoseExpertsTheLayersChooseAreRefused) {
  const LayerSpec spec = spec_of(608, 352, 16, 4);
  const MoeWeights w = make_weights(spec, GetParam());
  const Batch batch = random_batch(spec, 6, DType::kBF16, 9);
  const AdjustCall promise = [](ForwardInput& input, ForwardOutput&, std::size_t) {
    input.max_tokens_per_rank = 3;
  };
  expect_call_refused(spec, w, batch, promise, ErrorCode::kUnsupported, "max_tokens_per_rank is 3");
}

TEST_P(FourBitsOnRanks, ASharedExpertBesideThem) {
  LayerSpec spec = spec_of(608, 352, 16, 4);
  spec.shared_intermediate = 160;
  const MoeWeights w = make_weights(spec, GetParam());
  const Batch batch = routed(spec, 700, 0.8);
  expect_accurate(spec, w, batch,
                  run_on_gpus(spec, w, batch, Shares::of({400, 0, 300}), DType::kBF16));
}

TEST_P(FourBitsOnRanks, WeightsOnInputBiasesAndClamps) {
  for (const bool on_input : {true, false}) {
    LayerSpec spec = spec_of(608, 352, 16, 4);
    spec.expert_bias = true;
    spec.weight_on_input = on_input;
    spec.activation.alpha = 1.702f;
    spec.activation.limit = 1;
    spec.activation.up_bias = 1;
    const MoeWeights w = make_weights(spec, GetParam());
    const Batch batch = routed(spec, 700, 0.8);
    expect_accurate(spec, w, batch,
                    run_on_gpus(spec, w, batch, Shares::of({400, 99, 201}), DType::kBF16));
  }
}

using FourBitsInFp8OnRanks = OnGpu<::testing::Test>;

TEST_F(FourBitsInFp8OnRanks, LowPasses) {
  expect_low_passes(DType::kF4E2M1, {.compute = kFp8},
                    [](const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                       const BatchResult& result) {
                      expect_accurate_fp8(spec, w, batch, result, 2, reference::kWholeRow);
                    });
}

TEST_F(FourBitsInFp8OnRanks, TheSameBitsHoweverMany) {
  for (const int experts : {6, 64}) {
    const LayerSpec spec = spec_of(608, 352, experts, 4);
    const MoeWeights w = make_weights(spec, DType::kF4E2M1);
    const Batch batch = routed(spec, 900, 0.9);
    const LayerOptions options{.compute = kFp8};
    const BatchResult one =
        run_on_gpus(spec, w, batch, Shares::even(900, 1), DType::kBF16, 2, options);
    expect_accurate_fp8(spec, w, batch, one, 2, reference::kWholeRow);
    for (const Shares& shares : {Shares::even(900, 2), Shares::even(900, 5), Shares::of({0, 900}),
                                 Shares::of({700, 0, 0, 200})}) {
      SCOPED_TRACE(::testing::Message()
                   << experts << " experts on " << shares.count.size() << " ranks");
      const BatchResult many = run_on_gpus(spec, w, batch, shares, DType::kBF16, 2, options);
      EXPECT_EQ(many.ids, one.ids);
      EXPECT_TRUE(many.output == one.output);
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
