// Weights as callers have them on the device: in other layouts, changed in place, in other memory.
#include <gtest/gtest.h>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/specs.h"

namespace switchyard::testing {
namespace {

// All of a layer's weights in device memory, where the host may change them.
class DeviceWeights {
 public:
  explicit DeviceWeights(const MoeWeights& host) : views(host) {
    for (FfnWeights& expert : views.experts) take(expert);
    take(views.shared);
    take(views.router);
    take(views.router_bias);
    take(views.correction_bias);
    take(views.shared_gate);
    views.owner.reset();
  }
  // The weights of `host`, of the same shapes, in the same memory.
  void overwrite(const MoeWeights& host) {
    next_ = 0;
    writes_ = true;
    MoeWeights other = host;
    for (FfnWeights& expert : other.experts) take(expert);
    take(other.shared);
    take(other.router);
    take(other.router_bias);
    take(other.correction_bias);
    take(other.shared_gate);
  }

  MoeWeights views;

 private:
  const void* put(const void* from, std::size_t bytes) {
    if (!writes_) {
      buffers_.push_back(std::make_unique<gpu::DeviceBuffer>(bytes));
    }
    gpu::DeviceBuffer& buffer = *buffers_[writes_ ? next_++ : buffers_.size() - 1];
    buffer.upload(from, bytes);
    return buffer.data();
  }
  void take(MatrixView& m) {
    if (m.empty()) return;
    if (m.scale != nullptr) {
      const auto scales = static_cast<std::size_t>((m.rows - 1) / m.scale_rows * m.scale_stride +
                                                   (m.cols - 1) / m.scale_cols + 1);
      m.scale = static_cast<const float*>(put(m.scale, scales * sizeof(float)));
    }
    m.data = put(m.data,
                 static_cast<std::size_t>((m.rows - 1) * m.row_stride + m.cols) * size_of(m.dtype));
  }
  void take(VectorView& v) {
    if (!v.empty()) v.data = put(v.data, static_cast<std::size_t>(v.size) * size_of(v.dtype));
  }
  void take(FfnWeights& ffn) {
    for (MatrixView* m : {&ffn.gate, &ffn.up, &ffn.down}) take(*m);
    for (VectorView* v : {&ffn.gate_bias, &ffn.up_bias, &ffn.down_bias}) take(*v);
  }

  std::vector<std::unique_ptr<gpu::DeviceBuffer>> buffers_;
  std::size_t next_ = 0;
  bool writes_ = false;
};

LayerSpec spec_with_everything() { return with_everything(spec_of(584, 360, 16, 4), 200); }

using GpuLayouts = OnGpu<::testing::TestWithParam<GateUpLayout>>;
INSTANTIATE_TEST_SUITE_P(All, GpuLayouts, ::testing::ValuesIn(kGateUpLayouts));

// Gate and up are used where they are, except for transposed ones and up first, which the device
// repacks.
TEST_P(GpuLayouts, GiveTheSameBits) {
  const bool copied =
      GetParam() == GateUpLayout::kTransposed || GetParam() == GateUpLayout::kUpFirst;
  LayerSpec spec = spec_of(584, 360, 16, 4);
  for (const bool clamped : {false, true}) {
    if (clamped) spec.activation = {.alpha = 1.702f, .limit = 0.5f, .up_bias = 1};
    const MoeWeights host = make_weights(spec, DType::kBF16, 3);
    const LaidOutWeights laid_out(spec, host, GetParam());
    gpu::DeviceBuffer memory(laid_out.memory.size());
    memory.upload(laid_out.memory.data(), memory.bytes());
    // Gate and up stand before down, which has the same form in all layouts but the transposed.
    const std::vector<std::uint16_t> zero(std::size_t{16} * 2 * 360 * 584);
    gpu::DeviceBuffer no_gate_up(zero.size() * 2);
    no_gate_up.upload(zero.data(), no_gate_up.bytes());
    for (const int tokens : {5, 40, 290, 1000}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens" << (clamped ? ", clamped" : ""));
      const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
      const BatchResult expected = DeviceLayer(spec, host, tokens).run(batch, DType::kBF16);
      DeviceLayer layer(spec, laid_out.at(memory.data()), tokens);
      EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
      // Memory that is used in place changes with it.
      gpu::DeviceBuffer other(memory.bytes());
      gpu::copy_memory(other.data(), memory.data(), memory.bytes());
      DeviceLayer changes(spec, laid_out.at(other.data()), tokens);
      gpu::copy_memory(other.data(), no_gate_up.data(), no_gate_up.bytes());
      gpu::synchronize_device();
      const BatchResult zeros = changes.run(batch, DType::kBF16);
      EXPECT_EQ(zeros.output == expected.output, copied);
      if (!copied) continue;
      changes.layer().refresh(changes.stream().handle());
      const std::vector<float> y = changes.run(batch, DType::kBF16).output.floats();
      EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float v) { return v == 0; }));
    }
  }
}

