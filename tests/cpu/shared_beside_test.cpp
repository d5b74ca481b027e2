// Layers whose shared expert is a layer of its own beside the routed experts': what the GPU engine
// does where routed experts are of four bits, here with the CPU engine, which the layer as a whole
// can be held to.
#include "layer/shared_beside.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/calls.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kMaxTokens = 64;

NoRouting no_routing() {
  const auto ids = std::make_shared<std::vector<std::int32_t>>(kMaxTokens, kNoExpert);
  const auto weights = std::make_shared<std::vector<float>>(kMaxTokens);
  return {{ids, ids->data()}, {weights, weights->data()}};
}

LayerOptions options_of(const World& world, std::optional<DType> compute) {
  LayerOptions options{.max_tokens = kMaxTokens, .compute = compute};
  options.deadline = world.deadline();
  return options;
}

std::unique_ptr<LayerEngine> beside(const World& world, const LayerSpec& spec,
                                    const MoeWeights& weights,
                                    std::optional<DType> compute = std::nullopt) {
  return make_shared_beside(world, spec, weights, options_of(world, compute), nullptr,
                            cpu::make_engine, no_routing);
}

struct Kind {
  const char* name;
  DType weights;
  std::optional<DType> compute;
  bool sigmoid;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class SharedBeside : public ::testing::TestWithParam<Kind> {
 protected:
  SharedBeside() : spec_(spec_of(256, 96, 8, 2)) {
    spec_.shared_intermediate = 160;
    spec_.shared_sigmoid_gate = GetParam().sigmoid;
    weights_ = make_weights(spec_, GetParam().weights);
  }
  bool quantised() const { return GetParam().compute == DType::kF8E4M3; }
  void expect_right(const Batch& batch, const BatchResult& result) const {
    double yardstick = 0;
    const double error = output_error(spec_, weights_, batch, result, &yardstick, quantised());
    EXPECT_LT(error, 2 * yardstick);
  }

  LayerSpec spec_;
  MoeWeights weights_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, SharedBeside,
                         ::testing::Values(Kind{"bf16", DType::kBF16, {}, false},
                                           Kind{"bf16_gated", DType::kBF16, {}, true},
                                           Kind{"mxfp4", DType::kF4E2M1, {}, false},
                                           Kind{"mxfp4_gated", DType::kF4E2M1, {}, true},
                                           Kind{"mxfp4_fp8", DType::kF4E2M1, DType::kF8E4M3, false},
                                           Kind{"int4", DType::kU4, {}, false}),
                         [](const auto& given) { return std::string(given.param.name); });

TEST_P(SharedBeside, IsAsGoodAsOneLayer) {
  const World world = World::single();
  const auto engine = beside(world, spec_, weights_, GetParam().compute);
  MoeLayer whole(world, spec_, weights_, {.max_tokens = kMaxTokens, .compute = GetParam().compute});
  EXPECT_EQ(engine->spec(), spec_);
  EXPECT_EQ(engine->compute(), whole.compute());
  for (const int tokens : {0, 1, 33, kMaxTokens}) {
    const Batch batch = random_batch(spec_, tokens, DType::kBF16, 7);
    BatchResult result = empty_result(spec_, batch, 1, DType::kBF16), expected = result;
    forward_share(*engine, batch, Shares::even(tokens, 1), 0, result);
    forward_share(whole, batch, Shares::even(tokens, 1), 0, expected);
    EXPECT_EQ(result.ids, expected.ids);
    EXPECT_EQ(result.weights, expected.weights);
    EXPECT_EQ(result.stats[0].tokens_per_expert, expected.stats[0].tokens_per_expert);
    if (tokens > 0) expect_right(batch, result);
  }
}

// A number that is none spoils its token and no other, whether gates see it or not.
TEST_P(SharedBeside, NumbersThatAreNoneAreSeen) {
  const World world = World::single();
  const auto engine = beside(world, spec_, weights_, GetParam().compute);
  MoeLayer whole(world, spec_, weights_, {.max_tokens = kMaxTokens, .compute = GetParam().compute});
  for (const bool given : {false, true}) {
    Batch batch = random_batch(spec_, 8, DType::kBF16, 7);
    for (const auto& [row, value] : {std::pair{1, std::nanf("")}, {4, HUGE_VALF}}) {
      batch.x.set(row * spec_.hidden + 5, value);
    }
    if (given) {
      batch.topk_ids.assign(std::size_t{8} * 2, kNoExpert);
      batch.topk_weights.assign(std::size_t{8} * 2, 0);
    }
    BatchResult result = empty_result(spec_, batch, 1, DType::kBF16), expected = result;
    forward_share(*engine, batch, Shares::even(8, 1), 0, result);
    forward_share(whole, batch, Shares::even(8, 1), 0, expected);
    for (std::int64_t row = 0; row < 8; ++row) {
      const auto is_none = [&](const BatchResult& of) {
        return std::isnan(of.output.get(row * spec_.hidden));
      };
      EXPECT_EQ(is_none(result), is_none(expected)) << "row " << row << given;
      EXPECT_EQ(is_none(result), row == 1 || row == 4) << "row " << row << given;
    }
  }
}

TEST_P(SharedBeside, OutputsAreScaledAndAdded) {
  const auto engine = beside(World::single(), spec_, weights_, GetParam().compute);
  const Batch batch = random_batch(spec_, 20, DType::kBF16, 5);
  const Shares shares = Shares::even(20, 1);
  BatchResult plain = empty_result(spec_, batch, 1, DType::kF32), added = plain;
  forward_share(*engine, batch, shares, 0, plain);
  const Matrix before = Matrix::random(20, spec_.hidden, DType::kF32, 31);
  added.output = before;
  forward_share(*engine, batch, shares, 0, added,
                [](ForwardInput&, ForwardOutput& output, std::size_t) {
                  output.scale = 0.5f;
                  output.accumulate = true;
                });
  for (std::int64_t i = 0; i < 20 * spec_.hidden; ++i) {
    ASSERT_NEAR(added.output.get(i), before.get(i) + 0.5f * plain.output.get(i), 1e-5f) << i;
  }
}

// Nine ranks are more than experts.
TEST_P(SharedBeside, RanksShareTheRoutedExperts) {
  const Batch batch = random_batch(spec_, 50, DType::kBF16, 9);
  for (const Shares& shares : {Shares::of({30, 0, 20}), Shares::even(50, 9)}) {
    const auto ranks = static_cast<int>(shares.count.size());
    BatchResult result = empty_result(spec_, batch, ranks, DType::kBF16);
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      const auto engine =
          beside(world, spec_, weights_of_rank(weights_, world.rank(), ranks), GetParam().compute);
      for (int pass = 0; pass < 3; ++pass) {
        forward_share(*engine, batch, shares, world.rank(), result);
        engine->rebind(weights_of_rank(weights_, world.rank(), ranks), nullptr);
      }
    });
    expect_right(batch, result);
  }
}

