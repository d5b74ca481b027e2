// GPUs as host code outside this room sees them: devices, memory, streams, events, graphs. The
// command line, the benchmarks and the tests use the CUDA runtime only through this header. It
// includes no CUDA header.
//
// A failed call throws Error{kSystem} naming the runtime call, or {kCapacityExceeded} where memory
// is short. A build without CUDA has no devices, and everything that needs one throws
// Error{kUnsupported}. Objects belong to the device that was current when they were made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace switchyard::gpu {

bool built_with_cuda();

// Returns 0 without a driver or in a build without CUDA. Never throws.
int device_count();

struct DeviceInfo {
  std::string name;
  int num_sms = 0;
  int compute_major = 0;  // compute capability
  int compute_minor = 0;
  std::uint64_t memory_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t l2_bytes = 0;
  std::uint64_t max_shared_bytes = 0;  // that a block can opt in to
  int driver_version = 0;              // newest CUDA the driver serves, 13000 for 13.0
  int runtime_version = 0;             // of the CUDA runtime in this build
  bool exports_dmabuf = false;         // networks can reach its memory: see docs/hosts.md

  // True for compute capability 9.0: the kernels are compiled for sm_90a, whose instructions no
  // other architecture has.
  bool runs_our_kernels() const { return compute_major == 9 && compute_minor == 0; }
};

DeviceInfo device_info(int device);
// Returns DeviceInfo::exports_dmabuf alone.
bool exports_dmabuf(int device);

int current_device();         // of this thread
void set_device(int device);  // of this thread
void synchronize_device();    // waits for everything on the current device

// Copies between any two of host and device memory. Returns when the copy is done.
void copy_memory(void* to, const void* from, std::size_t bytes);

// Where memory is, for kernels on the current device. Managed memory is kHere. Never throws.
enum class Residence { kHost, kHere, kElsewhere };
Residence residence_of(const void* pointer);

namespace detail {
// These deleters ignore errors: the runtime may be gone when a static object is destroyed.
struct DestroyStream {
  void operator()(void* stream) const;
};
struct DestroyEvent {
  void operator()(void* event) const;
};
struct DestroyGraph {
  void operator()(void* graph) const;
};
struct FreeMemory {
  void operator()(std::byte* memory) const;
};
}  // namespace detail

// A non-blocking stream: it does not synchronise with the default stream.
class Stream {
 public:
  Stream();

  void* handle() const { return handle_.get(); }  // a cudaStream_t
  void synchronize() const;

 private:
  std::unique_ptr<void, detail::DestroyStream> handle_;
};

// Device memory of its own. upload() and download() return when the copy is done; they do not wait
// for streams, so synchronise the one that wrote the data, or that still reads it, first.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);  // contents undefined; 0 bytes: data() is null

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

  // Throw Error{kInvalidArgument} for a range beyond the buffer's end.
  void upload(const void* from, std::size_t bytes, std::size_t offset = 0);
  void download(void* to, std::size_t bytes, std::size_t offset = 0) const;
  void fill(std::uint8_t value, const Stream& stream);  // enqueues

 private:
  std::unique_ptr<std::byte, detail::FreeMemory> data_;
  std::size_t bytes_ = 0;
};

// Hold it while launching a kernel that waits for other ranks' kernels: one thread of this process
// at a time launches on the current device. When two streams begin to work at the same moment, the
// driver may give both the same hardware queue. Then the first kernel of one rank stands behind the
// second kernel of another, which waits for it: docs/symmetric_heap.md. Wait for nothing while
// holding a turn.
class LaunchTurn {
 public:
  LaunchTurn();
  ~LaunchTurn();
  LaunchTurn(const LaunchTurn&) = delete;
  LaunchTurn& operator=(const LaunchTurn&) = delete;

 private:
  void* held_ = nullptr;
};

// A point in a stream, with a time.
class Event {
 public:
  Event();

  void record(const Stream& stream);
  void synchronize() const;  // waits until the stream has reached this point
  // Microseconds between two recorded events, waiting for both.
  static double elapsed_us(const Event& start, const Event& end);

 private:
  std::unique_ptr<void, detail::DestroyEvent> handle_;  // a cudaEvent_t
};

// The work that a function enqueued on a stream, captured for replay.
class Graph {
 public:
  // Captures in the mode in which this thread may neither allocate nor synchronise: work that does
  // throws. Rethrows what `enqueue` throws; the stream is usable afterwards either way.
  static Graph capture(const Stream& stream, const std::function<void()>& enqueue);

  void launch(const Stream& stream);
  int num_nodes() const { return num_nodes_; }
  int num_kernel_nodes() const { return num_kernel_nodes_; }

 private:
  Graph() = default;
  std::unique_ptr<void, detail::DestroyGraph> handle_;  // a cudaGraphExec_t
  int num_nodes_ = 0;
  int num_kernel_nodes_ = 0;
};

// Enqueues a write of at least four times the L2 cache, so that later work finds none of its data
// there. The first call on a device allocates the memory that is written, so it must not be
// captured.
void flush_l2(const Stream& stream);

}  // namespace switchyard::gpu
