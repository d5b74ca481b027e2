#include "base/interrupt.h"

#include <atomic>

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<InterruptCheck> process_check{nullptr};
std::atomic<pthread_t> asking_thread{};

thread_local constinit InterruptibleCall::State current;
// Calls of the checks that run on this thread do not ask, so that checks do not nest.
thread_local constinit bool asking = false;

}  // namespace

void set_interrupt_check(InterruptCheck check, pthread_t thread) noexcept {
  process_check.store(nullptr, std::memory_order_relaxed);
  asking_thread.store(thread, std::memory_order_relaxed);
  // Release: a thread that sees the check sees whose calls ask it.
  process_check.store(check, std::memory_order_release);
}

InterruptibleCall::InterruptibleCall() noexcept : current_(current), outer_(current_) {
  current_ = {};
  const InterruptCheck check = process_check.load(std::memory_order_acquire);
  if (check == nullptr) return;
  // Another thread need not be able to ask. In Python only the main thread may handle signals, and
  // others may not even take the interpreter's lock while the process ends.
  if (pthread_equal(asking_thread.load(std::memory_order_relaxed), ::pthread_self()) == 0) return;
  if (!asking) current_.check = check;
}

InterruptibleCall::~InterruptibleCall() { current_ = outer_; }

bool asks_for_interrupts() noexcept { return current.check != nullptr; }

bool interrupted() noexcept {
  if (current.check == nullptr || current.ended) return current.ended;
  const Clock::time_point now = Clock::now();
  // A wait that ends at once asks nobody: a question takes the interpreter's lock.
  if (current.asked == Clock::time_point()) current.asked = now;
  if (now - current.asked < kInterruptInterval) return false;
  asking = true;
  const bool ended = current.check() != 0;
  asking = false;
  current.ended = ended;
  current.asked = Clock::now();
  return ended;
}

bool was_interrupted() noexcept { return current.ended; }

bool asks_caller_now() noexcept { return asking; }

}  // namespace switchyard
