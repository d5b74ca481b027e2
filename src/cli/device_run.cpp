#include "cli/device_run.h"

#include <fmt/format.h>

#include <span>
#include <vector>

#include "gpu/device.h"
#include "layer/compute.h"
#include "model/host_memory.h"

namespace switchyard::cli {
namespace {

template <typename T>
gpu::DeviceBuffer uploaded(const std::vector<T>& values) {
  gpu::DeviceBuffer buffer(values.size() * sizeof(T));
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

// A device's copy of host values, as a call takes it: never read through by the host.
template <typename T>
std::span<T> span_of(const gpu::DeviceBuffer& buffer) {
  return {reinterpret_cast<T*>(buffer.data()), buffer.bytes() / sizeof(T)};
}

template <typename T>
std::vector<T> downloaded(const gpu::DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  buffer.download(values.data(), buffer.bytes());
  return values;
}

// The batch in device memory.
class DeviceInput {
 public:
  explicit DeviceInput(const Batch& batch)
      : ids_(uploaded(batch.topk_ids)),
        weights_(uploaded(batch.topk_weights)),
        token_ids_(uploaded(batch.token_ids)) {
    const MatrixView& x = batch.activations;
    const std::size_t row_bytes = static_cast<std::size_t>(x.cols) * size_of(x.dtype);
    activations_ = gpu::DeviceBuffer(static_cast<std::size_t>(x.rows) * row_bytes);
    for (std::int64_t t = 0; x.row_stride != x.cols && t < x.rows; ++t) {
      activations_.upload(x.row(t), row_bytes, static_cast<std::size_t>(t) * row_bytes);
    }
    if (x.row_stride == x.cols) activations_.upload(x.data, activations_.bytes());
    input_.activations = {activations_.data(), x.dtype, x.rows, x.cols, x.cols};
    input_.topk_ids = span_of<std::int32_t>(ids_);
    input_.topk_weights = span_of<float>(weights_);
    input_.token_ids = span_of<std::int32_t>(token_ids_);
  }
  ForwardInput on(const gpu::Stream& stream) const {
    ForwardInput input = input_;
    input.stream = stream.handle();
    return input;
  }

 private:
  gpu::DeviceBuffer activations_, ids_, weights_, token_ids_;
  ForwardInput input_;
};

// Where the results go, in device memory.
class DeviceOutput {
 public:
  DeviceOutput(std::int64_t tokens, const LayerSpec& spec, DType dtype, const gpu::Stream& stream)
      : values_(static_cast<std::size_t>(tokens * spec.hidden) * size_of(dtype)),
        ids_(static_cast<std::size_t>(tokens * spec.top_k) * sizeof(std::int32_t)),
        weights_(static_cast<std::size_t>(tokens * spec.top_k) * sizeof(float)) {
    // NaNs and ids of no expert: what a pass leaves unwritten, --verify finds.
    constexpr std::uint8_t kPoison = 0xff;
    for (gpu::DeviceBuffer* buffer : {&values_, &ids_, &weights_}) buffer->fill(kPoison, stream);
    output_.data = values_.data();
    output_.dtype = dtype;
    output_.topk_ids = span_of<std::int32_t>(ids_);
    output_.topk_weights = span_of<float>(weights_);
  }
  const ForwardOutput& get() const { return output_; }

  void download_to(RunResult& result) const {
    result.output = downloaded<std::byte>(values_);
    result.topk_ids = downloaded<std::int32_t>(ids_);
    result.topk_weights = downloaded<float>(weights_);
  }

 private:
  gpu::DeviceBuffer values_, ids_, weights_;
  ForwardOutput output_;
};

std::vector<double> time_passes(MoeLayer& layer, const ForwardInput& input,
                                const ForwardOutput& output, const gpu::Stream& stream,
                                int repeat) {
  layer.forward(input, output);
  std::vector<double> seconds;
  gpu::Event start;
  gpu::Event end;
  for (int i = 0; i < repeat; ++i) {
    // The flush also keeps the stream busy until the launch has come, so that it is not timed.
    gpu::flush_l2(stream);
    start.record(stream);
    layer.forward(input, output);
    end.record(stream);
    seconds.push_back(gpu::Event::elapsed_us(start, end) * 1e-6);
  }
  return seconds;
}

}  // namespace

RunResult run_on_device(const Source& source, const Batch& batch, const RankOptions& options) {
  const int device = gpu::current_device();
  const gpu::DeviceInfo info = gpu::device_info(device);
  WorldOptions world_options;
  world_options.deadline = options.deadline;
  LayerOptions layer_options;
  layer_options.backend = Backend::kCuda;
  layer_options.max_tokens = static_cast<int>(batch.tokens());
  layer_options.reserved_sms = options.reserved_sms;
  layer_options.compute = options.compute;
  const World world = World::single(world_options);
  MoeLayer layer(world, source.spec, source.weights, layer_options);

  RunResult result;
  result.backend = Backend::kCuda;
  result.device = fmt::format("GPU {} ({}, {} of {} SMs)", device, info.name,
                              info.num_sms - options.reserved_sms, info.num_sms);
  result.fabric = world.fabric_name();
  result.output_dtype = value_type(options.compute);

  const gpu::Stream stream;
  const DeviceInput input(batch);
  const DeviceOutput output(batch.tokens(), source.spec, result.output_dtype, stream);
  result.pass_seconds = time_passes(layer, input.on(stream), output.get(), stream, options.repeat);
  const ForwardStats& stats = layer.stats();  // waits for the last pass, and throws what it found
  output.download_to(result);
  result.tokens_per_expert = stats.tokens_per_expert;
  result.dropped_slots = stats.dropped_slots;
  result.nan_logits = stats.nan_logits;
  result.workspace_bytes = layer.workspace_bytes();
  result.peak_resident_bytes = peak_resident_bytes();
  return result;
}

}  // namespace switchyard::cli
