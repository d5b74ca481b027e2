// How a GPU thread polls a word in memory: see protocol::wait_until.
#pragma once

#include <cstdint>

#include "gpu/ptx/clock.cuh"

namespace switchyard::gpu {

struct DevicePace {
  // A look costs a round trip to the L2 cache, and so does a look at the abort word.
  static constexpr std::uint32_t kLooksPerAbortCheck = 32;
  __device__ bool reads_clock(std::uint32_t looks) const { return looks % 64 == 0; }
  __device__ std::uint64_t now() const { return device_now_ns(); }
  __device__ void pause(std::uint32_t looks) const {
    // After so many looks the signal is not about to come: leave the L2 cache to others.
    if (looks > 1024) __nanosleep(256);
  }
};

}  // namespace switchyard::gpu