TEST_P(SharedBeside, GetsOtherWeights) {
  const auto engine = beside(World::single(), spec_, make_weights(spec_, GetParam().weights, 77),
                             GetParam().compute);
  engine->rebind(weights_, nullptr);
  const Batch batch = random_batch(spec_, 40, DType::kBF16, 5);
  BatchResult result = empty_result(spec_, batch, 1, DType::kBF16);
  forward_share(*engine, batch, Shares::even(40, 1), 0, result);
  expect_right(batch, result);
  MoeWeights without = weights_;
  without.shared = {};
  EXPECT_ERROR(engine->rebind(without, nullptr), kMissingTensor, "shared.");
  LayerSpec narrow = spec_;
  narrow.shared_intermediate = 128;
  EXPECT_ERROR(engine->rebind(make_weights(narrow, GetParam().weights), nullptr), kShapeMismatch,
               "shared.");
}

// A call that either layer would refuse is refused before the first of them has sent anything.
TEST(SharedBesideCalls, AreCheckedAsAWhole) {
  LayerSpec spec = spec_of(256, 96, 8, 2);
  spec.shared_intermediate = 160;
  spec.shared_sigmoid_gate = true;
  const MoeWeights weights = make_weights(spec, DType::kF8E4M3);
  const auto engine = beside(World::single(), spec, weights);
  ASSERT_EQ(engine->compute(), DType::kF8E4M3);
  Batch batch = random_batch(spec, 20, DType::kBF16, 5);
  BatchResult result = empty_result(spec, batch, 1, DType::kBF16);
  const Shares shares = Shares::even(20, 1);
  forward_share(*engine, batch, shares, 0, result);
  const std::uint64_t epoch = engine->stats().epoch;
  const Matrix codes(20, spec.hidden, DType::kF8E4M3);
  const std::vector<float> scales(20 * 2, 1.0f);
  EXPECT_ERROR(forward_share(*engine, batch, shares, 0, result,
                             [&](ForwardInput& input, ForwardOutput&, std::size_t) {
                               input.activations = codes.view();
                               input.activations.scale = scales.data();
                               input.activations.scale_rows = 1;
                               input.activations.scale_cols = 128;
                               input.activations.scale_stride = 2;
                             }),
               kInvalidArgument, "the shared expert's gate needs them unquantised");
  EXPECT_EQ(engine->stats().epoch, epoch);
}

TEST(SharedBesideCalls, RanksHaveTheSameSharedExpert) {
  LayerSpec spec = spec_of(256, 96, 8, 2);
  spec.shared_intermediate = 160;
  expect_thrown(run_ranks(World::threads(2),
                          [&](const World& world) {
                            LayerSpec mine = spec;
                            if (world.rank() == 1) mine.shared_intermediate = 128;
                            beside(world, mine, make_weights(mine, DType::kF4E2M1));
                          }),
                ErrorCode::kSpecMismatch, "shared_intermediate");
}

}  // namespace
}  // namespace switchyard::testing
