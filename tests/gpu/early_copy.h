// A kernel before a layer in its stream, which the layer may be launched behind before it ends.
#pragma once

#include <cstddef>

#include "gpu/device.h"

namespace switchyard::testing {

// Enqueues a copy that invites the next kernel at once, and writes only after some 20 us. `bytes`
// is a multiple of 4.
void enqueue_early_copy(void* to, const void* from, std::size_t bytes, const gpu::Stream& stream);

}  // namespace switchyard::testing
