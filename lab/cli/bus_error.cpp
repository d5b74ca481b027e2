#include "cli/bus_error.h"

#include <unistd.h>

#include <atomic>
#include <string_view>

namespace switchyard::cli {
namespace {

std::atomic<int> exit_code_of_guard{0};
std::atomic_flag is_told = ATOMIC_FLAG_INIT;

// Calls only what POSIX declares safe in a signal handler, and allocates nothing.
void handle(int, siginfo_t* info, void*) {
  // This signal came from kill() or a machine check. It ends the process as if there were no guard.
  if (info->si_code != BUS_ADRERR) {
    ::signal(SIGBUS, SIG_DFL);
    ::raise(SIGBUS);
    return;
  }
  if (is_told.test_and_set()) {
    // Another thread is already reporting, and will end the process.
    for (;;) ::pause();
  }
  constexpr std::string_view kLine =
      "switchyard: error (capacity_exceeded): memory that was reserved cannot be had, or a file of "
      "the program cannot be read; free some memory, or raise the container's limit\n";
  // One call writes the whole line, so that lines of several ranks do not mix. A failure is
  // ignored: there is no other place to report to.
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, kLine.data(), kLine.size());
  ::_exit(exit_code_of_guard.load());
}

}  // namespace

BusErrorGuard::BusErrorGuard(int exit_code) {
  exit_code_of_guard = exit_code;
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, &before_);
}

BusErrorGuard::~BusErrorGuard() { ::sigaction(SIGBUS, &before_, nullptr); }

}  // namespace switchyard::cli
