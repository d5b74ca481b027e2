// route_warp() against route(), in an emulated warp: what tests/gpu/route_test.cu tests on a GPU,
// with fewer tokens, anywhere.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>

#include "routing/emulated_warp.h"
// After it: code for warps.
#include "routing/route_cases.h"
#include "support/identifier.h"

namespace switchyard {
namespace {

using test::EmulatedWarp;
using test::Routed;
using test::Tokens;

// One token of each kind.
constexpr int kTokens = static_cast<int>(test::Kind::kCount);

template <int kPerLane>
Routed route_in_warp(const Tokens& tokens) {
  const routing::DeviceRouting routing = routing::make_device_routing(tokens.spec);
  const auto top_k = static_cast<std::size_t>(tokens.spec.top_k);
  Routed routed;
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens.count()); ++t) {
    const float* const row = &tokens.logits[t * static_cast<std::size_t>(routing.num_experts)];
    const std::int32_t* const hashed = tokens.hashed.empty() ? nullptr : &tokens.hashed[t * top_k];
    routed.ids.resize((t + 1) * top_k);
    routed.weights.resize((t + 1) * top_k);
    EmulatedWarp::run([&](int lane) {
      float logits[kPerLane];
      routing::load_logits(row, routing.num_experts, logits);
      routing::Choice choice{};
      const routing::RouteStatus status =
          routing::route_warp(routing, logits, tokens.bias.data(), hashed, choice);
      // Every lane has the same; the last one's is compared.
      if (lane == EmulatedWarp::kLanes - 1) routed.status.push_back(status);
      if (const auto slot = static_cast<std::size_t>(lane); slot < top_k) {
        routed.ids[t * top_k + slot] = choice.id;
        routed.weights[t * top_k + slot] = choice.weight;
      }
    });
  }
  return routed;
}

constexpr auto in_warp = [](const Tokens& tokens) {
  return routing::with_per_lane(tokens.spec.num_experts, [&](auto per_lane) {
    return route_in_warp<decltype(per_lane)::value>(tokens);
  });
};

class EmulatedRouteOfModels : public ::testing::TestWithParam<ModelEntry> {};
TEST_P(EmulatedRouteOfModels, IsTheHosts) { test::test_model(GetParam(), 2 * kTokens, in_warp); }
INSTANTIATE_TEST_SUITE_P(Models, EmulatedRouteOfModels, ::testing::ValuesIn(model_table()),
                         [](const auto& param_info) {
                           return testing::identifier(param_info.param.name);
                         });

class EmulatedRouteOfFamilies : public ::testing::TestWithParam<test::Family> {};
TEST_P(EmulatedRouteOfFamilies, IsTheHosts) {
  std::mt19937 random(2);
  test::test_layer(GetParam().spec, 2 * kTokens, random, GetParam().name, in_warp);
}
INSTANTIATE_TEST_SUITE_P(Families, EmulatedRouteOfFamilies, ::testing::ValuesIn(test::families()),
                         [](const auto& param_info) {
                           return testing::identifier(param_info.param.name);
                         });

class EmulatedRouteOfSizes : public ::testing::TestWithParam<int> {};
TEST_P(EmulatedRouteOfSizes, IsTheHostsForEveryCombination) {
  test::test_combinations(GetParam(), kTokens, in_warp);
}
INSTANTIATE_TEST_SUITE_P(Sizes, EmulatedRouteOfSizes, ::testing::Values(7, 65, 160));

TEST(EmulatedWarp, LanesThatComeToDifferentCollectivesAreAnError) {
  const auto diverging = [](int lane) {
    if (lane == 3) {
      __ballot_sync(~0u, true);
    } else {
      __any_sync(~0u, true);
    }
  };
  EXPECT_THROW(EmulatedWarp::run(diverging), test::Diverged);
  EXPECT_THROW(EmulatedWarp::run([](int lane) {
                 if (lane != 7) __any_sync(~0u, true);
               }),
               test::Diverged);
}

}  // namespace
}  // namespace switchyard
