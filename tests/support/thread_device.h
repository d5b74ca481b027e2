// A device for tests of what is staged in the host's memory: a thread that takes what was enqueued
// one by one, as a stream does, and whose memory is the host's. It finds out who reads what a copy
// has not brought yet, or changes what a copy may still read.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/convert.h"
#include "exchange/staging.h"
#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard::testing {

class ThreadDevice final : public StagingDevice {
 public:
  ThreadDevice() : thread_([this] { run(); }) {}
  ~ThreadDevice() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  bool enqueue(void*, Call& call) override {
    if (captures) {
      graph_.push_back(&call);
      return true;
    }
    push(call);
    return false;
  }
  void release() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      released_ = true;
    }
    changed_.notify_all();
  }
  void enqueue_to_host(std::byte* to, std::size_t to_pitch, const void* from,
                       std::size_t from_pitch, const Rows& rows) override {
    // The host has it after await_stream() only.
    Pending pending{to, to_pitch, rows,
                    packed(static_cast<const std::byte*>(from), from_pitch, rows)};
    for (std::size_t i = 0; i < rows.count; ++i) std::memset(to + i * to_pitch, 0xff, rows.width);
    to_host_.push_back(std::move(pending));
  }
  void enqueue_to_device(void* to, std::size_t to_pitch, const std::byte* from,
                         std::size_t from_pitch, const Rows& rows) override {
    if (before_copy) before_copy();
    copy(static_cast<std::byte*>(to), to_pitch, from, from_pitch, rows);
    from_host_.push_back(
        {const_cast<std::byte*>(from), from_pitch, rows, packed(from, from_pitch, rows)});
  }
  void enqueue_on_device(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         const Rows& rows) override {
    copy(static_cast<std::byte*>(to), to_pitch, static_cast<const std::byte*>(from), from_pitch,
         rows);
  }
  void enqueue_quantized(std::byte* to, std::size_t pitch, const MatrixView& x,
                         bool by_row) override {
    Matrix rounded(x.rows, x.cols, DType::kBF16);
    for (std::int64_t i = 0; i < x.rows * x.cols; ++i) {
      rounded.set(i, element(x, i / x.cols * x.row_stride + i % x.cols));
    }
    const Matrix quantised = Matrix::quantised(rounded, by_row);
    const MatrixView rows = quantised.view();
    const std::size_t width = static_cast<std::size_t>(x.cols),
                      scales = static_cast<std::size_t>(rows.scale_stride) * sizeof(float);
    for (std::int64_t r = 0; r < x.rows; ++r, to += pitch) {
      std::memcpy(to, rows.row(r), width);
      std::memcpy(to + width, rows.f32_scale() + r * rows.scale_stride, scales);
    }
  }
  void lend(std::byte*, std::size_t) override {}
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return std::shared_ptr<std::byte>(new std::byte[bytes], std::default_delete<std::byte[]>());
  }
  NetworkMemory allocate_for_network(std::size_t bytes) override {
    if (!networks_reach_it) return {};
    return {allocate(bytes), UniqueFd(::memfd_create("device", MFD_CLOEXEC))};
  }
  void* stream() override { return nullptr; }
  void synchronize(void*) override { is_idle(test::kGenerous); }
  // Kernels run at once, and so do copies, but that a copy may read its source until now.
  void await_stream() override {
    for (const Pending& copied : std::exchange(from_host_, {})) {
      EXPECT_EQ(copied.bytes, packed(copied.host, copied.pitch, copied.rows))
          << "host memory was changed while it was copied";
    }
    for (const Pending& copied : std::exchange(to_host_, {})) {
      copy(copied.host, copied.pitch, copied.bytes.data(), copied.rows.width, copied.rows);
    }
  }
  void synchronize_all() override { is_idle(test::kGenerous); }
  bool is_idle(std::chrono::milliseconds patience) override {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return stream_.empty(); });
  }

  // Whether a network can read and write the device's memory.
  bool networks_reach_it = false;
  // Called before copies to the device.
  std::function<void()> before_copy;

  // Whether calls become nodes of a graph, and that graph's launch.
  bool captures = false;
  void replay() {
    for (Call* const call : graph_) push(*call);
  }

 private:
  void push(Call& call) {
    {
      const std::lock_guard lock(mutex_);
      stream_.push_back(&call);
    }
    changed_.notify_all();
  }
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !stream_.empty() || ends_; });
      if (stream_.empty()) return;
      Call* const call = stream_.front();
      released_ = false;
      lock.unlock();
      call->reached();
      lock.lock();
      changed_.wait(lock, [this] { return released_; });
      stream_.pop_front();
      changed_.notify_all();
    }
  }
  static float element(const MatrixView& x, std::int64_t i) {
    if (x.dtype == DType::kF32) return static_cast<const float*>(x.data)[i];
    const std::uint16_t code = static_cast<const std::uint16_t*>(x.data)[i];
    return x.dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
  }
  // A copy to the host that is not there yet, or one from it that may still read.
  struct Pending {
    std::byte* host;
    std::size_t pitch;
    Rows rows;
    std::vector<std::byte> bytes;  // of the rows, one behind the other
  };
  static std::vector<std::byte> packed(const std::byte* from, std::size_t pitch, const Rows& rows) {
    std::vector<std::byte> bytes(rows.width * rows.count);
    copy(bytes.data(), rows.width, from, pitch, rows);
    return bytes;
  }
  static void copy(std::byte* to, std::size_t to_pitch, const std::byte* from,
                   std::size_t from_pitch, const Rows& rows) {
    for (std::size_t i = 0; i < rows.count; ++i) {
      std::memcpy(to + i * to_pitch, from + i * from_pitch, rows.width);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call*> stream_;
  std::vector<Call*> graph_;
  std::vector<Pending> from_host_, to_host_;  // since await_stream()
  bool released_ = false, ends_ = false;
  std::thread thread_;
};

}  // namespace switchyard::testing
