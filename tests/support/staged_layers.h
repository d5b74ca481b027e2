// Layers of devices on several hosts for tests: the devices are threads, the network reorders,
// delays and refuses.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "exchange/staged_layer.h"
#include "support/hosts.h"
#include "support/layers.h"
#include "support/thread_device.h"

namespace switchyard::testing {

struct Staged {
  ThreadDevice* device;  // the layer's
  std::unique_ptr<LayerEngine> layer;
};

inline Staged make_staged(const World& world, const LayerSpec& spec, const MoeWeights& weights,
                          LayerOptions options = {}, SharedBy shared_by = SharedBy::kRank,
                          std::int64_t most_rows = 50, bool networks_reach_devices = false) {
  if (options.deadline.count() == 0) options.deadline = test::kGenerous;
  auto device = std::make_unique<ThreadDevice>();
  device->networks_reach_it = networks_reach_devices;
  ThreadDevice* const known = device.get();
  return {known,
          make_staged_layer(world, spec, weights_of_rank(weights, world.rank(), world.size()),
                            options, std::move(device), Backend::kCpu, most_rows, shared_by)};
}

// As forward_share() for a layer by itself.
inline void forward(Staged& staged, const Batch& batch, const Shares& shares, int rank,
                    BatchResult& result, const AdjustCall& adjust = {}) {
  const auto r = static_cast<std::size_t>(rank);
  const auto k = static_cast<std::size_t>(staged.layer->spec().top_k);
  const auto first = static_cast<std::size_t>(shares.first[r]);
  const auto count = static_cast<std::size_t>(shares.count[r]);
  ForwardInput input;
  input.activations = batch.x.rows_from(shares.first[r], shares.count[r]);
  if (!batch.topk_ids.empty()) {
    input.topk_ids = std::span(batch.topk_ids).subspan(first * k, count * k);
    input.topk_weights = std::span(batch.topk_weights).subspan(first * k, count * k);
  }
  if (!batch.token_ids.empty()) {
    input.token_ids = std::span(batch.token_ids).subspan(first, count);
  }
  ForwardOutput output;
  output.data = result.output.row(shares.first[r]);
  output.dtype = result.output.dtype();
  output.topk_ids = std::span(result.ids).subspan(first * k, count * k);
  output.topk_weights = std::span(result.weights).subspan(first * k, count * k);
  if (adjust) adjust(input, output, first);
  staged.layer->forward(input, output);
  result.stats[r] = staged.layer->stats();
}

inline void expect_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& failure : thrown) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

inline BatchResult run_over(const std::vector<int>& ranks_of_hosts, SharedBy shared_by,
                            const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                            const Shares& shares, DType output, LayerOptions options = {},
                            const AdjustCall& adjust = {}, bool networks_reach_devices = false) {
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = ranks_of_hosts;
  hosts.chaos.takes_device_memory = networks_reach_devices;
  options.max_tokens = static_cast<int>(batch.x.rows());
  BatchResult result = empty_result(spec, batch, static_cast<int>(shares.count.size()), output),
              again = result;
  expect_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    Staged staged =
        make_staged(world, spec, weights, options, shared_by, 50, networks_reach_devices);
    forward(staged, batch, shares, world.rank(), result, adjust);
    forward(staged, batch, shares, world.rank(), again, adjust);
  }));
  EXPECT_TRUE(result.output == again.output) << "repeated";
  EXPECT_EQ(result.ids, again.ids) << "repeated";
  return result;
}

inline Batch routed_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype,
                          std::uint64_t seed) {
  const SyntheticRouting routing =
      synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, 0.6, seed);
  return {Matrix::random(tokens, spec.hidden, dtype, seed), routing.ids, routing.weights, {}};
}

}  // namespace switchyard::testing
