// Layers of devices on several hosts for tests: the devices are threads, the network reorders,
// delays and refuses.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "exchange/staged_layer.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/hosts.h"
#include "support/layers.h"
#include "support/thread_device.h"

namespace switchyard::testing {

struct Staged {
  ThreadDevice* device;  // the layer's
  std::unique_ptr<LayerEngine> layer;
};

inline Staged make_staged(const World& world, const LayerSpec& spec, const MoeWeights& weights,
                          LayerOptions options = {}, std::int64_t most_rows = 50,
                          bool networks_reach_devices = false) {
  if (options.deadline.count() == 0) options.deadline = test::kGenerous;
  auto device = std::make_unique<ThreadDevice>();
  device->networks_reach_it = networks_reach_devices;
  ThreadDevice* const known = device.get();
  return {known,
          make_staged_layer(world, spec, weights_of_rank(weights, world.rank(), world.size()),
                            options, std::move(device), Backend::kCpu, most_rows)};
}

inline void forward(Staged& staged, const Batch& batch, const Shares& shares, int rank,
                    BatchResult& result, const AdjustCall& adjust = {}) {
  forward_share(*staged.layer, batch, shares, rank, result, adjust);
}

inline double distance(const BatchResult& result, const BatchResult& expected) {
  const std::vector<float> values = expected.output.floats();
  return reference::relative_error(result.output.floats(),
                                   std::vector<double>(values.begin(), values.end()));
}

// The same batch in a layer of one host, in fp32.
inline BatchResult run_on_one_host(const LayerSpec& spec, const MoeWeights& weights,
                                   const Batch& batch, const Shares& shares) {
  return run_batch(spec, weights, batch, shares, DType::kF32,
                   {.max_tokens = static_cast<int>(batch.x.rows())});
}

inline BatchResult run_over(const std::vector<int>& ranks_of_hosts, const LayerSpec& spec,
                            const MoeWeights& weights, const Batch& batch, const Shares& shares,
                            DType output, LayerOptions options = {}, const AdjustCall& adjust = {},
                            bool networks_reach_devices = false) {
  test::ChaosHosts hosts{.ranks_of_hosts = ranks_of_hosts};
  hosts.chaos.takes_device_memory = networks_reach_devices;
  options.max_tokens = static_cast<int>(batch.x.rows());
  BatchResult result = empty_result(spec, batch, static_cast<int>(shares.count.size()), output),
              again = result;
  test::expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    Staged staged = make_staged(world, spec, weights, options, 50, networks_reach_devices);
    forward(staged, batch, shares, world.rank(), result, adjust);
    forward(staged, batch, shares, world.rank(), again, adjust);
  }));
  EXPECT_TRUE(result.output == again.output) << "repeated";
  EXPECT_EQ(result.ids, again.ids) << "repeated";
  return result;
}

// Over three hosts. Tokens that the caller has quantised have the same bits.
inline void expect_accurate_in_fp8(bool networks_reach_devices) {
  const LayerSpec spec = spec_of(256, 128, 12, 4);
  const MoeWeights weights = generate_weights(spec, DType::kF8E4M3, 3, {.num_threads = 1});
  Batch batch = random_batch(spec, 60, DType::kBF16, 5);
  const LayerOptions options{.compute = DType::kF8E4M3};
  const auto run = [&](const Batch& tokens) {
    return run_over({1, 1, 1}, spec, weights, tokens, Shares::of({20, 40, 0}), DType::kBF16,
                    options, {}, networks_reach_devices);
  };
  const BatchResult result = run(batch);
  double yardstick = 0;
  const double error = output_error(spec, weights, batch, result, &yardstick, true);
  EXPECT_LE(error, 2 * yardstick);
  EXPECT_LE(distance_to_fp8_program(spec, weights, batch, result), 0.5 * yardstick);
  // The gate sees the tokens as they are given, so these get the routing that those had.
  batch.topk_ids = result.ids;
  batch.topk_weights = result.weights;
  const BatchResult routed = run(batch);
  batch.x = Matrix::quantised(batch.x);
  EXPECT_TRUE(run(batch).output == routed.output);
}

inline Batch routed_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype,
                          std::uint64_t seed) {
  const SyntheticRouting routing =
      synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, 0.6, seed);
  return {Matrix::random(tokens, spec.hidden, dtype, seed), routing.ids, routing.weights, {}};
}

}  // namespace switchyard::testing
