// Being late on purpose.
#pragma once

#include <chrono>
#include <thread>

namespace switchyard::run {

// Returns at that time. Sleeps, so that a late rank takes no core from the others, and spins for
// the last bit.
inline void wait_until(std::chrono::steady_clock::time_point time) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kSleepsLonger(200);
  if (time - Clock::now() > 2 * kSleepsLonger) std::this_thread::sleep_until(time - kSleepsLonger);
  while (Clock::now() < time) {
  }
}

}  // namespace switchyard::run
