// Calls on a device's stream that a thread of the host does: of an exchange or a layer whose ranks
// are on several hosts.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "exchange/staging.h"
#include "switchyard/error.h"

namespace switchyard {

// It has a thread of its own: a stream that stands still must not keep the threads of the device's
// driver, which other streams need. All that the work uses must outlive this object.
class StagedCalls {
 public:
  explicit StagedCalls(std::unique_ptr<StagingDevice> device);
  ~StagedCalls();
  StagedCalls(const StagedCalls&) = delete;
  StagedCalls& operator=(const StagedCalls&) = delete;

  StagingDevice& device() { return *device_; }

  // Does `work` when the stream comes there. An exception ends the calls: they do nothing from then
  // on.
  void enqueue(void* stream, std::function<void()> work);
  // Does `work` when no call is under way. An exception ends the calls.
  template <typename Work>
  void alone(const Work& work) {
    const std::lock_guard turn(turn_);
    throw_found();
    try {
      work();
    } catch (...) {
      end(std::current_exception());
      throw;
    }
  }
  // Throws what ended the calls, or, once, what was noted.
  void throw_found();
  // Called by work: a later call throws this error. The first note since the last one was thrown
  // counts.
  void note(ErrorCode code, const std::string& message);

 private:
  struct Call final : StagingDevice::Call {
    void reached() noexcept override { calls->push(*this); }

    StagedCalls* calls = nullptr;
    std::function<void()> work;
    bool is_free = false, is_captured = false;
    Call* next = nullptr;  // that was reached
  };

  void push(Call& call) noexcept;
  void serve();
  void serve(Call& call) noexcept;
  void end(std::exception_ptr failure);

  const std::unique_ptr<StagingDevice> device_;
  std::mutex turn_;   // whose turn it is: the thread's, or a caller's
  std::mutex mutex_;  // of all that follows
  std::condition_variable is_reached_;
  std::list<Call> calls_;
  Call *first_ = nullptr, *last_ = nullptr;
  bool stops_ = false;
  std::exception_ptr end_, found_;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace switchyard
