// How a thread of the CPU engine passes the time in a wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "trace/clock.h"

namespace switchyard::cpu {

struct HostPace {
  static constexpr std::uint32_t kLooksPerAbortCheck = 1;
  // A look that follows a sleep costs nothing beside it, and peers want to see that a rank which
  // waits still runs.
  bool reads_clock(std::uint32_t looks) const { return looks % 64 == 0 || looks >= kFirstSleep; }
  std::uint64_t now() const { return static_cast<std::uint64_t>(trace::now_ns()); }
  // Ranks may outnumber cores: after a few looks the core is better left to whoever is awaited.
  // Every wake-up takes it from them for some microseconds, so sleeps grow with the time already
  // waited; the last one still is a few hundredths of the whole.
  void pause(std::uint32_t looks) const {
    if (looks < 32) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (looks < kFirstSleep) {
      std::this_thread::yield();
    } else {
      const std::uint32_t microseconds = 50 + 10 * std::min(looks - kFirstSleep, 95u);
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
  }

 private:
  static constexpr std::uint32_t kFirstSleep = 512;
};

}  // namespace switchyard::cpu
