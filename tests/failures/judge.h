// Whether the survivors of a trial said what is true, in time.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "failures/board.h"
#include "failures/trial.h"

namespace switchyard::failures {

struct Limits {
  std::chrono::milliseconds deadline{4'000};
  // How long after the deadline a rank may notice one that is stopped. Other trials and other
  // programs share the machine.
  std::chrono::milliseconds slack{500};
  std::chrono::milliseconds at_once{1'000};  // how long until a rank notices one that has ended
  std::chrono::milliseconds grace{1'000};    // LaunchOptions::grace
  // Time that a busy machine takes to start the parts of a world over hosts: only the collective
  // behind that misses a stopped rank. And to remove the network namespaces of a launch.
  std::chrono::milliseconds hosts_start{3'000}, hosts_end{3'000};
};

// The ranks that a message accuses: of which it says that they did not do something, were lost,
// closed their connection and the like, or whose process, by `pids`, has exited or is stopped. A
// rank that the message only says to wait is not accused.
std::set<int> accused_by(const std::string& message, const std::vector<int>& pids);

// A launcher's end and its words.
struct Launched {
  int exit_code = 0;
  std::int64_t ended_ns = 0;
  // When the trial ended a stopped rank that nobody missed; else 0.
  std::int64_t released_ns = 0;
  std::string errors;  // its standard error
};
// The rank that the launcher's last line is about; -1 if it named none.
int named_by_launcher(const std::string& errors);

struct Verdict {
  bool wrong = false;      // a rank did not end with a TimeoutError that names the victim
  bool innocents = false;  // a message accuses another rank
  bool late = false;
  bool hangs = false;
  bool launcher = false;             // its last line names another rank, or none
  bool before_harm = false;          // a rank failed before anything was done to the victim
  bool nobody_failed = true;         // all survivors finished everything
  std::vector<std::int64_t> delays;  // ns from the harm until a rank named the victim
  std::int64_t launcher_delay = 0;   // ns from the harm until the launcher ended; 0: none
  std::string report;                // what was said, a line for each rank
  std::vector<std::string> causes;   // what was bad, without the numbers of this trial
  bool is_bad() const { return wrong || innocents || late || hangs || launcher; }
};

struct Ending {
  std::vector<bool> killed;   // by rank: the trial had to end it
  std::vector<int> statuses;  // by rank: of waitpid(); not of launched ranks
  bool before_harm = false;
  // The longest time for which the machine kept the process of the trial itself from running.
  std::int64_t stall_ns = 0;
};

Verdict judge(const Trial& trial, const Limits& limits, const Board& board, const Ending& ending,
              const Launched* launched);

}  // namespace switchyard::failures
