// Small owners and helpers around POSIX calls, shared by the process fabric and the launcher.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace switchyard {

// CLOCK_MONOTONIC: one clock for all processes of a host, so its time points may travel between
// them.
using Clock = std::chrono::steady_clock;

// The text of an errno, e.g. "No such file or directory (errno 2)".
std::string errno_text(int error_number);

// Throws Error{kSystem} with `what` and the current errno.
[[noreturn]] void throw_errno(const std::string& what);

// Fills `bytes` of `data` with random ones, for `what`. Throws Error{kSystem}.
void fill_random(void* data, std::size_t bytes, const char* what);

// A second descriptor of the same file, closed on exec.
UniqueFd duplicate(int fd);

enum class ProcessState {
  kRuns,
  kStopped,  // by a signal such as SIGSTOP, or by a debugger
  kExited,   // gone, or ended and only left to be waited for
};
// The state of a process. Throws nothing, since a process may vanish at any time.
ProcessState state_of_process(pid_t pid);
// The state of the process whose open /proc/PID/stat is given; nothing if the file does not tell.
std::optional<ProcessState> state_by_stat(int stat_fd);

// Sleeps until one of `fds` is ready or `until` has passed, and fills in their revents. May return
// early with nothing ready.
void wait_ready(std::vector<pollfd>& fds, Clock::time_point until);

// A deadline that clocks can add without overflow. Throws Error{kInvalidArgument} unless positive.
std::chrono::milliseconds checked_deadline(std::chrono::milliseconds deadline);

}  // namespace switchyard
