// What a process says when a file that it has mapped cannot be read any more.
#pragma once

#include <csignal>

namespace switchyard::cli {

// While it lives, a memory access that fails because a mapped file has become shorter, or because
// its disk or the machine's memory does, ends the process with one line on stderr that names the
// file, and with `exit_code`. Without, it would end by SIGBUS without a word. Signals belong to a
// program, not to a library: only the command does this. One at a time.
class BusErrorGuard {
 public:
  explicit BusErrorGuard(int exit_code);
  ~BusErrorGuard();
  BusErrorGuard(const BusErrorGuard&) = delete;
  BusErrorGuard& operator=(const BusErrorGuard&) = delete;

 private:
  struct sigaction before_ {};
};

}  // namespace switchyard::cli
