// What can be said of all points of a suite.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "results/row.h"

namespace switchyard::report {

using results::Row;

// A geometric mean and the point that does worst; of `points` of the suite's rows.
struct Ratio {
  std::size_t points = 0;
  double mean = 0;
  double worst = 0;
  const Row* at = nullptr;
};

struct Suite {
  std::string name;
  std::vector<const Row*> rows;
  std::optional<Ratio> time_over_floor;  // worst: the largest
  std::optional<Ratio> speed_up;         // over the rival; worst: the smallest
  // Distinct values in order of appearance.
  std::vector<std::string> machines, commits, commands, dates, rivals;
};

// In order of appearance; points into `rows`.
std::vector<Suite> suites_of(std::span<const Row> rows);

}  // namespace switchyard::report
