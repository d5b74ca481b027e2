// Times what a stream does, by the device's clock.
#pragma once

#include <functional>
#include <vector>

#include "bench/rotation.h"
#include "gpu/device.h"

namespace switchyard::bench {

// Returns the microseconds per pass of `repeat` repetitions. `calls` enqueues rotation.passes
// passes. All repetitions are enqueued before the host waits, so that its time to launch is not
// measured: a flush of the L2 cache keeps the device busy meanwhile. With a rotation of one pass,
// each repetition is behind a flush of its own.
std::vector<double> time_on_stream(const gpu::Stream& stream, const Rotation& rotation, int repeat,
                                   const std::function<void()>& calls);

}  // namespace switchyard::bench
