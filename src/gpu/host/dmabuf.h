// Descriptors by which networks reach a device's memory.
#pragma once

#include <cstddef>

#include "base/unique_fd.h"

namespace switchyard::gpu {

// Descriptors cover whole pages: memory must begin and end at a multiple.
inline constexpr std::size_t kDmabufPages = std::size_t{2} << 20;

// Exports memory of the current device. Returns none where the driver or the system gives none.
UniqueFd export_dmabuf(const void* memory, std::size_t bytes);

}  // namespace switchyard::gpu
