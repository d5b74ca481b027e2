// How a thread of the CPU engine passes the time in a wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "protocol/wait.h"
#include "trace/clock.h"

namespace switchyard::cpu {

struct HostPace : protocol::WaitsAlone {
  static constexpr std::uint32_t kLooksPerAbortCheck = 1;
  static constexpr std::uint32_t kLeastLooksOfAJudge = 64;
  // Peers want to see that a rank which waits still runs. A look that follows a sleep costs little
  // beside it. On a host with more threads than cores a yield may last for many time slices, so
  // looks alone do not tell how long ago the last word was.
  bool reads_clock(std::uint32_t looks) {
    if (looks % 64 == 0 || looks >= kFirstSleep) return true;
    if (looks < kFirstYield) return false;
    const std::uint64_t time = clock();
    if (last_read_ == 0) last_read_ = time;
    return time - last_read_ >= kLongestSilence;
  }
  std::uint64_t now() { return last_read_ = clock(); }
  // Ranks may outnumber cores: after a few looks the core is better left to whoever is awaited.
  // Every wake-up takes it from them for some microseconds, so sleeps grow with the time already
  // waited; the last one still is a few hundredths of the whole.
  void pause(std::uint32_t looks) const {
    if (looks < kFirstYield) {
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
  static constexpr std::uint32_t kFirstYield = 32, kFirstSleep = 512;
  static constexpr std::uint64_t kLongestSilence = 1'000'000;  // ns

  static std::uint64_t clock() { return static_cast<std::uint64_t>(trace::now_ns()); }

  std::uint64_t last_read_ = 0;
};

}  // namespace switchyard::cpu
