// A file of rows once it is JSON.
#pragma once

#include <string>
#include <vector>

#include "results/fields.h"
#include "results/row.h"

namespace switchyard::results {

// The rows of a file, which may be none. Throws what parse_rows() does; `remedy` tells what to give
// instead of a file of something else.
std::vector<Row> rows_of(const Json& file, const std::string& source, const char* remedy);

}  // namespace switchyard::results
