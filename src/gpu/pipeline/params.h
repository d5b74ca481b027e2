// What waits need of the layer.
#pragma once

#include <cstdint>

#include "gpu/pipeline/failures.h"
#include "protocol/control.h"

namespace switchyard::gpu {

struct WaitParams {
  protocol::Heaps heaps;
  std::uint64_t deadline_ns;
  volatile Failures* failures;
};

}  // namespace switchyard::gpu
