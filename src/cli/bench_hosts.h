// `switchyard bench --suite hosts`: its table.
#pragma once

#include <filesystem>
#include <string>

#include "bench/hosts.h"

namespace switchyard::cli {

// A table of rows: a heading, and one line per row. Lines have at most kReportColumns columns.
std::string hosts_heading();
std::string hosts_text(const results::HostsRow& row);

// Measures as this process's rank. Rank 0 prints the table, and writes the rows to `json` if it is
// not empty. Returns the exit code.
int print_hosts(bench::HostsBenchOptions options, const std::filesystem::path& json);

}  // namespace switchyard::cli
