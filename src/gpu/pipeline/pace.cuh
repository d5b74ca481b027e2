// How a GPU thread polls a word in memory: see protocol::wait_until.
#pragma once

#include <cstdint>

#include "gpu/ptx/clock.cuh"
#include "protocol/wait.h"

namespace switchyard::gpu {

struct ThreadPace : protocol::WaitsAlone {
  // A look at the word waited for costs a round trip to the L2 cache, and so does a look at the
  // abort word.
  static constexpr std::uint32_t kLooksPerAbortCheck = 32;
  // The threads of a GPU all run at once, so a waiting rank soon refreshes its `waits_for` word.
  static constexpr std::uint32_t kLeastLooksOfAJudge = 16;
  __device__ bool reads_clock(std::uint32_t looks) const { return looks % 64 == 0; }
  __device__ std::uint64_t now() const { return device_now_ns(); }
  __device__ void pause(std::uint32_t looks) const {
    // After so many looks the signal is not imminent: leave the L2 cache to others.
    if (looks > 1024) __nanosleep(256);
  }
};

// The pace of a whole warp: all its lanes take part in every look.
struct WarpPace : ThreadPace {
  __device__ static bool keeps_clock() { return threadIdx.x % 32 == 0; }
  __device__ static bool any(bool holds) { return __any_sync(~0u, holds) != 0; }
};

}  // namespace switchyard::gpu
