// The fields that rows of all suites have: the run that they come from, and their times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/load.h"

namespace switchyard::bench {

struct RunNote {
  std::uint64_t seed = 0;       // of everything random
  std::string commit, command;  // to note in the rows
};

template <typename Row>
Row row_of_run(const char* suite, const std::string& machine, const RunNote& run) {
  Row row;
  row.suite = suite;
  row.machine = machine;
  row.commit = run.commit;
  row.command = run.command;
  return row;
}

template <typename Row>
void set_times(Row& row, const std::vector<double>& times) {
  row.median_us = percentile(times, 0.5);
  row.p10_us = percentile(times, 0.1);
  row.p90_us = percentile(times, 0.9);
  row.repeats = static_cast<std::int64_t>(times.size());
}

}  // namespace switchyard::bench
