// Takes turns on cores, for ranks that are threads of one process and outnumber its cores.
//
// Left to the operating system, such ranks take the core from each other every millisecond or so,
// and each time refill its caches (docs/decisions/0007). With leases, a rank keeps its core until
// it has nothing to do or its turn is over. A lease is advice, not a lock: a rank that waits for
// one while no rank of the world makes progress goes on without it. So a rank that stalls with a
// lease in hand stops nobody.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "base/origin.h"
#include "protocol/wait.h"

namespace switchyard::cpu {

class CoreLease {
 public:
  explicit CoreLease(const protocol::Heaps& heaps) : heaps_(heaps) { take(); }
  ~CoreLease() { give(); }
  CoreLease(const CoreLease&) = delete;
  CoreLease& operator=(const CoreLease&) = delete;

  void take() {
    Cores& cores = Cores::all();
    std::unique_lock lock(cores.mutex);
    if (cores.free > 0) {
      --cores.free;
      held_ = true;
    } else {
      Waiter waiter;
      cores.waiters.push_back(&waiter);
      for (std::uint64_t progress = ~std::uint64_t{0}; !waiter.granted;) {
        const std::uint64_t now = protocol::total_progress(heaps_);
        if (now == progress) break;
        progress = now;
        waiter.granted_signal.wait_for(lock, kPatience);
      }
      held_ = waiter.granted;
      if (!held_) std::erase(cores.waiters, &waiter);
    }
    taken_at_ = Clock::now();
  }

  // Gives the core back. Call it before waiting for anything.
  void give() {
    if (!held_) return;
    held_ = false;
    Cores& cores = Cores::all();
    const std::lock_guard lock(cores.mutex);
    if (cores.waiters.empty()) {
      ++cores.free;
      return;
    }
    Waiter* const next = cores.waiters.front();
    cores.waiters.pop_front();
    next->granted = true;
    next->granted_signal.notify_one();
  }

  bool held() const { return held_; }
  // True if no rank of this process holds some core or waits for it.
  static bool core_is_free() {
    const std::lock_guard lock(Cores::all().mutex);
    return Cores::all().free > 0;
  }

  // Passes the core on if the turn is over and another rank waits for it; returns true if it did.
  // Call it between tasks.
  bool offer() {
    if (!held_ || Clock::now() - taken_at_ < kTurn) return false;
    {
      const std::lock_guard lock(Cores::all().mutex);
      if (Cores::all().waiters.empty()) return false;
    }
    give();
    take();
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // A turn is long enough for most passes. Longer passes rotate, so that ranks share the cores even
  // if their number is not a multiple of the cores'.
  static constexpr std::chrono::milliseconds kTurn{250};
  // Longer than any task takes.
  static constexpr std::chrono::milliseconds kPatience{40};

  struct Waiter {
    bool granted = false;
    std::condition_variable granted_signal;
  };
  struct Cores {
    std::mutex mutex;
    int free = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    std::deque<Waiter*> waiters;

    // A child of fork() has cores of its own: the threads that hold the parent's are not there.
    static Cores& all() {
      static constinit PerProcess<Cores> cores;
      return cores.get();
    }
  };

  const protocol::Heaps& heaps_;
  bool held_ = false;
  Clock::time_point taken_at_;
};

}  // namespace switchyard::cpu
