// How the caller of the library ends a call that waits: Ctrl-C in Python.
//
// The C interface opens an InterruptibleCall around each call. Waits on the thread that made the
// call ask interrupted() now and then; a "yes" ends the wait and, with it, the world. Threads of
// the library ask nobody: the thread that made the call ends their waits.
#pragma once

#include <pthread.h>

#include <chrono>

namespace switchyard {

// How often a wait asks. Users want an answer within 0.2 s, and a waiter may be late by a few time
// slices of a busy host.
inline constexpr std::chrono::milliseconds kInterruptInterval{50};

// Returns other than 0 if the call that waits is to end. It runs on the thread that made the call,
// which holds no lock of the library then. It may call the library, but not wait with what the call
// uses: see asks_caller_now().
using InterruptCheck = int (*)();

// From now on the calls of `thread` ask `check`; null: no call asks.
void set_interrupt_check(InterruptCheck check, pthread_t thread) noexcept;

// A call by this thread, from here to the end of the scope.
class InterruptibleCall {
 public:
  InterruptibleCall() noexcept;
  ~InterruptibleCall();
  InterruptibleCall(const InterruptibleCall&) = delete;
  InterruptibleCall& operator=(const InterruptibleCall&) = delete;

  // The same as the function below, faster.
  bool was_interrupted() const noexcept { return current_.ended; }

  struct State {
    InterruptCheck check = nullptr;  // null: this call does not ask
    bool ended = false;              // it said that the call is to end
    std::chrono::steady_clock::time_point asked{};
  };

 private:
  State& current_;  // the thread's
  // A check that runs inside of a call may make calls of its own.
  const State outer_;
};

// True if waits on this thread have to ask. They then wake up every kInterruptInterval.
bool asks_for_interrupts() noexcept;
// Asks, if the last question is kInterruptInterval ago. True if this thread's call is to end, from
// then on until its end. The caller may hold no lock.
bool interrupted() noexcept;
// The same without a question.
bool was_interrupted() noexcept;
// True inside of the check itself.
bool asks_caller_now() noexcept;

}  // namespace switchyard
