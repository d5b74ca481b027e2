// What `switchyard trace` tells of a pass.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "cli/format.h"
#include "trace/summary.h"

namespace switchyard::cli {

// "rank 3 waited 41.2 us for rank 5's dispatch of expert 17". `unit` is that of the backend:
// "thread" or "SM".
std::string describe_wait(const trace::PathStep& step, const char* unit);

// Lines of at most kReportColumns columns, escape codes not counted.
std::vector<std::string> to_text(const trace::Summary& summary, const char* unit,
                                 const Palette& palette);
Json to_json(const trace::Summary& summary, const char* unit);

}  // namespace switchyard::cli
