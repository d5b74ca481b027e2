#include "gpu/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/host/cuda_error.h"
#include "gpu/host/flush_l2.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle()); }
cudaEvent_t native(const std::unique_ptr<void, detail::DestroyEvent>& event) {
  return static_cast<cudaEvent_t>(event.get());
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  SWITCHYARD_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

int require_devices() {
  const int count = device_count();
  if (count > 0) return count;
  throw Error(ErrorCode::kUnsupported,
              "there is no GPU that CUDA can use; check that the NVIDIA driver is installed, and "
              "new enough for this build, or use the CPU");
}

void require_device(int device) {
  const int count = require_devices();
  if (device >= 0 && device < count) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("device {} does not exist; this machine has devices 0 to {}", device, count - 1));
}

void require_range(std::size_t bytes, std::size_t offset, std::size_t size) {
  if (offset <= size && bytes <= size - offset) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("copy of {} bytes at offset {} of a device buffer of {} bytes; it ends "
                          "beyond the buffer",
                          bytes, offset, size));
}

}  // namespace

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(ErrorCode::kSystem, fmt::format("{} failed: {} ({})", call, cudaGetErrorName(result),
                                              cudaGetErrorString(result)));
}

void check_allocation(cudaError_t result, const char* call, std::size_t bytes) {
  if (result != cudaErrorMemoryAllocation) return check(result, call);
  (void)cudaGetLastError();
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) (void)cudaGetLastError();
  throw Error(ErrorCode::kCapacityExceeded,
              fmt::format("{} asked for {} bytes of GPU memory, but {} of {} are free; use a "
                          "smaller layer or a smaller max_tokens, or free some memory",
                          call, bytes, free, total));
}

bool built_with_cuda() { return true; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

DeviceInfo device_info(int device) {
  require_device(device);
  DeviceInfo info;
  // Properties are not kept: the structure has hundreds of fields, and the call takes milliseconds.
  cudaDeviceProp properties;
  SWITCHYARD_CUDA(cudaGetDeviceProperties(&properties, device));
  info.name = properties.name;
  info.num_sms = properties.multiProcessorCount;
  info.compute_major = properties.major;
  info.compute_minor = properties.minor;
  info.memory_bytes = properties.totalGlobalMem;
  info.l2_bytes = static_cast<std::uint64_t>(properties.l2CacheSize);
  info.max_shared_bytes = properties.sharedMemPerBlockOptin;
  const int previous = current_device();
  set_device(device);
  std::size_t free = 0;
  std::size_t total = 0;
  const cudaError_t asked = cudaMemGetInfo(&free, &total);
  set_device(previous);
  check(asked, "cudaMemGetInfo");
  info.free_bytes = free;
  SWITCHYARD_CUDA(cudaDriverGetVersion(&info.driver_version));
  SWITCHYARD_CUDA(cudaRuntimeGetVersion(&info.runtime_version));
  info.exports_dmabuf = exports_dmabuf(device);
  return info;
}

int current_device() {
  require_devices();
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  return device;
}

void set_device(int device) {
  require_device(device);
  SWITCHYARD_CUDA(cudaSetDevice(device));
}

void synchronize_device() { SWITCHYARD_CUDA(cudaDeviceSynchronize()); }

void copy_memory(void* to, const void* from, std::size_t bytes) {
  SWITCHYARD_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  SWITCHYARD_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}

Residence residence_of(const void* pointer) {
  cudaPointerAttributes attributes;
  if (pointer == nullptr) return Residence::kHost;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    (void)cudaGetLastError();
    return Residence::kHost;
  }
  if (attributes.type == cudaMemoryTypeManaged) return Residence::kHere;
  if (attributes.type != cudaMemoryTypeDevice) return Residence::kHost;
  return attributes.device == current_device() ? Residence::kHere : Residence::kElsewhere;
}

namespace detail {
void DestroyStream::operator()(void* stream) const {
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}
void DestroyEvent::operator()(void* event) const {
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
}
void DestroyGraph::operator()(void* graph) const {
  (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}
void FreeMemory::operator()(std::byte* memory) const { (void)cudaFree(memory); }
}  // namespace detail

Stream::Stream() {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  handle_.reset(stream);
}

void Stream::synchronize() const { SWITCHYARD_CUDA(cudaStreamSynchronize(native(*this))); }

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check_allocation(cudaMalloc(&data, bytes), "cudaMalloc", bytes);
  data_.reset(static_cast<std::byte*>(data));
}

// cudaMemcpy from pageable memory may return before the copy to the device has ended, and work on
// non-blocking streams does not wait for it.
void DeviceBuffer::upload(const void* from, std::size_t bytes, std::size_t offset) {
  require_range(bytes, offset, bytes_);
  if (bytes == 0) return;
  SWITCHYARD_CUDA(cudaMemcpy(data() + offset, from, bytes, cudaMemcpyHostToDevice));
  SWITCHYARD_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}

