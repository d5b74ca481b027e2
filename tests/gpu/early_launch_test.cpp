// Layers behind kernels that invite the next one before they have written anything.
#include <gtest/gtest.h>

#include <vector>

#include "early_copy.h"
#include "gpu/device.h"
#include "support/device_batch.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

// A layer whose activations, ids and weights come from early kernels, and whose outputs go through
// one.
class EarlyChain {
 public:
  EarlyChain(const LayerSpec& spec, const MoeWeights& weights, int tokens)
      : layer_(spec, weights, tokens), spec_(spec), tokens_(tokens) {
    for (std::uint64_t seed = 0; seed < kInputs; ++seed) {
      Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 40 + seed), {}, {}, {}};
      const SyntheticRouting routing =
          synthetic_routing(tokens, spec.num_experts, spec.top_k, 0.8, 50 + seed);
      batch.topk_ids = routing.ids;
      batch.topk_weights = routing.weights;
      expected_.push_back(layer_.run(batch, DType::kBF16).output);
      x_.push_back(uploaded(batch.x.view().data, row_bytes()));
      ids_.push_back(uploaded(routing.ids.data(), routing.ids.size() * 4));
      weights_.push_back(uploaded(routing.weights.data(), routing.weights.size() * 4));
      batches_.push_back(std::move(batch));
    }
    layer_.load(batches_[0], DType::kBF16);
    x_.emplace_back(row_bytes());
    ids_.emplace_back(ids_[0].bytes());
    weights_.emplace_back(weights_[0].bytes());
    y_ = gpu::DeviceBuffer(row_bytes());
    // Allocations between passes would keep kernels apart.
    for (int pass = 0; pass < kPasses; ++pass) results_.emplace_back(row_bytes());
  }

  static constexpr int kPasses = 30;

  void enqueue(int passes) {
    const auto copy = [&](const gpu::DeviceBuffer& to, const gpu::DeviceBuffer& from) {
      enqueue_early_copy(to.data(), from.data(), from.bytes(), layer_.stream());
    };
    for (int i = 0; i < passes; ++i, ++passes_) {
      const std::size_t input = passes_ % kInputs;
      copy(x_.back(), x_[input]);
      copy(ids_.back(), ids_[input]);
      copy(weights_.back(), weights_[input]);
      layer_.enqueue([&](ForwardInput& in, ForwardOutput& out, std::size_t) {
        in.activations.data = x_.back().data();
        in.topk_ids = {reinterpret_cast<const std::int32_t*>(ids_.back().data()), slots()};
        in.topk_weights = {reinterpret_cast<const float*>(weights_.back().data()), slots()};
        out.data = y_.data();
      });
      copy(results_.at(passes_), y_);
    }
  }
  void expect_right() {
    layer_.stream().synchronize();
    layer_.layer().check();
    ASSERT_EQ(passes_, results_.size());
    for (std::size_t pass = 0; pass < results_.size(); ++pass) {
      Matrix result = expected_[pass % kInputs];
      results_[pass].download(result.row(0), results_[pass].bytes());
      ASSERT_TRUE(result == expected_[pass % kInputs]) << "pass " << pass;
    }
  }

 private:
  static constexpr std::uint64_t kInputs = 3;

  static gpu::DeviceBuffer uploaded(const void* data, std::size_t bytes) {
    gpu::DeviceBuffer buffer(bytes);
    buffer.upload(data, bytes);
    return buffer;
  }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(spec_.hidden) * 2;
  }
  std::size_t slots() const { return static_cast<std::size_t>(tokens_ * spec_.top_k); }

  DeviceLayer layer_;
  LayerSpec spec_;
  int tokens_;
  std::vector<Batch> batches_;
  std::vector<Matrix> expected_;
  std::vector<gpu::DeviceBuffer> x_, ids_, weights_, results_;  // the last of inputs: the layer's
  gpu::DeviceBuffer y_;
  std::size_t passes_ = 0;  // enqueued
};

// Few tokens, a small pass and a large one are three kernels.
class EarlyLaunch : public OnGpu<::testing::TestWithParam<int>> {
 protected:
  LayerSpec spec_ = spec_of(512, 384, 16, 4);
  MoeWeights weights_ = make_weights(spec_, DType::kBF16, 3);
};
INSTANTIATE_TEST_SUITE_P(Tokens, EarlyLaunch, ::testing::Values(1, 24, 300));

TEST_P(EarlyLaunch, PassesSeeWhatTheKernelBeforeHasWritten) {
  EarlyChain chain(spec_, weights_, GetParam());
  chain.enqueue(EarlyChain::kPasses);
  chain.expect_right();
}

// Blocks of one layer's kernel wait for each other. If early kernels of two layers each had a part
// of the SMs, both would wait up to the deadline.
TEST_P(EarlyLaunch, LayersOnTwoStreamsLeaveEachOtherRoom) {
  EarlyChain one(spec_, weights_, GetParam()), other(spec_, weights_, 300);
  for (int i = 0; i < EarlyChain::kPasses; ++i) {
    one.enqueue(1);
    other.enqueue(1);
  }
  one.expect_right();
  other.expect_right();
}

}  // namespace
}  // namespace switchyard::testing
