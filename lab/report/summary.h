// Summaries over all points of a suite.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "results/row.h"

namespace switchyard::report {

using results::Row;

// A geometric mean over `points` of the suite's rows, and the point that does worst.
struct Ratio {
  std::size_t points = 0;
  double mean = 0;
  double worst = 0;
  const Row* at = nullptr;
};

struct Suite {
  std::string name;
  std::vector<const Row*> rows;
  std::optional<Ratio> time_over_floor;  // the worst is the largest
  std::optional<Ratio> speed_up;         // over the rival; the worst is the smallest
  // Distinct values in order of appearance.
  std::vector<std::string> machines, commits, commands, dates, rivals;
};

// The suites in order of appearance. They hold pointers into `rows`.
std::vector<Suite> suites_of(std::span<const Row> rows);

}  // namespace switchyard::report
