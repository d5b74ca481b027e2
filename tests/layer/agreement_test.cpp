// The errors of ranks that disagree on their layer.
#include "layer/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard {
namespace {

Declaration declaration() { return {testing::spec_of(64, 32, 16, 4), 10, DType::kF32}; }

// Rank 1 declares something else; what rank 0 tells of it.
std::string difference(const std::function<void(Declaration&)>& change) {
  std::string told;
  test::run_threads(World::threads(2, test::with_deadline(test::kGenerous)), [&](World& world) {
    Declaration mine = declaration();
    if (world.rank() == 1) change(mine);
    const std::string message =
        test::error_of(ErrorCode::kSpecMismatch, [&] { agree(world.fabric(), mine); });
    if (world.rank() == 0) told = message;
  });
  return told;
}

TEST(Agreement, ValuesAreToldByTheirNames) {
  using ::testing::HasSubstr;
  EXPECT_THAT(difference([](Declaration& d) { d.compute = DType::kBF16; }),
              HasSubstr("rank 0 and rank 1 disagree on compute: f32 here, bf16 there"));
  EXPECT_THAT(difference([](Declaration& d) { d.compute = DType::kF8E4M3; }),
              HasSubstr("f32 here, f8_e4m3 there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.activation.gated = false; }),
              HasSubstr("spec.activation: swiglu here, silu there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.activation.kind = ActivationKind::kRelu2; }),
              HasSubstr("spec.activation: swiglu here, gated relu2 there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.routing.method = RoutingMethod::kHash; }),
              HasSubstr("spec.routing.method: top-k here, hash there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.routing.score = ScoreFunction::kSigmoid; }),
              HasSubstr("spec.routing.score: softmax here, sigmoid there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.routing.group_score = GroupScore::kMax; }),
              HasSubstr("spec.routing.group_score: sum of two here, max there"));
  EXPECT_THAT(difference([](Declaration& d) { d.spec.routing.renormalize ^= true; }),
              HasSubstr("spec.routing.renormalize: "));
  EXPECT_THAT(difference([](Declaration& d) { d.weights = DType::kF4E2M1; }),
              HasSubstr("weights: f32 here, f4_e2m1 there"));
  EXPECT_THAT(difference([](Declaration& d) { d.max_tokens = 11; }),
              HasSubstr("max_tokens: 10 here, 11 there"));
}

TEST(Agreement, EqualDeclarationsAreFine) {
  test::run_threads(World::threads(3, test::with_deadline(test::kGenerous)),
                    [](World& world) { agree(world.fabric(), declaration()); });
}

}  // namespace
}  // namespace switchyard
