// The device's side of an exchange in copies: exchange/staging.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "exchange/staging.h"
#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/dmabuf.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/pass_memory.h"
#include "gpu/operators/launch.h"
#include "protocol/atomics.h"

namespace switchyard::gpu {
namespace {

// Waits for the exchange's thread, which releases every call by the exchange's deadline at the
// latest. So this wait needs none of its own.
__global__ void await_release(std::uint64_t* released) {
  while (protocol::load_acquire(released) == 0) __nanosleep(500);
  protocol::store_relaxed(released, std::uint64_t{0});
}

// Lets the exchange's thread make calls while another thread captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { SWITCHYARD_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Host memory that is pinned from its start as far as it was used. Copies of pinned memory are
// several times as fast, and the whole may be gigabytes. It is pinned in pieces, each at least as
// long as all before it. To pin it anew it would first have to be unpinned, and that waits for
// streams that stand still.
class Lent {
 public:
  Lent(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

  bool has(const void* address) const {
    return std::less_equal<>()(static_cast<const void*>(data_), address) &&
           std::less<>()(address, static_cast<const void*>(data_ + bytes_));
  }
  // Pins up to `end`, if the system lets it.
  void pin_up_to(const std::byte* end) {
    constexpr std::size_t kLeast = std::size_t{8} << 20, kStep = std::size_t{2} << 20;
    const auto wanted = static_cast<std::size_t>(end - data_);
    while (!refused_ && pinned() < wanted) {
      const std::size_t longer = std::max({wanted, 2 * pinned(), kLeast});
      const std::size_t to = std::min((longer + kStep - 1) / kStep * kStep, bytes_);
      if (cudaHostRegister(data_ + pinned(), to - pinned(), cudaHostRegisterPortable) ==
          cudaSuccess) {
        ends_.push_back(to);
      } else {
        cudaGetLastError();  // memory that is not pinned can be copied, too
        refused_ = true;
      }
    }
  }
  void unpin() {
    std::size_t begin = 0;
    for (const std::size_t end : ends_) {
      cudaHostUnregister(data_ + begin);
      begin = end;
    }
    ends_.clear();
  }
  // Returns how many bytes from `address` on one copy may have: none goes across the end of a
  // piece.
  std::size_t in_one_piece(const std::byte* address) const {
    const auto at = static_cast<std::size_t>(address - data_);
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), at);
    return (end == ends_.end() ? bytes_ : *end) - at;
  }

 private:
  std::size_t pinned() const { return ends_.empty() ? 0 : ends_.back(); }

