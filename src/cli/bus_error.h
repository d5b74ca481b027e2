// Reports which mapped file can no longer be read. The kernel itself only sends a signal.
#pragma once

#include <csignal>

namespace switchyard::cli {

// While a guard lives, SIGBUS ends the process with `exit_code` and one line on stderr that names
// the file. Such a file became shorter after it was mapped, or its disk failed. Without a guard the
// process would end without a message. Only the command uses one, because signals belong to
// programs and not to libraries. There may be one guard at a time.
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
