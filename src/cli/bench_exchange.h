// `switchyard bench --suite exchange`: its progress and its table.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/exchange.h"

namespace switchyard::cli {

// A table of rows: a heading, and one line per row. Lines have at most kReportColumns columns.
std::string exchange_heading();
std::string exchange_text(const results::ExchangeRow& row);

// Measures the points, prints the table, and writes the rows to `json` if it is not empty. Returns
// the exit code.
int print_exchange(const bench::ExchangeBenchOptions& options,
                   const std::vector<bench::ExchangePoint>& points,
                   const std::filesystem::path& json);

}  // namespace switchyard::cli
