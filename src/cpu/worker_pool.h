// The processor threads of one rank. They sleep between parallel regions.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

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
  // when all have returned. body must not throw.
  void run(const std::function<void(int)>& body) {
    body_ = body;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    release();
    body(0);
    for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) {
      wait_while(running_, left);
    }
  }

 private:
  void serve(int i, const std::function<void()>& enter) {
    enter();
    std::uint64_t seen = 0;
    for (;;) {
      wait_while(generation_, seen);
      ++seen;
      if (stopping_) return;
      body_(i);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
    }
  }
  void release() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  // Spins briefly first: regions follow each other within microseconds, and a wake-up costs tens.
  template <typename T>
  static void wait_while(const std::atomic<T>& word, T value) {
    for (int i = 0; i < 2000; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    word.wait(value, std::memory_order_acquire);
  }

  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> running_{0};
  bool stopping_ = false;
  std::function<void(int)> body_;
  int num_threads_;
  Threads threads_;  // last member, so that the threads end before the data they use
};

}  // namespace switchyard::cpu
