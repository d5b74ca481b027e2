// Memory of a SymmetricHeap on GPUs.
#include <cuda_runtime_api.h>

#include <memory>

#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "gpu/device.h"
#include "gpu/host/abort_link.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/pass_memory.h"
#include "gpu/host/symmetric_memory.h"
#include "symmetric/memory.h"

namespace switchyard::gpu {
namespace {

class DeviceHeapMemory final : public HeapMemory {
 public:
  DeviceHeapMemory(const World& world, std::size_t bytes, int device,
                   std::chrono::milliseconds deadline)
      : rank_(world.rank()), size_(world.size()), device_(device), deadline_(deadline) {
    const DeviceScope scope(device_);
    // Releasable memory starts at a multiple of the pages of physical memory, whatever the number
    // of ranks.
    memory_ = std::make_unique<SymmetricMemory>(
        SymmetricMemory::releasable(world.fabric(), bytes, DeviceAllocator()));
    // This is also a barrier: nobody writes into memory before it is cleared.
    attempt_together(world.fabric(), [&] {
      SWITCHYARD_CUDA(cudaMemset(memory_->base(rank_), 0, bytes));
      SWITCHYARD_CUDA(cudaDeviceSynchronize());
      abort_link_ = std::make_unique<AbortLink>(device_);
      copy_ = std::make_unique<ControlCopy>();
    });
  }
  // Freeing memory would wait for the device without a limit. So a thread that can be left behind
  // waits for it first.
  ~DeviceHeapMemory() override {
    if (abort_link_ == nullptr || device_is_idle(device_, deadline_)) return;
    raise(PeerControl::kCalledOff | static_cast<std::uint64_t>(rank_ + 1));
    if (device_is_idle(device_, std::chrono::seconds(1))) return;
    (void)memory_.release();
    (void)abort_link_.release();
    (void)copy_.release();
  }
  DeviceHeapMemory(const DeviceHeapMemory&) = delete;
  DeviceHeapMemory& operator=(const DeviceHeapMemory&) = delete;

  std::byte* start(int rank) const override { return memory_->base(rank); }
  std::size_t reserved() const override { return memory_->bytes(); }
  int device() const override { return device_; }

  // Reads on a stream of its own, which waiting kernels do not hold up.
  PeerControl control(int rank) const override {
    const DeviceScope scope(device_);
    const auto stream = static_cast<cudaStream_t>(copy_->stream.handle());
    auto* const to = const_cast<PeerControl*>(&*copy_->control);
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(to, start(rank), sizeof(PeerControl), cudaMemcpyDeviceToHost, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    return *to;
  }
  void raise(std::uint64_t word) noexcept override {
    abort_link_->raise(word, size_,
                       [this](int r) { return &reinterpret_cast<PeerControl*>(start(r))->abort; });
  }

 private:
  struct ControlCopy {
    Stream stream;
    MappedMemory<PeerControl> control;
  };

  int rank_, size_, device_;
  std::chrono::milliseconds deadline_;
  std::unique_ptr<SymmetricMemory> memory_;
  std::unique_ptr<AbortLink> abort_link_;
  std::unique_ptr<ControlCopy> copy_;
};

}  // namespace

std::unique_ptr<HeapMemory> make_heap_memory(const World& world, std::size_t bytes, int device,
                                             std::chrono::milliseconds deadline) {
  attempt_together(world.fabric(), [&] {
    if (device < 0) device = current_device();
    (void)device_info(device);  // throws for one that there is not
  });
  return std::make_unique<DeviceHeapMemory>(world, bytes, device, deadline);
}

}  // namespace switchyard::gpu