void DeviceBuffer::download(void* to, std::size_t bytes, std::size_t offset) const {
  require_range(bytes, offset, bytes_);
  if (bytes == 0) return;
  SWITCHYARD_CUDA(cudaMemcpy(to, data() + offset, bytes, cudaMemcpyDeviceToHost));
}

void DeviceBuffer::fill(std::uint8_t value, const Stream& stream) {
  if (bytes_ == 0) return;
  SWITCHYARD_CUDA(cudaMemsetAsync(data(), value, bytes_, native(stream)));
}

Event::Event() {
  cudaEvent_t event = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&event));
  handle_.reset(event);
}

void Event::record(const Stream& stream) {
  SWITCHYARD_CUDA(cudaEventRecord(native(handle_), native(stream)));
}

void Event::synchronize() const { SWITCHYARD_CUDA(cudaEventSynchronize(native(handle_))); }

double Event::elapsed_us(const Event& start, const Event& end) {
  start.synchronize();
  end.synchronize();
  float milliseconds = 0;
  SWITCHYARD_CUDA(cudaEventElapsedTime(&milliseconds, native(start.handle_), native(end.handle_)));
  return static_cast<double>(milliseconds) * 1e3;
}

Graph Graph::capture(const Stream& stream, const std::function<void()>& enqueue) {
  SWITCHYARD_CUDA(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t captured = nullptr;
  try {
    enqueue();
  } catch (...) {
    // Ends the capture and discards what it holds.
    if (cudaStreamEndCapture(native(stream), &captured) != cudaSuccess) (void)cudaGetLastError();
    if (captured != nullptr) (void)cudaGraphDestroy(captured);
    throw;
  }
  SWITCHYARD_CUDA(cudaStreamEndCapture(native(stream), &captured));
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owner(captured, cudaGraphDestroy);

  std::size_t count = 0;
  SWITCHYARD_CUDA(cudaGraphGetNodes(captured, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  SWITCHYARD_CUDA(cudaGraphGetNodes(captured, nodes.data(), &count));
  Graph graph;
  graph.num_nodes_ = static_cast<int>(count);
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    SWITCHYARD_CUDA(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeKernel) ++graph.num_kernel_nodes_;
  }
  cudaGraphExec_t executable = nullptr;
  SWITCHYARD_CUDA(cudaGraphInstantiate(&executable, captured, 0));
  graph.handle_.reset(executable);
  // Without this the first launch would upload the graph and wait for what runs on the device. That
  // may be another rank's kernel, which may itself wait for this launch.
  SWITCHYARD_CUDA(cudaGraphUpload(executable, native(stream)));
  SWITCHYARD_CUDA(cudaStreamSynchronize(native(stream)));
  return graph;
}

void Graph::launch(const Stream& stream) {
  const LaunchTurn turn;
  SWITCHYARD_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_.get()), native(stream)));
}

namespace {

constexpr std::size_t kMostDevices = 64;

std::timed_mutex& launch_mutex(int device) {
  // The mutexes are never destroyed: threads may launch while the process ends.
  static auto& mutexes = *new std::array<std::timed_mutex, kMostDevices>;
  return mutexes[static_cast<std::size_t>(device) % kMostDevices];
}

}  // namespace

LaunchTurn::LaunchTurn() {
  // A launch may itself wait for room in a stream that is a thousand launches behind, and so for a
  // rank that wants its turn.
  constexpr std::chrono::milliseconds kPatience{100};
  std::timed_mutex& mutex = launch_mutex(current_device());
  if (mutex.try_lock_for(kPatience)) held_ = &mutex;
}

LaunchTurn::~LaunchTurn() {
  if (held_ != nullptr) static_cast<std::timed_mutex*>(held_)->unlock();
}

void flush_l2(const Stream& stream) {
  static std::mutex mutex;
  static std::map<int, DeviceBuffer> buffers;  // by device
  const std::lock_guard lock(mutex);
  const int device = current_device();
  auto found = buffers.find(device);
  if (found == buffers.end()) {
    // The factor of four is for caches that do not replace strictly by age and keep some lines
    // longer.
    const std::size_t l2 = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize, device));
    found = buffers.emplace(device, DeviceBuffer(4 * l2)).first;
  }
  // The buffer is written and then read. Without the read, dirty lines would be written back during
  // the next measurement.
  found->second.fill(0, stream);
  read_through_l2(found->second.data(), found->second.bytes(),
                  static_cast<cudaStream_t>(stream.handle()));
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::gpu
