// The device's side of an exchange in copies: exchange/staging.h.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/staging.h"
#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/pass_memory.h"
#include "protocol/atomics.h"

namespace switchyard::gpu {
namespace {

// Waits for the exchange's thread, which releases every call by the exchange's deadline at the
// latest. So this wait needs none of its own.
__global__ void await_release(std::uint64_t* released) {
  while (protocol::load_acquire(released) == 0) __nanosleep(500);
  protocol::store_relaxed(released, std::uint64_t{0});
}

// For calls of the exchange's thread, which may come while another thread captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { SWITCHYARD_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Staging final : public StagingDevice {
 public:
  // With the device current.
  explicit Staging(int device) : device_(device) {
    cudaFuncAttributes attributes;
    SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, await_release));  // loads it
  }

  bool enqueue(void* stream, Call& call) override {
    const DeviceScope scope(device_);
    const auto on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    SWITCHYARD_CUDA(cudaStreamIsCapturing(on, &status));
    SWITCHYARD_CUDA(cudaLaunchHostFunc(
        on, [](void* reached) { static_cast<Call*>(reached)->reached(); }, &call));
    await_release<<<1, 1, 0, on>>>(const_cast<std::uint64_t*>(released_.on_device()));
    SWITCHYARD_CUDA(cudaGetLastError());
    return status != cudaStreamCaptureStatusNone;
  }
  void release() noexcept override {
    __atomic_store_n(&*released_, std::uint64_t{1}, __ATOMIC_RELEASE);
  }

  void to_host(std::byte* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
               const Rows& rows) override {
    copy(to, to_pitch, from, from_pitch, rows);
  }
  void to_device(void* to, std::size_t to_pitch, const std::byte* from, std::size_t from_pitch,
                 const Rows& rows) override {
    copy(to, to_pitch, from, from_pitch, rows);
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const DeviceScope scope(device_);
    const auto buffer = std::make_shared<DeviceBuffer>(bytes);
    return {buffer, static_cast<std::byte*>(buffer->data())};
  }
  void* stream() override { return stream_.handle(); }

  void synchronize(void* stream) override {
    SWITCHYARD_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  }
  void synchronize_all() override {
    const DeviceScope scope(device_);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
  }
  bool is_idle(std::chrono::milliseconds patience) override {
    return device_is_idle(device_, patience);
  }

 private:
  // On a stream of its own, which passes by the one that stands still.
  void copy(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
            const Rows& rows) {
    // Weights, which a layer reads by to_host(), may be in either memory.
    constexpr cudaMemcpyKind kKind = cudaMemcpyDefault;
    const DeviceScope scope(device_);
    const RelaxedCapture relaxed;
    const auto on = static_cast<cudaStream_t>(stream_.handle());
    if (rows.count == 1 || (to_pitch == rows.width && from_pitch == rows.width)) {
      SWITCHYARD_CUDA(cudaMemcpyAsync(to, from, rows.width * rows.count, kKind, on));
    } else if (from_pitch < rows.width) {  // rows that are all the same, say
      for (std::size_t i = 0; i < rows.count; ++i) {
        SWITCHYARD_CUDA(cudaMemcpyAsync(static_cast<std::byte*>(to) + i * to_pitch,
                                        static_cast<const std::byte*>(from) + i * from_pitch,
                                        rows.width, kKind, on));
      }
    } else {
      SWITCHYARD_CUDA(
          cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, rows.width, rows.count, kKind, on));
    }
    SWITCHYARD_CUDA(cudaStreamSynchronize(on));
  }

  const int device_;
  Stream stream_;
  MappedMemory<std::uint64_t> released_;
};

}  // namespace

std::unique_ptr<StagingDevice> make_staging_device(int device) {
  const DeviceScope scope(device);
  return std::make_unique<Staging>(device);
}

}  // namespace switchyard::gpu
