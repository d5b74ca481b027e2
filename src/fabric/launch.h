// Starts the ranks of a world as processes of this host and sees them to their end:
// `switchyard launch -n 4 -- command arguments`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace switchyard {

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;  // the program, found through PATH, and its arguments
  // Set for every rank, over the launcher's own environment and over what it sets itself.
  std::vector<std::pair<std::string, std::string>> environment;
  // After a rank failed, how long the others may take to report their own error before SIGTERM; and
  // how long after SIGTERM before SIGKILL. Where no rank has said yet why the world failed, the
  // ranks' own deadlines (WorldOptions::deadline) come on top: they may all still wait.
  std::chrono::milliseconds grace{5'000};
  // Longest time the ranks may run.
  std::optional<std::chrono::milliseconds> deadline;
  // Start every line that a rank writes with "[rank 2] ".
  bool label_output = false;
};

// Every rank runs in a process group of its own, reads /dev/null, and finds RANK, WORLD_SIZE,
// LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR=127.0.0.1 and a fresh SWITCHYARD_RENDEZVOUS in its
// environment; MASTER_PORT is not set. SIGINT, SIGTERM and SIGHUP are forwarded to the ranks, a
// second one kills them. The ranks are killed if the calling thread ends before they do.
//
// Returns 0 if all ranks did; otherwise the exit code of the rank that failed first, 128 + the
// signal's number if a signal ended it, and names on stderr the rank that did not do its part, as
// the others found, or that failed first; 124 if the deadline passed; 127 if the command cannot be
// run. Throws Error{kInvalidArgument} for options that make no sense and Error{kSystem} if
// processes cannot be made.
//
// Owns the process's signal mask and SIGCHLD while it runs; for the main thread of a command.
int launch(const LaunchOptions& options);

}  // namespace switchyard
