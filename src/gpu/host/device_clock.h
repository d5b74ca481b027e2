// Where a device's global timer stands beside the host's clock.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// std::chrono::steady_clock minus the current device's global timer, both in nanoseconds, now. Of
// many questions the host asks the device through shared memory, the one answered first counts: the
// answer's moment is within half of that, a microsecond or so, of the middle; on all devices of a
// host the same half, so that two of them are compared more closely than that. Throws
// Error{kSystem} if the device does not answer within a second.
std::int64_t host_minus_device_ns();

}  // namespace switchyard::gpu
