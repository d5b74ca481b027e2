// An exchange whose arrays are in the memory of a device, where no rank may store into another's:
// over several hosts. The CPU engine plays it on copies in host memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/mapping.h"
#include "base/unique_fd.h"
#include "exchange/engine.h"

namespace switchyard {

// The operations that an exchange asks of the device. A test's device is host memory.
class StagingDevice {
 public:
  // A call of the exchange, enqueued.
  class Call {
   public:
    // The stream has come to the call. Any thread may call it, and it may not wait.
    virtual void reached() noexcept = 0;

   protected:
    ~Call() = default;
  };
  virtual ~StagingDevice() = default;

  // When `stream` comes here, it calls reached() and then stands still until release(). Returns
  // whether the stream is being captured: then each replay of the graph reaches the call. The
  // streams of an exchange wait for each other, so one call at a time has been reached and not been
  // released.
  virtual bool enqueue(void* stream, Call& call) = 0;
  // The exchange's thread calls it.
  virtual void release() noexcept = 0;

  // Copies `count` rows of `width` bytes, which stand `pitch` bytes apart, in the order of
  // stream(). The source must stay until await_stream() has returned; then the copy is complete.
  // The exchange's thread calls them. Copies to the host may also come from the host.
  struct Rows {
    std::size_t width, count;
  };
  virtual void enqueue_to_host(std::byte* to, std::size_t to_pitch, const void* from,
                               std::size_t from_pitch, const Rows& rows) = 0;
  virtual void enqueue_to_device(void* to, std::size_t to_pitch, const std::byte* from,
                                 std::size_t from_pitch, const Rows& rows) = 0;
  // Copies from one place of the device's memory to another.
  virtual void enqueue_on_device(void* to, std::size_t to_pitch, const void* from,
                                 std::size_t from_pitch, const Rows& rows) = 0;
  // Rows of the device, in bf16, f16 or f32, quantised as layers do (base/quantize.h): of each row
  // its codes and, behind them, its scales, in places that stand `pitch` bytes apart. All of them,
  // and the columns, are multiples of 16 bytes. `by_row`: all columns share a scale, which all
  // groups of columns get.
  virtual void enqueue_quantized(std::byte* to, std::size_t pitch, const MatrixView& x,
                                 bool by_row) = 0;
  // The same as the copies, and wait.
  void to_host(std::byte* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
               const Rows& rows) {
    enqueue_to_host(to, to_pitch, from, from_pitch, rows);
    await_stream();
  }
  void to_device(void* to, std::size_t to_pitch, const std::byte* from, std::size_t from_pitch,
                 const Rows& rows) {
    enqueue_to_device(to, to_pitch, from, from_pitch, rows);
    await_stream();
  }

  // Lends host memory that copies come from and go to, used from its start on, until the device
  // ends. The device may make the used part faster to copy.
  virtual void lend(std::byte* data, std::size_t bytes) = 0;

  // Allocates device memory, which is freed with its last owner: not while a stream stands still,
  // since that may wait for the whole device. Throws Error{kCapacityExceeded}.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  // The same, with a dmabuf descriptor by which networks can read and write it; null where that
  // cannot be had.
  struct NetworkMemory {
    std::shared_ptr<std::byte> data;
    UniqueFd dmabuf;
  };
  virtual NetworkMemory allocate_for_network(std::size_t bytes) = 0;
  // The stream of the exchange thread's kernels and copies. It waits for no other stream.
  virtual void* stream() = 0;

  virtual void synchronize(void* stream) = 0;
  // Waits for what the exchange's thread has run on stream().
  virtual void await_stream() = 0;
  // Waits for all that was enqueued.
  virtual void synchronize_all() = 0;
  // Waits at most for `patience` until nothing that was enqueued is left; returns whether that is
  // so.
  virtual bool is_idle(std::chrono::milliseconds patience) = 0;
};

// At least 1, because memory of 0 bytes cannot be allocated.
inline std::size_t bytes_of_rows(std::int64_t rows, std::size_t row_bytes) {
  return std::max<std::size_t>(static_cast<std::size_t>(rows) * row_bytes, 1);
}

// Makes and lends host memory that much is copied from or to. The device must end first.
inline Mapping lent_memory(StagingDevice& device, std::size_t bytes) {
  Mapping memory = Mapping::anonymous(bytes);
  device.lend(memory.data(), bytes);
  return memory;
}

// Collective. Like cpu::make_exchange(), but with the calls' arrays on the device, and with the
// order and the errors that Exchange has for Backend::kCuda.
std::unique_ptr<ExchangeEngine> make_staged_exchange(const World& world,
                                                     const ExchangeProblem& problem,
                                                     const ExchangeOptions& options,
                                                     std::unique_ptr<StagingDevice> device);

namespace gpu {
// Throws Error{kUnsupported} in a build without CUDA.
std::unique_ptr<StagingDevice> make_staging_device(int device);
}  // namespace gpu

}  // namespace switchyard
