// Says why the process ends where memory that it was promised cannot be had. The kernel itself only
// sends a signal.
#pragma once

#include <csignal>

namespace switchyard::cli {

// While a guard lives, SIGBUS ends the process with `exit_code` and one line on stderr. The memory
// that ranks share is reserved and not yet there: a container may refuse a page of it when it is
// first written. (Checkpoints that are cut while they are mapped are not this guard's:
// base/mapped_file.h takes care of them, in every program.) Without a guard the process would end
// without a message. Only the command uses one: whether a process ends is for programs to say, and
// not for libraries. There may be one guard at a time.
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