  std::byte* data_;
  std::size_t bytes_;
  std::vector<std::size_t> ends_;  // of the pieces
  bool refused_ = false;
};

class Staging final : public StagingDevice {
 public:
  // Requires that the device is current.
  explicit Staging(int device) : device_(device) {
    cudaFuncAttributes attributes;
    SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, await_release));  // loads it
    // Layers sum with these while a stream stands still, and loading may wait for that.
    SWITCHYARD_CUDA(load_unpermute_kernels());
    SWITCHYARD_CUDA(load_quantize_kernel());
  }

  ~Staging() override {
    const DeviceScope scope(device_);
    for (Lent& memory : lent_) memory.unpin();
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  bool enqueue(void* stream, Call& call) override {
    const DeviceScope scope(device_);
    const auto on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    SWITCHYARD_CUDA(cudaStreamIsCapturing(on, &status));
    const LaunchTurn turn;
    SWITCHYARD_CUDA(cudaLaunchHostFunc(
        on, [](void* reached) { static_cast<Call*>(reached)->reached(); }, &call));
    await_release<<<1, 1, 0, on>>>(const_cast<std::uint64_t*>(released_.on_device()));
    SWITCHYARD_CUDA(cudaGetLastError());
    return status != cudaStreamCaptureStatusNone;
  }
  void release() noexcept override {
    __atomic_store_n(&*released_, std::uint64_t{1}, __ATOMIC_RELEASE);
  }

  void enqueue_to_host(std::byte* to, std::size_t to_pitch, const void* from,
                       std::size_t from_pitch, const Rows& rows) override {
    copy({to, to_pitch}, {const_cast<void*>(from), from_pitch}, to, rows);
  }
  void enqueue_to_device(void* to, std::size_t to_pitch, const std::byte* from,
                         std::size_t from_pitch, const Rows& rows) override {
    copy({to, to_pitch}, {const_cast<std::byte*>(from), from_pitch}, from, rows);
  }
  void enqueue_on_device(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         const Rows& rows) override {
    const DeviceScope scope(device_);
    const RelaxedCapture relaxed;
    enqueue_rows({to, to_pitch}, {const_cast<void*>(from), from_pitch}, {0, rows.count},
                 rows.width);
  }
  void enqueue_quantized(std::byte* to, std::size_t pitch, const MatrixView& x,
                         bool by_row) override {
    if (x.rows == 0) return;
    const DeviceScope scope(device_);
    QuantizeCall call{};
    call.x = x.data;
    call.type = x.dtype;
    call.rows = x.rows;
    call.columns = static_cast<std::uint32_t>(x.cols);
    call.x_stride = x.row_stride;
    call.to = reinterpret_cast<std::uint8_t*>(to);
    call.to_bytes = static_cast<std::int64_t>(pitch);
    call.by_row = by_row;
    SWITCHYARD_CUDA(launch_quantize(call, stream_of_copies()));
  }
  void lend(std::byte* data, std::size_t bytes) override { lent_.emplace_back(data, bytes); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const DeviceScope scope(device_);
    const auto buffer = std::make_shared<DeviceBuffer>(bytes);
    return {buffer, static_cast<std::byte*>(buffer->data())};
  }
  NetworkMemory allocate_for_network(std::size_t bytes) override {
    if (!exports_dmabuf(device_)) return {};
    const std::size_t whole = (bytes + kDmabufPages - 1) / kDmabufPages * kDmabufPages;
    NetworkMemory memory{allocate(whole), {}};
    const DeviceScope scope(device_);
    memory.dmabuf = export_dmabuf(memory.data.get(), whole);
    if (!memory.dmabuf) return {};
    return memory;
  }
  void* stream() override { return stream_.handle(); }

  void synchronize(void* stream) override {
    SWITCHYARD_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  }
  void await_stream() override {
    const RelaxedCapture relaxed;
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_of_copies()));
  }
  void synchronize_all() override {
    const DeviceScope scope(device_);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
  }
  bool is_idle(std::chrono::milliseconds patience) override {
    return device_is_idle(device_, patience);
  }

 private:
  struct Place {
    void* data;
    std::size_t pitch;

    std::byte* at(std::size_t row, std::size_t column) const {
      return static_cast<std::byte*>(data) + row * pitch + column;
    }
  };

  // Copies on a stream of its own, which the one that stands still does not hold up. `host` is one
  // of the two.
  void copy(const Place& to, const Place& from, const std::byte* host, const Rows& rows) {
    const DeviceScope scope(device_);
    const RelaxedCapture relaxed;
    const auto memory = std::ranges::find_if(lent_, [&](const Lent& one) { return one.has(host); });
    const bool whole = (host == from.data ? from.pitch : to.pitch) == rows.width;
    if (memory == lent_.end() || !whole) {
      enqueue_rows(to, from, {0, rows.count}, rows.width);
    } else {
      const std::size_t bytes = rows.width * rows.count;
      memory->pin_up_to(host + bytes);
      for (std::size_t at = 0; at < bytes;) {
        const std::size_t end = std::min(bytes, at + memory->in_one_piece(host + at));
        enqueue_part(to, from, {at, end}, rows.width);
        at = end;
      }
    }
  }

  struct Range {
    std::size_t begin, end;
  };
  // Enqueues a part of the rows, as a range of bytes that is counted through all rows.
  void enqueue_part(const Place& to, const Place& from, Range part, std::size_t width) {
    // The end of a row, whole rows, and the start of one.
    while (part.begin < part.end) {
      const std::size_t row = part.begin / width, column = part.begin % width;
      if (column == 0 && part.end - part.begin >= width) {
        const std::size_t end = part.end / width;
        enqueue_rows(to, from, {row, end}, width);
        part.begin = end * width;
        continue;
      }
      const std::size_t bytes = std::min(width - column, part.end - part.begin);
      enqueue_bytes(to.at(row, column), from.at(row, column), bytes);
      part.begin += bytes;
    }
  }
  void enqueue_rows(const Place& to, const Place& from, const Range& rows, std::size_t width) {
    const std::size_t count = rows.end - rows.begin;
    if (count == 0) return;
    if (count == 1 || (to.pitch == width && from.pitch == width)) {
      enqueue_bytes(to.at(rows.begin, 0), from.at(rows.begin, 0), width * count);
    } else if (from.pitch < width) {  // rows that are all the same, say
      for (std::size_t i = rows.begin; i < rows.end; ++i) {
        enqueue_bytes(to.at(i, 0), from.at(i, 0), width);
      }
    } else {
      SWITCHYARD_CUDA(cudaMemcpy2DAsync(to.at(rows.begin, 0), to.pitch, from.at(rows.begin, 0),
                                        from.pitch, width, count, kKind, stream_of_copies()));
    }
  }
  void enqueue_bytes(void* to, const void* from, std::size_t bytes) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(to, from, bytes, kKind, stream_of_copies()));
  }
  cudaStream_t stream_of_copies() { return static_cast<cudaStream_t>(stream_.handle()); }

  // Weights, which a layer reads by to_host(), may be in either memory.
  static constexpr cudaMemcpyKind kKind = cudaMemcpyDefault;

  const int device_;
  Stream stream_;
  MappedMemory<std::uint64_t> released_;
  std::vector<Lent> lent_;
};

}  // namespace

std::unique_ptr<StagingDevice> make_staging_device(int device) {
  const DeviceScope scope(device);
  return std::make_unique<Staging>(device);
}

}  // namespace switchyard::gpu
