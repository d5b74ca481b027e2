// The GPU room of a build without CUDA: there are no devices, and every error gives that reason.
#include <memory>

#include "exchange/engine.h"
#include "exchange/staging.h"
#include "gpu/device.h"
#include "gpu/grouped_gemm.h"
#include "gpu/operators.h"
#include "gpu/operators/params.h"
#include "gpu/peer_link.h"
#include "layer/engine.h"
#include "layer/pass_memory.h"
#include "switchyard/error.h"
#include "symmetric/memory.h"

namespace switchyard::gpu {
namespace {

[[noreturn]] void unsupported() {
  throw Error(ErrorCode::kUnsupported,
              "this build has no CUDA; configure it where nvcc and the CUTLASS headers are found, "
              "or use the CPU");
}

}  // namespace

bool built_with_cuda() { return false; }
int device_count() { return 0; }
DeviceInfo device_info(int) { unsupported(); }
bool exports_dmabuf(int) { unsupported(); }
int current_device() { unsupported(); }
void set_device(int) { unsupported(); }
void synchronize_device() { unsupported(); }
void copy_memory(void*, const void*, std::size_t) { unsupported(); }
Residence residence_of(const void*) { return Residence::kHost; }

// No object owns anything here, so there is nothing to destroy.
namespace detail {
void DestroyStream::operator()(void*) const {}
void DestroyEvent::operator()(void*) const {}
void DestroyGraph::operator()(void*) const {}
void FreeMemory::operator()(std::byte*) const {}
}  // namespace detail

Stream::Stream() { unsupported(); }
void Stream::synchronize() const { unsupported(); }

DeviceBuffer::DeviceBuffer(std::size_t) { unsupported(); }
void DeviceBuffer::upload(const void*, std::size_t, std::size_t) { unsupported(); }
void DeviceBuffer::download(void*, std::size_t, std::size_t) const { unsupported(); }
void DeviceBuffer::fill(std::uint8_t, const Stream&) { unsupported(); }

LaunchTurn::LaunchTurn() { unsupported(); }
LaunchTurn::~LaunchTurn() = default;

Event::Event() { unsupported(); }
void Event::record(const Stream&) { unsupported(); }
void Event::synchronize() const { unsupported(); }
double Event::elapsed_us(const Event&, const Event&) { unsupported(); }

Graph Graph::capture(const Stream&, const std::function<void()>&) { unsupported(); }
void Graph::launch(const Stream&) { unsupported(); }

void flush_l2(const Stream&) { unsupported(); }

PeerLink peer_link(int, int) { unsupported(); }
double peer_write_rate(int, int) { unsupported(); }

std::unique_ptr<LayerEngine> make_engine(const World&, const LayerSpec&, const MoeWeights&,
                                         const LayerOptions&, std::shared_ptr<PassMemory>) {
  unsupported();
}
std::shared_ptr<PassMemory> make_memory(const World&, std::span<const LayerSpec>,
                                        const WorkspaceOptions&, std::uint64_t) {
  unsupported();
}

std::unique_ptr<StagingDevice> make_staging_device(int) { unsupported(); }

std::unique_ptr<ExchangeEngine> make_exchange(const World&, const ExchangeProblem&,
                                              const ExchangeOptions&) {
  unsupported();
}

std::unique_ptr<HeapMemory> make_heap_memory(const World&, std::size_t, int,
                                             std::chrono::milliseconds) {
  unsupported();
}

struct GroupedGemmEngine::State {};
GroupedGemmEngine::GroupedGemmEngine(const GroupedGemmSpec&, const GroupedGemmWeights&, DType,
                                     const GroupedGemmOptions&) {
  unsupported();
}
GroupedGemmEngine::~GroupedGemmEngine() = default;
void GroupedGemmEngine::run(const GroupedInput&, const GroupedOutput&) { unsupported(); }
void GroupedGemmEngine::refresh(void*) { unsupported(); }
bool GroupedGemmEngine::copies() const { return false; }

// A caller may ask for it before it knows where it runs.
std::size_t permute_workspace_bytes(std::int64_t slots, int num_experts) {
  return PermutePlan(static_cast<std::uint32_t>(slots)).workspace_bytes(num_experts);
}
void permute(SlotView, int, int, const DevicePermutation&, const DeviceStream&) { unsupported(); }
void unpermute(const MatrixView&, SlotView, SlotView, int, const ForwardOutput&,
               const DeviceStream&) {
  unsupported();
}
void topk(const LayerSpec&, const MatrixView&, const float*, std::int32_t*, float*,
          const DeviceStream&) {
  unsupported();
}

}  // namespace switchyard::gpu
