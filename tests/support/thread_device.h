// A device for tests of what is staged in the host's memory: a thread that takes what was enqueued
// one by one, as a stream does, and whose memory is the host's.
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
    copy(to, to_pitch, static_cast<const std::byte*>(from), from_pitch, rows);
  }
  void enqueue_to_device(void* to, std::size_t to_pitch, const std::byte* from,
                         std::size_t from_pitch, const Rows& rows) override {
    if (before_copy) before_copy();
    copy(static_cast<std::byte*>(to), to_pitch, from, from_pitch, rows);
  }
  void enqueue_on_device(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         const Rows& rows) override {
    copy(static_cast<std::byte*>(to), to_pitch, static_cast<const std::byte*>(from), from_pitch,
         rows);
  }
  void enqueue_quantized(std::byte* to, std::size_t pitch, const MatrixView& x) override {
    Matrix rounded(x.rows, x.cols, DType::kBF16);
    for (std::int64_t i = 0; i < x.rows * x.cols; ++i) {
      rounded.set(i, element(x, i / x.cols * x.row_stride + i % x.cols));
    }
    const Matrix quantised = Matrix::quantised(rounded);
    const MatrixView rows = quantised.view();
    const std::size_t width = static_cast<std::size_t>(x.cols),
                      scales = static_cast<std::size_t>(rows.scale_stride) * sizeof(float);
    for (std::int64_t r = 0; r < x.rows; ++r, to += pitch) {
      std::memcpy(to, rows.row(r), width);
      std::memcpy(to + width, rows.scale + r * rows.scale_stride, scales);
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
  void await_stream() override {}  // They run at once.
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
  bool released_ = false, ends_ = false;
  std::thread thread_;
};

}  // namespace switchyard::testing
