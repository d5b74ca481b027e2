// Threads that all begin, or none of them.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "switchyard/error.h"

namespace switchyard {

// The remedy for threads whose number follows the machine's.
inline constexpr const char* kThreadRemedy =
    "raise the limits of threads (`ulimit -u`) and memory (`ulimit -v`), or end other processes";

// Calls body(i) for every i from `first` to `end` - 1, each on a thread of its own. No call begins
// before all threads exist: threads that wait for each other would otherwise wait for one that
// cannot be made. `body` must not throw.
class Threads {
 public:
  // Throws Error{kSystem}, with `remedy` as its last words, if there cannot be so many threads.
  Threads(int first, int end, std::string_view remedy, std::function<void(int)> body)
      : body_(std::move(body)) {
    try {
      threads_.reserve(static_cast<std::size_t>(end > first ? end - first : 0));
      for (int i = first; i < end; ++i) threads_.emplace_back([this, i] { begin(i); });
    } catch (const std::system_error& error) {
      refuse(first, end, remedy, error.code().message());
    } catch (const std::bad_alloc&) {
      refuse(first, end, remedy, "out of memory");
    }
    open(Gate::kOpen);
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() { join(); }

  // Returns when every call has returned.
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  enum class Gate { kClosed, kOpen, kCancelled };

  void begin(int i) {
    gate_.wait(Gate::kClosed, std::memory_order_acquire);
    if (gate_.load(std::memory_order_acquire) == Gate::kOpen) body_(i);
  }
  // The release lets all of the threads see what their maker wrote.
  void open(Gate state) {
    gate_.store(state, std::memory_order_release);
    gate_.notify_all();
  }
  // Numbers below `first` are threads that the caller has already.
  [[noreturn]] void refuse(int first, int end, std::string_view remedy, std::string_view reason) {
    const std::size_t started = static_cast<std::size_t>(first) + threads_.size();
    open(Gate::kCancelled);
    join();
    throw Error(ErrorCode::kSystem, fmt::format("only {} of {} threads could be started ({}); {}",
                                                started, end, reason, remedy));
  }

  std::function<void(int)> body_;
  std::atomic<Gate> gate_{Gate::kClosed};
  std::vector<std::thread> threads_;
};

}  // namespace switchyard
