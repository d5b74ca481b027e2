// Starts the ranks of a world as processes, of this host or of several, and sees them to their end:
// `switchyard launch -n 4 -- command arguments`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace switchyard {

struct LaunchOptions {
  int num_ranks = 1;  // a multiple of the number of hosts
  // Names of other machines, which `ssh` reaches without a password, and under which they reach
  // each other. The first has the lowest ranks. Empty: this host.
  std::vector<std::string> hosts;
  // The number of network namespaces of this host that stand for hosts, instead of `hosts`; 0:
  // none. For tests; needs root.
  int namespaces = 0;
  std::vector<std::string> command;  // the program, found through PATH, and its arguments
  // MASTER_PORT. 0: a free one of this host, or, for several hosts, a random one from 20000 to
  // 29999.
  int master_port = 0;
  // Variables set for every rank. They override the launcher's own environment and the variables
  // that the launcher sets.
  std::vector<std::pair<std::string, std::string>> environment;
  // After a rank failed, the other ranks have this time to report their own error before SIGTERM,
  // and the same time again before SIGKILL. While no rank has said yet why the world failed, the
  // ranks' own deadlines (WorldOptions::deadline) come on top: all ranks may still be waiting. A
  // stopped rank gets no time: it is killed once all others have ended.
  std::chrono::milliseconds grace{5'000};
  // Longest time the ranks may run.
  std::optional<std::chrono::milliseconds> deadline;
  // Start every line that a rank writes with "[rank 2] ".
  bool label_output = false;
};

// Every rank runs in a process group of its own, reads /dev/null, and finds a fresh
// SWITCHYARD_RENDEZVOUS in its environment, and what torchrun sets: RANK, LOCAL_RANK, GROUP_RANK
// (its host's number), ROLE_RANK, their WORLD_SIZEs, ROLE_NAME=default, MASTER_ADDR=127.0.0.1,
// MASTER_PORT, and TORCHELASTIC_RUN_ID, _RESTART_COUNT=0 and _MAX_RESTARTS=0. Not set are
// TORCHELASTIC_USE_AGENT_STORE, because rank 0 serves the store itself, and OMP_NUM_THREADS, which
// is the user's. Others of TORCHELASTIC_ are an outer job's and removed. On several hosts
// MASTER_ADDR is the first, the rendezvous a tcp:// there, and SWITCHYARD_SECRET the launcher's own
// or a fresh one, which travels through ssh's standard input. There a rank begins in the launcher's
// working directory, finds what `environment` sets, and is ended when its ssh is. SIGINT, SIGTERM
// and SIGHUP are forwarded to the ranks; a second signal kills them. The ranks are killed if the
// calling thread ends before they do, whatever ends it, and what they started in their process
// groups with them; guardian.h says what outlives it. Namespaces end with the last of them.
//
// Returns 0 if all ranks return 0. Otherwise it returns the exit code of the rank that failed
// first, or 128 + the signal's number if a signal ended that rank. Its last line on stderr then
// names a rank: the one that did not do its part, if ranks have told who that is, else the one that
// failed first. If ranks blame different ones, it is one that was killed, then one that is stopped,
// then the one that most blame. It returns 124 if the deadline passed and 127 if the command cannot
// be run. Throws Error{kInvalidArgument} for options that make no sense and Error{kSystem} if
// processes cannot be made.
//
// It owns the process's signal mask and SIGCHLD while it runs, so only the main thread of a command
// should call it.
int launch(const LaunchOptions& options);

}  // namespace switchyard
