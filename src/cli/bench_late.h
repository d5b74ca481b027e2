// `switchyard bench --suite late`: its progress and its table.
#pragma once

#include <filesystem>
#include <string>

#include "bench/late.h"

namespace switchyard::cli {

// A table of rows: a heading, and one line per row. Lines have at most kReportColumns columns.
std::string late_heading();
std::string late_text(const results::LateRow& row);

// Measures the points, prints the table, and writes the rows to `json` if it is not empty. Returns
// the exit code.
int print_late(const bench::LateOptions& options, const std::filesystem::path& json);

}  // namespace switchyard::cli