TEST_P(GpuLayouts, InFp8GiveTheSameBits) {
  const LayerSpec spec = spec_of(640, 384, 16, 4);
  const MoeWeights host = make_weights(spec, kFp8, 3);
  const LaidOutWeights laid_out(spec, host, GetParam());
  gpu::DeviceBuffer memory(laid_out.memory.size());
  memory.upload(laid_out.memory.data(), memory.bytes());
  for (const int tokens : {5, 40, 290, 1000}) {
    SCOPED_TRACE(tokens);
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    const BatchResult expected = DeviceLayer(spec, host, tokens).run(batch, DType::kBF16);
    DeviceLayer layer(spec, laid_out.at(memory.data()), tokens);
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected.output);
  }
}

using GpuChangedWeights = OnGpu<::testing::TestWithParam<DType>>;
INSTANTIATE_TEST_SUITE_P(Types, GpuChangedWeights,
                         ::testing::Values(DType::kBF16, DType::kF16, DType::kF32, kFp8));

TEST_P(GpuChangedWeights, InPlaceAreSeenAfterRefresh) {
  LayerSpec spec = spec_with_everything();
  if (GetParam() == kFp8) spec.hidden = 592;
  const MoeWeights first = make_weights(spec, GetParam(), 3),
                   next = make_weights(spec, GetParam(), 7);
  for (const int tokens : {5, 290}) {
    SCOPED_TRACE(tokens);
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    const BatchResult expected[] = {DeviceLayer(spec, first, tokens).run(batch, DType::kBF16),
                                    DeviceLayer(spec, next, tokens).run(batch, DType::kBF16)};
    EXPECT_FALSE(expected[0].output == expected[1].output);
    DeviceWeights weights(first);
    DeviceLayer layer(spec, weights.views, tokens);
    EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected[0].output);
    weights.overwrite(next);
    layer.layer().refresh(layer.stream().handle());
    const BatchResult refreshed = layer.run(batch, DType::kBF16);
    EXPECT_TRUE(refreshed.output == expected[1].output);
    EXPECT_EQ(refreshed.ids, expected[1].ids);
    // In a graph, with the pass behind it.
    layer.poison();
    gpu::Graph graph = gpu::Graph::capture(layer.stream(), [&] {
      layer.layer().refresh(layer.stream().handle());
      layer.enqueue();
    });
    for (const MoeWeights* const which : {&first, &next}) {
      weights.overwrite(*which);
      graph.launch(layer.stream());
      EXPECT_TRUE(layer.fetch().output == expected[which == &next ? 1 : 0].output);
    }
  }
}

TEST_P(GpuChangedWeights, OfAnotherArrayAreSeenAfterRebind) {
  LayerSpec spec = spec_with_everything();
  if (GetParam() == kFp8) spec.hidden = 592;
  const MoeWeights first = make_weights(spec, GetParam(), 3),
                   next = make_weights(spec, GetParam(), 7);
  const Batch batch = random_batch(spec, 40, DType::kBF16, 4);
  const BatchResult expected[] = {DeviceLayer(spec, first, 40).run(batch, DType::kBF16),
                                  DeviceLayer(spec, next, 40).run(batch, DType::kBF16)};
  const DeviceWeights one(first), other(next);
  DeviceLayer layer(spec, one.views, 40);
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected[0].output);
  layer.layer().rebind(other.views);
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected[1].output);
  layer.layer().rebind(first);  // in host memory
  EXPECT_TRUE(layer.run(batch, DType::kBF16).output == expected[0].output);
}

using GpuRefresh = OnGpu<::testing::Test>;

TEST_F(GpuRefresh, OfHostMemoryIsNotCaptured) {
  const LayerSpec spec = spec_with_everything();
  MoeWeights host = make_weights(spec, DType::kBF16, 3);
  DeviceLayer let_go(spec, host, 40);
  EXPECT_ERROR(let_go.layer().refresh(), kUnsupported, "rebind()");
  const std::shared_ptr<const void> owner = std::move(host.owner);
  host.owner.reset();
  DeviceLayer layer(spec, host, 40);
  layer.layer().refresh(layer.stream().handle());
  EXPECT_ERROR(
      gpu::Graph::capture(layer.stream(), [&] { layer.layer().refresh(layer.stream().handle()); }),
      kUnsupported, "in host memory");
}

}  // namespace
}  // namespace switchyard::testing
