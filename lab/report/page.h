// Makes one HTML page that needs no other files: data, style and program are in it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "report/ladder.h"
#include "report/routing.h"
#include "report/tables.h"
#include "report/timeline.h"
#include "report/tuning.h"
#include "results/published.h"
#include "results/row.h"

namespace switchyard::report {

using results::Published;
using results::Row;

// The rates from which the rows' floors were computed.
struct Roofs {
  double read_bytes_per_second = 0;
  double bf16_flops_per_second = 0;
  double fp8_flops_per_second = 0;
};

struct PageInput {
  std::span<const Row> rows;
  std::vector<std::string> files;  // the names that the page shows
  Roofs roofs;
  std::vector<Published> published;
  std::optional<Timeline> timeline;
  std::string trace_file;
  std::vector<Tuning> tunings;
  std::vector<Ladder> ladders;
  std::vector<Routing> routings;
  std::vector<Table> tables;
};

std::string make_page(const PageInput& input);

// Escapes a text for use between tags and in quoted attributes.
std::string escape_html(std::string_view text);
// Writes JSON for use within a <script>: no "</script>" and no "<!--" can occur in it.
std::string script_json(const Json& value);

}  // namespace switchyard::report
