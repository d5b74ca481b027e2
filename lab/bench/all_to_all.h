// Times the all-to-all problem of GPU MODE, rung by rung, over ranks of this process.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "all_to_all/rank.h"
#include "bench/observer.h"
#include "bench/run_note.h"
#include "results/all_to_all_row.h"

namespace switchyard::bench {

// The name of the suite, which is no plan of layers.
inline constexpr const char* kAllToAllSuite = "all_to_all";

struct AllToAllOptions : RunNote {
  Backend backend = Backend::kCpu;  // with kCuda ranks share the GPUs that there are
  int ranks = 2;
  std::vector<all_to_all::Rung> rungs = all_to_all::ladder();
  all_to_all::StandIn stand_in = all_to_all::StandIn::kRank;
  // The cases that are only checked, and those that are timed, too.
  std::vector<all_to_all::Case> tests = all_to_all::test_cases();
  std::vector<all_to_all::Case> benchmarks = all_to_all::benchmark_cases();
  int repeat = 0;                         // timed calls; 0: 100 on a GPU, 5 elsewhere
  std::chrono::milliseconds deadline{0};  // of every wait; 0: the world's
  std::string commit, command;            // to note in the rows
};

// The workers' records of one call, by rank, for a trace.
struct AllToAllTrace {
  std::string rung;
  std::vector<all_to_all::CallRecords> of_rank;
};

class AllToAllObserver : public Observer<results::AllToAllRow> {
 public:
  // Called when all rungs are right on the cases that are only checked.
  virtual void checked(std::size_t cases) = 0;
};

class AllToAllSession {
 public:
  // Throws Error{kInvalidArgument} if the ranks do not divide a case's experts.
  AllToAllSession(AllToAllOptions options, AllToAllObserver& observer);

  const std::string& machine() const { return machine_; }
  // Checks and measures. Returns the rows of all cases.
  std::vector<results::AllToAllRow> run();
  // The traces belong to the last case that was measured: a call of each rung.
  const std::vector<AllToAllTrace>& traces() const { return traces_; }

 private:
  bool check(const all_to_all::Case& problem);
  std::vector<results::AllToAllRow> measure(const all_to_all::Case& problem);

  AllToAllOptions options_;
  AllToAllObserver& observer_;
  std::string machine_;
  int num_gpus_ = 0;  // that the ranks share; 0 on a CPU
  std::vector<AllToAllTrace> traces_;
};

// The geometric mean of a rung's medians over the cases of its rows.
struct RungMean {
  std::string rung;
  std::size_t cases = 0;
  double mean_us = 0;
};
// In the order of the rows.
std::vector<RungMean> rung_means(const std::vector<results::AllToAllRow>& rows);

// The rows of the block that received most over the mean of all blocks; 0 if there were none.
double receive_imbalance(const all_to_all::CallRecords& records);

// Writes a file for ui.perfetto.dev, or `switchyard report --trace`, in the Trace Event Format. A
// process is a rank on a rung, a thread is a block, a slice is a stage of a block, with its rows
// and its wait. Times count from a rank's first begin.
void write_all_to_all_trace(std::ostream& out, const std::vector<AllToAllTrace>& traces);

}  // namespace switchyard::bench
