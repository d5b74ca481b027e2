// A device whose copies a test can hold: for ranks that stop in the middle of a pass.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "exchange/staging.h"

namespace switchyard::testing {

class HeldDevice final : public StagingDevice {
 public:
  explicit HeldDevice(std::unique_ptr<StagingDevice> device) : device_(std::move(device)) {}

  // Called before copies to the device.
  std::function<void()> before_copy;

  bool enqueue(void* stream, Call& call) override { return device_->enqueue(stream, call); }
  void release() noexcept override { device_->release(); }
  void enqueue_to_host(std::byte* to, std::size_t to_pitch, const void* from,
                       std::size_t from_pitch, const Rows& rows) override {
    device_->enqueue_to_host(to, to_pitch, from, from_pitch, rows);
  }
  void enqueue_to_device(void* to, std::size_t to_pitch, const std::byte* from,
                         std::size_t from_pitch, const Rows& rows) override {
    if (before_copy) before_copy();
    device_->enqueue_to_device(to, to_pitch, from, from_pitch, rows);
  }
  void enqueue_on_device(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         const Rows& rows) override {
    device_->enqueue_on_device(to, to_pitch, from, from_pitch, rows);
  }
  void enqueue_quantized(std::byte* to, std::size_t pitch, const MatrixView& x,
                         bool by_row) override {
    device_->enqueue_quantized(to, pitch, x, by_row);
  }
  void lend(std::byte* data, std::size_t bytes) override { device_->lend(data, bytes); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return device_->allocate(bytes);
  }
  NetworkMemory allocate_for_network(std::size_t bytes) override {
    return device_->allocate_for_network(bytes);
  }
  void* stream() override { return device_->stream(); }
  void synchronize(void* stream) override { device_->synchronize(stream); }
  void await_stream() override { device_->await_stream(); }
  void synchronize_all() override { device_->synchronize_all(); }
  bool is_idle(std::chrono::milliseconds patience) override { return device_->is_idle(patience); }

 private:
  std::unique_ptr<StagingDevice> device_;
};

}  // namespace switchyard::testing
