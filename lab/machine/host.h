// Facts about this host.
#pragma once

#include <cstdint>
#include <string>

namespace switchyard::machine {

std::string cpu_name();
int hardware_threads();

// The policy for transparent huge pages: "always", "madvise", "never", or "unknown".
std::string huge_page_policy();

// Why an abstract Unix socket cannot be bound here; empty if it can.
std::string abstract_socket_problem();

// The sign of an NVIDIA device ("/dev/nvidia0", the path of nvidia-smi); empty if there is none.
std::string nvidia_device();

// The path of a program that a shell would find by this name; empty if there is none.
std::string found_on_path(const std::string& name);

// The path of the running executable.
std::string own_executable();

}  // namespace switchyard::machine
