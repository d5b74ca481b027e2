// How a pass failed, in memory that the host and the kernels share.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// Kernels write these words, the host clears them.
struct Failures {
  std::uint64_t bad_id;  // a packed BadId; 0: none
  std::uint32_t given_up;
};

}  // namespace switchyard::gpu
