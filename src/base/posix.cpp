#include "base/posix.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "switchyard/error.h"

namespace switchyard {

std::string errno_text(int error_number) {
  char buffer[128];
  return fmt::format("{} (errno {})", ::strerror_r(error_number, buffer, sizeof buffer),
                     error_number);
}

void throw_errno(const std::string& what) {
  const int error_number = errno;
  throw Error(ErrorCode::kSystem, fmt::format("{}: {}", what, errno_text(error_number)));
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno(fmt::format("cannot duplicate file descriptor {}", fd));
  return copy;
}

void wait_ready(std::vector<pollfd>& fds, Clock::time_point until) {
  // Rounded up: rounding down would spin through the last millisecond.
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  const int timeout_ms = static_cast<int>(std::clamp<long long>(left, 0, 60'000));
  if (::poll(fds.data(), fds.size(), timeout_ms) < 0) {
    if (errno != EINTR) throw_errno("poll failed");
    for (pollfd& entry : fds) entry.revents = 0;
  }
}

std::chrono::milliseconds checked_deadline(std::chrono::milliseconds deadline) {
  if (deadline.count() <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the deadline is {} ms; give a positive one", deadline.count()));
  }
  return std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(24 * 365));
}

}  // namespace switchyard
