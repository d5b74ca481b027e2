// The parameters of the layer that waits use.
#pragma once

#include <cstdint>

#include "gpu/pipeline/failures.h"
#include "protocol/control.h"

namespace switchyard::gpu {

// The deadline of a wait within a block. Such a wait often is the consequence of one between
// blocks. That one should end first, and its judge needs some time even if the deadline is short.
constexpr std::uint64_t block_deadline(std::uint64_t deadline_ns) {
  constexpr std::uint64_t kOfAJudge = 10'000'000;
  return 2 * deadline_ns + kOfAJudge;
}

struct WaitParams {
  protocol::Heaps heaps;
  std::uint64_t deadline_ns;
  // block_deadline(deadline_ns), stored because math warps have no registers to compute it in.
  std::uint64_t block_deadline_ns;
  volatile Failures* failures;
};

}  // namespace switchyard::gpu
