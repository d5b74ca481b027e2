// The processor threads of one rank. They sleep between parallel regions.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "base/threads.h"

namespace switchyard::cpu {

// The threads of a rank: as many as asked for, or the hardware's, divided by the ranks.
inline int threads_of(int asked, int ranks) {
  const int hardware = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return asked > 0 ? asked : std::max(1, hardware / ranks);
}

class WorkerPool {
 public:
  // `num_threads` counts the thread that calls run(). `enter` runs once in every other thread.
  // Throws Error{kSystem} if the threads cannot be made.
  WorkerPool(int num_threads, std::function<void()> enter)
      : num_threads_(num_threads),
        threads_(1, num_threads,
                 "use fewer (num_threads), or raise the limits of threads (`ulimit -u`) and memory "
                 "(`ulimit -v`)",
                 [this, enter = std::move(enter)](int i) { serve(i, enter); }) {}
  ~WorkerPool() {
    stopping_ = true;
    release();
  }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const { return num_threads_; }

  // Calls body(i) once for every i < size(), each on its own thread, i = 0 on the caller's; returns
  // when all have returned. body must not throw. `while_waiting` is called now and then while the
  // caller waits for the others, if it asks for interrupts.
  void run(const std::function<void(int)>& body, const std::function<void()>& while_waiting = {}) {
    body_ = body;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    release();
    body(0);
    await_others(while_waiting);
  }

 private:
  void serve(int i, const std::function<void()>& enter) {
    enter();
    std::uint64_t seen = 0;
    for (;;) {
      const auto released = [this, seen] {
        return generation_.load(std::memory_order_acquire) != seen;
      };
      if (!spin_until(released)) generation_.wait(seen, std::memory_order_acquire);
      ++seen;
      if (stopping_) return;
      body_(i);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      // The caller looks at `running_` with the mutex before it sleeps, so it misses no
      // notification.
      { const std::lock_guard lock(mutex_); }
      all_returned_.notify_one();
    }
  }
  void release() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  // Returns once all other threads have returned from body.
  void await_others(const std::function<void()>& while_waiting) {
    const auto returned = [this] { return running_.load(std::memory_order_acquire) == 0; };
    if (spin_until(returned)) return;
    std::unique_lock lock(mutex_);
    if (!while_waiting || !asks_for_interrupts()) return all_returned_.wait(lock, returned);
    while (!all_returned_.wait_for(lock, kInterruptInterval, returned)) {
      lock.unlock();
      while_waiting();
      lock.lock();
    }
  }
  // Spins briefly: regions follow each other within microseconds, and a wake-up costs tens. Returns
  // true if `ready` became true.
  template <typename Ready>
  static bool spin_until(const Ready& ready) {
    for (int i = 0; i < 2000; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    return false;
  }

  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> running_{0};
  std::mutex mutex_;  // of `all_returned_`: atomics have no wait that ends after a time
  std::condition_variable all_returned_;
  bool stopping_ = false;
  std::function<void(int)> body_;
  int num_threads_;
  Threads threads_;  // last member, so that the threads end before the data they use
};

}  // namespace switchyard::cpu
