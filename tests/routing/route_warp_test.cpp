// route_warp() against route(), in an emulated warp: what tests/gpu/route_test.cu tests on a GPU,
// with fewer tokens, anywhere.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

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

// with_rows(lane_body) calls lane_body(rows) with what a lane hands to route_warp().
template <typename WithRows>
Routed route_by(const Tokens& tokens, WithRows&& with_rows) {
  const routing::DeviceRouting routing = routing::make_device_routing(tokens.spec);
  const auto top_k = static_cast<std::size_t>(tokens.spec.top_k);
  Routed routed;
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens.count()); ++t) {
    const float* const row = &tokens.logits[t * static_cast<std::size_t>(routing.num_experts)];
    const std::int32_t* const hashed = tokens.hashed.empty() ? nullptr : &tokens.hashed[t * top_k];
    routed.ids.resize((t + 1) * top_k);
    routed.weights.resize((t + 1) * top_k);
    EmulatedWarp::run([&](int lane) {
      with_rows([&](auto& logits) {
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
    });
  }
  return routed;
}

constexpr auto in_registers = [](const Tokens& tokens) {
  return routing::with_per_lane(tokens.spec.num_experts, [&](auto per_lane) {
    return route_by(tokens, [](auto&& lane_body) {
      float logits[decltype(per_lane)::value];
      lane_body(logits);
    });
  });
};

constexpr auto in_memory = [](const Tokens& tokens) {
  const int count = (tokens.spec.num_experts + 31) / 32;
  std::vector<float> values(static_cast<std::size_t>(32 * count));
  std::vector<routing::OrderKey> keys(values.size());
  return route_by(tokens, [&](auto&& lane_body) {
    routing::warp::MemoryRows rows{values.data(), keys.data(), count};
    lane_body(rows);
  });
};

class EmulatedRouteOfModels : public ::testing::TestWithParam<ModelEntry> {};
TEST_P(EmulatedRouteOfModels, IsTheHosts) {
  test::test_model(GetParam(), 2 * kTokens, in_registers);
  test::test_model(GetParam(), kTokens, in_memory);
}
INSTANTIATE_TEST_SUITE_P(Models, EmulatedRouteOfModels, ::testing::ValuesIn(model_table()),
                         [](const auto& param_info) {
                           return testing::identifier(param_info.param.name);
                         });

class EmulatedRouteOfFamilies : public ::testing::TestWithParam<test::Family> {};
TEST_P(EmulatedRouteOfFamilies, IsTheHosts) {
  std::mt19937 random(2);
  test::test_layer(GetParam().spec, 2 * kTokens, random, GetParam().name, in_registers);
  test::test_layer(GetParam().spec, kTokens, random, GetParam().name, in_memory);
}
INSTANTIATE_TEST_SUITE_P(Families, EmulatedRouteOfFamilies, ::testing::ValuesIn(test::families()),
                         [](const auto& param_info) {
                           return testing::identifier(param_info.param.name);
                         });

class EmulatedRouteOfSizes : public ::testing::TestWithParam<int> {};
TEST_P(EmulatedRouteOfSizes, IsTheHostsForEveryCombination) {
  test::test_combinations(GetParam(), kTokens, in_registers);
}
TEST_P(EmulatedRouteOfSizes, IsTheHostsForEveryCombinationInMemory) {
  test::test_combinations(GetParam(), kTokens, in_memory);
}
INSTANTIATE_TEST_SUITE_P(Sizes, EmulatedRouteOfSizes, ::testing::Values(7, 65, 160));

// More experts than any listed model has. An emulated warp takes milliseconds for a token of so
// many, so this tests some combinations; tests/gpu/route_test.cu tests all.
class EmulatedRouteOfManyExperts : public ::testing::TestWithParam<int> {};
template <typename RouteOn>
void test_many_experts(int experts, RouteOn&& route_on) {
  std::mt19937 random(static_cast<std::uint32_t>(experts));
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const int top_k : {1, 10, 32}) {
      RoutingSpec spec{.score = score, .renormalize = top_k != 1};
      test::test_layer(test::routing_layer(experts, top_k, spec), kTokens, random, "top-k",
                       route_on);
      spec.has_correction_bias = true;
      test::test_layer(test::routing_layer(experts, top_k, spec), kTokens, random, "bias",
                       route_on);
    }
  }
  // Groups smaller than a row of 32 experts, as large, larger, and more than lanes.
  for (const int groups : {3, 4, 8, 32, 64, 171, experts / 2}) {
    if (experts % groups != 0) continue;
    test::test_layer(test::routing_layer(experts, 8,
                                         {.score = ScoreFunction::kSigmoid,
                                          .has_correction_bias = true,
                                          .num_groups = groups,
                                          .top_k_groups = groups - groups / 2,
                                          .group_score = groups % 3 == 0 ? GroupScore::kMax
                                                                         : GroupScore::kSumTopTwo}),
                     kTokens, random, std::to_string(groups) + " groups", route_on);
  }
  const RoutingSpec mixer{.method = RoutingMethod::kSparseMixer};
  test::test_layer(test::routing_layer(experts, 2, mixer), kTokens, random, "mixer", route_on);
  const RoutingSpec hash{.method = RoutingMethod::kHash, .score = ScoreFunction::kSqrtSoftplus};
  test::test_layer(test::routing_layer(experts, 6, hash), kTokens, random, "hash", route_on);
}
TEST_P(EmulatedRouteOfManyExperts, IsTheHosts) { test_many_experts(GetParam(), in_registers); }
TEST_P(EmulatedRouteOfManyExperts, IsTheHostsInMemory) { test_many_experts(GetParam(), in_memory); }
INSTANTIATE_TEST_SUITE_P(Experts, EmulatedRouteOfManyExperts,
                         ::testing::Values(512, 513, 768, 1000, 1024));

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
