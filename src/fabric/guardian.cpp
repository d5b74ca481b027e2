#include "fabric/guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "base/posix.h"

namespace switchyard {

Guardian::Guardian(int num_ranks) : num_ranks_(static_cast<std::size_t>(num_ranks)) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  UniqueFd read_end(ends[0]);
  launcher_lives_ = UniqueFd(ends[1]);
  void* const memory = ::mmap(nullptr, num_ranks_ * sizeof(Group), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map memory that the ranks share");
  groups_ = static_cast<Group*>(memory);
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) new (&groups_[rank]) Group(0);
  pid_ = ::fork();
  if (pid_ == 0) stand_guard(read_end.get());
  if (pid_ < 0) {
    const int error_number = errno;
    ::munmap(memory, num_ranks_ * sizeof(Group));
    errno = error_number;
    throw_errno("cannot fork the process that ends ranks if the launcher is killed");
  }
}

Guardian::~Guardian() {
  // The guardian kills what it finds, so there must be nothing.
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) forget(static_cast<int>(rank));
  launcher_lives_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  ::munmap(groups_, num_ranks_ * sizeof(Group));
}

void Guardian::guard_me(int rank) const noexcept {
  groups_[rank].store(::getpid(), std::memory_order_seq_cst);
}

void Guardian::forget(int rank) const noexcept {
  groups_[rank].store(0, std::memory_order_seq_cst);
}

// Between fork and _exit only async-signal-safe calls are allowed, as in the ranks.
void Guardian::stand_guard(int launcher_lives) const {
  // Neither Ctrl-C nor a hang-up of the terminal ends it: these are for the launcher, which ends it
  // in turn.
  ::setsid();
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  ::close(launcher_lives_.get());
  char nothing = 0;
  while (::read(launcher_lives, &nothing, 1) < 0 && errno == EINTR) {
  }
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
    const pid_t group = groups_[rank].load(std::memory_order_seq_cst);
    if (group > 0) ::kill(-group, SIGKILL);
  }
  ::_exit(0);
}

}  // namespace switchyard
