// Batches through the GPU engine, with everything it writes poisoned beforehand.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string_view>

#include "gpu/device.h"
#include "support/accuracy.h"
#include "support/layers.h"
#include "support/on_gpu.h"

namespace switchyard::testing {

// One batch in device memory, with room for its results.
class DeviceBatch {
 public:
  DeviceBatch(const LayerSpec& spec, const Batch& batch, DType output_dtype)
      : spec_(spec), batch_(batch), dtype_(output_dtype) {
    const auto tokens = static_cast<std::size_t>(batch.x.rows());
    const std::size_t slots = tokens * static_cast<std::size_t>(spec.top_k);
    const auto hidden = static_cast<std::size_t>(spec.hidden);
    x_ = upload(batch.x.view().data, tokens * hidden * size_of(batch.x.dtype()));
    const MatrixView x = batch.x.view();
    if (x.scale != nullptr) {
      x_scales_ = upload(x.scale, tokens * static_cast<std::size_t>(x.scale_stride) * 4);
    }
    token_ids_ = upload(batch.token_ids.data(), batch.token_ids.size() * 4);
    given_ids_ = upload(batch.topk_ids.data(), batch.topk_ids.size() * 4);
    given_weights_ = upload(batch.topk_weights.data(), batch.topk_weights.size() * 4);
    y_ = gpu::DeviceBuffer(tokens * hidden * size_of(output_dtype));
    ids_ = gpu::DeviceBuffer(slots * 4);
    weights_ = gpu::DeviceBuffer(slots * 4);
  }

  // Other activations of the same shape, in the same memory.
  void replace_activations(const Batch& batch) { x_.upload(batch.x.view().data, x_.bytes()); }
  // Elements from one row of activations to the next, in place of the hidden size.
  void set_row_stride(std::int64_t stride) { row_stride_ = stride; }

  void poison(const gpu::Stream& stream) {
    for (gpu::DeviceBuffer* buffer : {&y_, &ids_, &weights_}) {
      if (buffer->bytes() != 0) buffer->fill(0xff, stream);
    }
  }

  // `Layer` is MoeLayer or LayerEngine.
  template <typename Layer>
  void enqueue(Layer& layer, const gpu::Stream& stream, const AdjustCall& adjust = {}) {
    const auto words = [](const gpu::DeviceBuffer& b) { return b.bytes() / 4; };
    ForwardInput input{.activations = batch_.x.view()};
    input.activations.data = x_.data();
    if (row_stride_) input.activations.row_stride = *row_stride_;
    if (input.activations.scale != nullptr) {
      input.activations.scale = reinterpret_cast<const float*>(x_scales_.data());
    }
    input.topk_ids = {reinterpret_cast<const std::int32_t*>(given_ids_.data()), words(given_ids_)};
    input.topk_weights = {reinterpret_cast<const float*>(given_weights_.data()),
                          words(given_weights_)};
    input.token_ids = {reinterpret_cast<const std::int32_t*>(token_ids_.data()), words(token_ids_)};
    input.stream = stream.handle();
    ForwardOutput output{.data = y_.data(), .dtype = dtype_};
    output.topk_ids = {reinterpret_cast<std::int32_t*>(ids_.data()), words(ids_)};
    output.topk_weights = {reinterpret_cast<float*>(weights_.data()), words(weights_)};
    if (adjust) adjust(input, output, 0);
    layer.forward(input, output);
  }

  // After the stream has passed it.
  BatchResult fetch() const {
    BatchResult result = empty_result(spec_, batch_, 1, dtype_);
    if (y_.bytes() != 0) {
      y_.download(result.output.row(0), y_.bytes());
      ids_.download(result.ids.data(), ids_.bytes());
      weights_.download(result.weights.data(), weights_.bytes());
    }
    return result;
  }

  // As above, reduced to one number.
  std::size_t checksum() const {
    std::string bytes(y_.bytes(), '\0');
    if (!bytes.empty()) y_.download(bytes.data(), bytes.size());
    return std::hash<std::string_view>()(bytes);
  }

 private:
  static gpu::DeviceBuffer upload(const void* data, std::size_t bytes) {
    gpu::DeviceBuffer buffer(bytes);
    if (bytes != 0) buffer.upload(data, bytes);
    return buffer;
  }

  LayerSpec spec_;
  Batch batch_;
  DType dtype_;
  std::optional<std::int64_t> row_stride_;
  gpu::DeviceBuffer x_, x_scales_, token_ids_, given_ids_, given_weights_, y_, ids_, weights_;
};

// A layer on the current GPU.
class DeviceLayer {
 public:
  DeviceLayer(const LayerSpec& spec, const MoeWeights& weights, int max_tokens,
              LayerOptions options = {})
      : spec_(spec) {
    options.backend = Backend::kCuda;
    options.max_tokens = max_tokens;
    if (options.deadline.count() == 0) options.deadline = std::chrono::seconds(5);
    layer_ = std::make_unique<MoeLayer>(world(), spec, weights, options);
  }

  // The world of all these layers.
  static const World& world() {
    static const World world = World::single();
    return world;
  }

  MoeLayer& layer() { return *layer_; }
  const LayerSpec& spec() const { return spec_; }
  const gpu::Stream& stream() const { return stream_; }

  void load(const Batch& batch, DType output_dtype) {
    batch_ = std::make_unique<DeviceBatch>(spec_, batch, output_dtype);
  }
  void replace_activations(const Batch& batch) { batch_->replace_activations(batch); }
  void set_row_stride(std::int64_t stride) { batch_->set_row_stride(stride); }
  void poison() { batch_->poison(stream_); }
  void enqueue(const AdjustCall& adjust = {}) { batch_->enqueue(*layer_, stream_, adjust); }
  BatchResult fetch() {
    stream_.synchronize();
    BatchResult result = batch_->fetch();
    result.stats[0] = layer_->stats();
    return result;
  }

  BatchResult run(const Batch& batch, DType output_dtype, const AdjustCall& adjust = {}) {
    load(batch, output_dtype);
    poison();
    enqueue(adjust);
    return fetch();
  }

 private:
  LayerSpec spec_;
  gpu::Stream stream_;
  std::unique_ptr<MoeLayer> layer_;
  std::unique_ptr<DeviceBatch> batch_;
};

// Passes of 1 to 1000 tokens, of a layer for 1000, route as the reference does and repeat their
// bits. accurate(batch, result) holds each result to its bound.
template <typename Accurate>
void expect_good_at_every_size(DeviceLayer& layer, const MoeWeights& weights, int repetitions,
                               Accurate&& accurate) {
  for (const int tokens : {1, 7, 33, 64, 1000}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    const Batch batch = random_batch(layer.spec(), tokens, DType::kBF16, 200 + tokens);
    const BatchResult result = layer.run(batch, DType::kBF16);
    expect_same_routing(layer.spec(), weights, batch, result);
    accurate(batch, result);
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      EXPECT_TRUE(layer.run(batch, DType::kBF16).output == result.output) << "repeated";
    }
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace switchyard::testing
