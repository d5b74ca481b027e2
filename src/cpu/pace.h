// How a thread of the CPU engine passes the time in a wait.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace switchyard::cpu {

struct HostPace {
  std::uint64_t now() const {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now().time_since_epoch())
                                          .count());
  }
  // Ranks may outnumber cores: after a few looks the core is better left to whoever is awaited.
  void pause(std::uint32_t looks) const {
    if (looks < 32) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (looks < 512) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
};

}  // namespace switchyard::cpu
