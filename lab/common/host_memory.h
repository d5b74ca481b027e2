// The amount of memory that this host has for the process.
#pragma once

#include <cstdint>

namespace switchyard {

struct HostMemory {
  std::uint64_t total = 0;  // bytes, or the control group's limit if that is less
  // Bytes that can be had without swapping: MemAvailable, or the control group's room if that is
  // less.
  std::uint64_t available = 0;
};
HostMemory host_memory();

// The most memory this process has had resident, in bytes.
std::uint64_t peak_resident_bytes();

}  // namespace switchyard
