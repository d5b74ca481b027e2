// `switchyard bench --suite all_to_all`: its progress and its tables.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/all_to_all.h"

namespace switchyard::cli {

// Lines of at most kReportColumns columns: a heading for the rows of a case, a row, and a line for
// each of the row's ranks.
std::string all_to_all_heading();
std::vector<std::string> all_to_all_text(const results::AllToAllRow& row);

// Checks and measures, prints the tables, and writes the rows to `json` and a trace of the last
// case to `trace`, where these are not empty. Returns the exit code.
int print_all_to_all(const bench::AllToAllOptions& options, const std::filesystem::path& json,
                     const std::filesystem::path& trace);

}  // namespace switchyard::cli
