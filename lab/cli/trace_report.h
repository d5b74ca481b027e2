// The report of `switchyard trace` about a pass.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "cli/format.h"
#include "run/trace_summary.h"

namespace switchyard::cli {

// Returns a text like "rank 3 waited 41.2 us for rank 5's dispatch of expert 17". `unit` is the
// backend's, "thread" or "SM".
std::string describe_wait(const trace::PathStep& step, const char* unit);

// Returns lines of at most kReportColumns columns, not counting escape codes.
std::vector<std::string> to_text(const trace::Summary& summary, const char* unit,
                                 const Palette& palette);
Json to_json(const trace::Summary& summary, const char* unit);

}  // namespace switchyard::cli
