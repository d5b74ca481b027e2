// The gate's choice has the balancedness that was asked for.
#include "bench/skew.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "bench/suite.h"
#include "models/generate.h"
#include "reference/reference.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

constexpr double kSkewTolerance = 0.02;

// The geometry of a layer's routing; the experts themselves do not matter here.
LayerSpec routing_of(const BenchLayer& layer) {
  LayerSpec spec = layer.spec;
  spec.hidden = 512;
  spec.intermediate = 16;
  return spec;
}

TEST(BenchSkew, GateReachesTheBalancednessAskedFor) {
  for (const BenchLayer& layer : bench_suite("one_gpu_bf16").layers) {
    const LayerSpec spec = routing_of(layer);
    MoeWeights weights = generate_weights(spec, DType::kBF16, 1);
    const SkewedGate gate(spec, weights, 1024, DType::kBF16, 1);
    const double lowest = lowest_balancedness(spec.num_experts, spec.top_k);
    for (const double beta : {0.9, 0.7, 0.5}) {
      const double reached = balancedness(gate.histogram(1024, gate.skew_for(1024, beta)));
      EXPECT_NEAR(reached, std::max(beta, lowest), kSkewTolerance) << layer.model;
    }
    EXPECT_EQ(gate.skew_for(1024, 1), 0) << layer.model;
    EXPECT_GT(balancedness(gate.histogram(1024, 0)), 0.98) << layer.model;
  }
}

TEST(BenchSkew, FewTokensAreAsBalancedAsTheyCanBe) {
  const BenchLayer layer = bench_layer("qwen3-30b");
  const LayerSpec spec = routing_of(layer);
  MoeWeights weights = generate_weights(spec, DType::kBF16, 1);
  const SkewedGate gate(spec, weights, 64, DType::kBF16, 1);
  // One token chooses top_k experts, whatever is asked for.
  EXPECT_EQ(gate.skew_for(1, 0.5), 0);
  const std::vector<std::int64_t> one = gate.histogram(1, 0);
  EXPECT_EQ(std::accumulate(one.begin(), one.end(), std::int64_t{0}), spec.top_k);
  EXPECT_NEAR(balancedness(gate.histogram(8, gate.skew_for(8, 0.5))), 0.5, 0.05);
}

// The layer's own arithmetic, too, gives this histogram for the activations and the router.
TEST(BenchSkew, HistogramIsThatOfTheRealGate) {
  const LayerSpec spec = routing_of(bench_layer("olmoe"));
  MoeWeights weights = generate_weights(spec, DType::kBF16, 3);
  SkewedGate gate(spec, weights, 256, DType::kBF16, 3);
  const float skew = gate.skew_for(256, 0.8);
  const MatrixView x = gate.activations(256, skew);
  const std::vector<double> logits = reference::router_logits(spec, weights, x);
  const reference::Routing routing = reference::route(spec, logits, {}, {});
  std::vector<std::int64_t> counts(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : routing.ids) ++counts[static_cast<std::size_t>(id)];
  EXPECT_NEAR(balancedness(counts), 0.8, kSkewTolerance);
  const std::vector<std::int64_t> told = gate.histogram(256, skew);
  std::int64_t different = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) different += std::abs(counts[e] - told[e]);
  EXPECT_LE(different, 4);  // near ties
}

TEST(BenchSkew, ActivationsBeyondTheDrawnAreRefused) {
  const LayerSpec spec = routing_of(bench_layer("olmoe"));
  MoeWeights weights = generate_weights(spec, DType::kBF16, 3);
  SkewedGate gate(spec, weights, 4, DType::kBF16, 3);
  EXPECT_THROW(gate.activations(5, 0), Error);
}

}  // namespace
}  // namespace switchyard::bench
