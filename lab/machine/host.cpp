#include "machine/host.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "switchyard/error.h"

namespace switchyard::machine {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

int hardware_threads() {
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

std::string huge_page_policy() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(file, text);
  const std::size_t open = text.find('[');
  const std::size_t close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "unknown";
  return text.substr(open + 1, close - open - 1);
}

std::string abstract_socket_problem() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return fmt::format("socket failed: {}", std::strerror(errno));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("switchyard-doctor-{}", ::getpid());
  // The first byte of the path stays 0, which is what makes the name abstract.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  std::string problem;
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    problem = fmt::format("bind failed: {}", std::strerror(errno));
  }
  ::close(fd);
  return problem;
}

std::string found_on_path(const std::string& name) {
  std::error_code ignored;
  const char* const path = std::getenv("PATH");
  std::istringstream directories(path == nullptr ? "" : path);
  for (std::string directory; std::getline(directories, directory, ':');) {
    const fs::path candidate = fs::path(directory) / name;
    if (fs::exists(candidate, ignored)) return candidate.string();
  }
  return "";
}

std::string nvidia_device() {
  std::error_code ignored;
  return fs::exists("/dev/nvidia0", ignored) ? "/dev/nvidia0" : found_on_path("nvidia-smi");
}

std::string own_executable() {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  if (error) {
    throw Error(ErrorCode::kSystem,
                fmt::format("cannot read /proc/self/exe: {}; mount /proc", error.message()));
  }
  return path.string();
}

}  // namespace switchyard::machine
