#include "base/posix.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/interrupt.h"
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

void fill_random(void* data, std::size_t bytes, const char* what) {
  if (::getrandom(data, bytes, 0) == static_cast<ssize_t>(bytes)) return;
  throw_errno(fmt::format("cannot read random bytes for {}", what));
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno(fmt::format("cannot duplicate file descriptor {}", fd));
  return copy;
}

std::optional<ProcessState> state_by_stat(int stat_fd) {
  // "pid (name) state ...": the name has at most 64 bytes, and may contain parentheses itself.
  char buffer[256];
  ssize_t length = 0;
  do {
    length = ::read(stat_fd, buffer, sizeof buffer);
  } while (length < 0 && errno == EINTR);
  if (length < 0 && errno == ESRCH) return ProcessState::kExited;
  const std::string_view stat(buffer, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string_view::npos || name_end + 2 >= stat.size()) return std::nullopt;
  const char state = stat[name_end + 2];
  if (state == 'Z' || state == 'X') return ProcessState::kExited;
  return state == 'T' || state == 't' ? ProcessState::kStopped : ProcessState::kRuns;
}

ProcessState state_of_process(pid_t pid) {
  const auto is_gone = [pid] { return ::kill(pid, 0) != 0 && errno == ESRCH; };
  if (is_gone()) return ProcessState::kExited;
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  if (file) {
    if (const std::optional<ProcessState> state = state_by_stat(file.get())) return *state;
  }
  // The process has gone meanwhile, or there is no /proc.
  return is_gone() ? ProcessState::kExited : ProcessState::kRuns;
}

void wait_ready(std::vector<pollfd>& fds, Clock::time_point until) {
  // The time is rounded up: rounding down would spin through the last millisecond.
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  const auto longest = asks_for_interrupts() ? kInterruptInterval.count() : 60'000;
  const int timeout_ms = static_cast<int>(std::clamp<long long>(left, 0, longest));
  if (::poll(fds.data(), fds.size(), timeout_ms) < 0) {
    if (errno != EINTR) throw_errno("poll failed");
    for (pollfd& entry : fds) entry.revents = 0;
  }
}

std::chrono::milliseconds checked_deadline(std::chrono::milliseconds deadline) {
  if (deadline.count() <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("deadline is {} ms; give a positive one", deadline.count()));
  }
  return std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(24 * 365));
}

}  // namespace switchyard
