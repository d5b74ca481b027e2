// Reads a file of rows that is already parsed as JSON.
#pragma once

#include <string>
#include <vector>

#include "results/fields.h"
#include "results/row.h"

namespace switchyard::results {

// The rows of a file, which may be none. Throws what parse_rows() does. `remedy` says which file to
// give if this is one of something else.
std::vector<Row> rows_of(const Json& file, const std::string& source, const char* remedy);

}  // namespace switchyard::results
