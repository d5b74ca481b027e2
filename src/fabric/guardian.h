// A process that ends the ranks' children if the launcher is killed and can no longer do so.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <type_traits>

#include "base/unique_fd.h"

namespace switchyard {

// The kernel kills a rank when its launcher ends (PR_SET_PDEATHSIG), but not what the rank started:
// the program behind `sh -c "program; cleanup"` would run on. The guardian waits for the launcher's
// end and then kills the process groups of all ranks.
//
// Not covered are
// - processes that left their rank's group (setsid, or the job control of an interactive shell),
//   which no signal of the launcher reaches either,
// - children of ranks if the guardian is killed together with the launcher,
// - ranks under another user id (a set-user-id program), which the kernel exempts from
//   PR_SET_PDEATHSIG, and which the guardian may not signal.
class Guardian {
 public:
  // Forks. Throws Error{kSystem}.
  explicit Guardian(int num_ranks);
  // Ends the guardian process and leaves the ranks alone.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // Puts the calling process's group under guard. A rank calls it between fork and exec, before it
  // can have children, so it makes no calls that are not async-signal-safe.
  void guard_me(int rank) const noexcept;
  // Call it before the rank is waited for: from then on the group's number may be used again.
  void forget(int rank) const noexcept;

 private:
  using Group = std::atomic<pid_t>;
  static_assert(Group::is_always_lock_free && std::is_trivially_destructible_v<Group>,
                "processes share it");

  [[noreturn]] void stand_guard(int launcher_lives) const;

  std::size_t num_ranks_;
  Group* groups_ = nullptr;  // by rank, in shared memory; 0: none
  UniqueFd launcher_lives_;  // closed by the launcher's end, whatever ends it
  pid_t pid_ = -1;
};

}  // namespace switchyard
