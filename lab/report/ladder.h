// The all-to-all problem rung by rung on the page.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "results/all_to_all_row.h"

namespace switchyard::report {

struct Ladder {
  std::vector<results::AllToAllRow> rows;
  std::string file;  // the name that the page shows
};

// Returns the data that the page's script draws. Throws Error{kInvalidFile} for a row without the
// times of its ranks or stages, which cannot be drawn.
Json ladder_json(const Ladder& ladder);

}  // namespace switchyard::report
