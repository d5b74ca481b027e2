// Prints rows of results as lines for people.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "results/row.h"

namespace switchyard::cli {

using results::Row;

// One line per row under one line of names, at most kReportColumns columns.
std::string row_heading();
std::string row_text(const Row& row);
// The rows that have a rival, each beside it.
std::vector<std::string> rival_text(std::span<const Row> rows);
// Geometric mean of time / floor, the worst point, and those slower than their rival.
std::vector<std::string> summary_text(std::span<const Row> rows);

}  // namespace switchyard::cli
