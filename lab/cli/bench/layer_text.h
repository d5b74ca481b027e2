// Prints rows of results as lines for people.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "results/row.h"

namespace switchyard::cli {

using results::Row;

// A table has row_heading() as its first line, and one row_text() per row. Lines have at most
// kReportColumns columns.
std::string row_heading();
std::string row_text(const Row& row);
// Returns a table of the rows that have a rival, each beside its rival's time.
std::vector<std::string> rival_text(std::span<const Row> rows);
// Returns the geometric mean of time / floor, the worst point, and the points slower than their
// rival.
std::vector<std::string> summary_text(std::span<const Row> rows);

}  // namespace switchyard::cli
