#include "common/host_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace switchyard {

namespace {

// The value of "name: 1234 kB" in bytes; 0 if there is none.
std::uint64_t kibibytes_in(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name + ":")) continue;
    std::uint64_t kibibytes = 0;
    std::istringstream(line.substr(name.size() + 1)) >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

}  // namespace

HostMemory host_memory() {
  HostMemory found{kibibytes_in("/proc/meminfo", "MemTotal"),
                   kibibytes_in("/proc/meminfo", "MemAvailable")};
  std::uint64_t limit = 0;
  std::uint64_t used = 0;
  // Without a limit the file says "max", which leaves the stream failed and the branch untaken.
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    found.total = std::min(found.total, limit);
    found.available = std::min(found.available, limit > used ? limit - used : 0);
  }
  return found;
}

// getrusage() will not do: its maximum is inherited through exec, so a launcher's would count.
std::uint64_t peak_resident_bytes() { return kibibytes_in("/proc/self/status", "VmHWM"); }

}  // namespace switchyard
