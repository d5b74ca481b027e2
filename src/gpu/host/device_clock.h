// The offset between a device's global timer and the host's clock.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// Returns std::chrono::steady_clock minus the current device's global timer, both in nanoseconds,
// now. The host asks the device many times through shared memory and uses the question that was
// answered fastest. The device answers within half of that time, a microsecond or so, of its
// middle. The error is alike on all devices of a host, so two of them compare more closely than
// that. Throws Error{kSystem} if the device does not answer within a second.
std::int64_t host_minus_device_ns();

}  // namespace switchyard::gpu
