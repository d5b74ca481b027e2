#include "run/device_run.h"

#include <span>

#include "gpu/device.h"
#include "run/late.h"

namespace switchyard::run {
namespace {

gpu::DeviceBuffer uploaded(const SlotView& values) {
  gpu::DeviceBuffer buffer(values.size() * size_of(values.dtype()));
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

// Returns a buffer in device memory as the span that a call takes. The host must not read it.
template <typename T>
std::span<T> span_of(const gpu::DeviceBuffer& buffer) {
  return {reinterpret_cast<T*>(buffer.data()), buffer.bytes() / sizeof(T)};
}

// A call's input in device memory.
class DeviceInput {
 public:
  DeviceInput(const ForwardInput& host, const gpu::Stream& stream)
      : ids_(uploaded(host.topk_ids)),
        weights_(uploaded(host.topk_weights)),
        token_ids_(uploaded(host.token_ids)) {
    const MatrixView& x = host.activations;
    const std::size_t row_bytes = static_cast<std::size_t>(x.cols) * size_of(x.dtype);
    activations_ = gpu::DeviceBuffer(static_cast<std::size_t>(x.rows) * row_bytes);
    for (std::int64_t t = 0; x.row_stride != x.cols && t < x.rows; ++t) {
      activations_.upload(x.row(t), row_bytes, static_cast<std::size_t>(t) * row_bytes);
    }
    if (x.row_stride == x.cols) activations_.upload(x.data, activations_.bytes());
    input_.activations = {activations_.data(), x.dtype, x.rows, x.cols, x.cols};
    input_.topk_ids = {ids_.data(), host.topk_ids.dtype(), host.topk_ids.size()};
    input_.topk_weights = {weights_.data(), host.topk_weights.dtype(), host.topk_weights.size()};
    input_.token_ids = span_of<std::int32_t>(token_ids_);
    input_.stream = stream.handle();
  }
  const ForwardInput& get() const { return input_; }

 private:
  gpu::DeviceBuffer activations_, ids_, weights_, token_ids_;
  ForwardInput input_;
};

// A call's output in device memory.
class DeviceOutput {
 public:
  DeviceOutput(const ForwardOutput& host, std::int64_t tokens, int hidden,
               const gpu::Stream& stream)
      : values_(static_cast<std::size_t>(tokens * hidden) * size_of(host.dtype)),
        ids_(host.topk_ids.size_bytes()),
        weights_(host.topk_weights.size_bytes()) {
    // This byte makes NaNs and ids of no expert, so that --verify finds what a pass leaves
    // unwritten.
    constexpr std::uint8_t kPoison = 0xff;
    for (gpu::DeviceBuffer* buffer : {&values_, &ids_, &weights_}) buffer->fill(kPoison, stream);
    output_.data = values_.data();
    output_.dtype = host.dtype;
    output_.topk_ids = span_of<std::int32_t>(ids_);
    output_.topk_weights = span_of<float>(weights_);
  }
  const ForwardOutput& get() const { return output_; }

  void download_to(const ForwardOutput& host) const {
    values_.download(host.data, values_.bytes());
    ids_.download(host.topk_ids.data(), ids_.bytes());
    weights_.download(host.topk_weights.data(), weights_.bytes());
  }

 private:
  gpu::DeviceBuffer values_, ids_, weights_;
  ForwardOutput output_;
};

// Until then the flush, and a pass before it, are done.
constexpr std::chrono::milliseconds kSettled(20);

}  // namespace

std::vector<double> time_passes_on_device(World& world, MoeLayer& layer, const ForwardInput& input,
                                          const ForwardOutput& output, int repeat,
                                          std::optional<std::chrono::microseconds> late) {
  const gpu::Stream stream;
  const DeviceInput from(input, stream);
  const DeviceOutput to(output, input.activations.rows, layer.spec().hidden, stream);
  gpu::Event start;
  gpu::Event end;
  gpu::flush_l2(stream);  // the first call allocates, which must not happen between the barriers
  stream.synchronize();
  std::vector<double> times;
  for (int i = 0; i < repeat; ++i) {
    // Between the barriers every rank only enqueues. None waits for its device or allocates,
    // because a kernel on the device may be waiting for one that another rank has yet to launch.
    world.barrier();
    const auto ready = std::chrono::steady_clock::now();
    // This pass is not timed. Ranks end it together, however far apart their hosts began it, so the
    // timed pass does not wait for another rank's host. It also touches what a first pass has to
    // load. Where a rank is late, only the first pass has that, because ranks are to be apart.
    if (!late || i == 0) layer.forward(from.get(), to.get());
    // The flush also keeps the stream busy until the host has launched the next pass, so that the
    // host's time for it is not measured.
    gpu::flush_l2(stream);
    if (late) wait_until(ready + kSettled + *late);
    start.record(stream);
    layer.forward(from.get(), to.get());
    end.record(stream);
    world.barrier();
    times.push_back(gpu::Event::elapsed_us(start, end));
  }
  to.download_to(output);
  world.barrier();  // freeing memory waits for the device, so all ranks must be done
  return times;
}

}  // namespace switchyard::run
