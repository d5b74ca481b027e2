// `switchyard bench --suite grouped`: its progress and its table.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/grouped.h"

namespace switchyard::cli {

// A table of grouped rows: a heading, and one line per row. Lines have at most kReportColumns
// columns.
std::string grouped_heading();
std::string grouped_text(const results::GroupedRow& row);

// Measures the points, prints the table, and writes the rows to `json` if it is not empty. Returns
// the exit code.
int print_grouped(const bench::GroupedOptions& options,
                  const std::vector<bench::GroupedPoint>& points,
                  const std::filesystem::path& json);

}  // namespace switchyard::cli
