// What this host is.
#pragma once

#include <cstdint>
#include <string>

namespace switchyard::cli {

std::string cpu_name();
int hardware_threads();

struct Memory {
  std::uint64_t total = 0;
  // What can be had without swapping: MemAvailable, or the control group's room if that is less.
  std::uint64_t available = 0;
};
Memory memory();

// The policy for transparent huge pages: "always", "madvise", "never", or "unknown".
std::string huge_page_policy();

// Why an abstract Unix socket cannot be bound here; empty if it can.
std::string abstract_socket_problem();

// How an NVIDIA device shows ("/dev/nvidia0", the path of nvidia-smi); empty if none does.
std::string nvidia_device();

// The most memory this process has had resident, in bytes.
std::uint64_t peak_resident_bytes();

// The path of the running executable.
std::string own_executable();

}  // namespace switchyard::cli
