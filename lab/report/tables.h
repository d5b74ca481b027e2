// Rows of any other kind on the page: what suites, the tuner and scripts write.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/json.h"

namespace switchyard::report {

struct Table {
  Json rows;         // objects of texts, numbers and flags
  std::string file;  // the name that the page shows
  std::size_t size() const { return rows.elements().size(); }
};

// Returns a file's rows as the page's script draws them: the members that are texts, numbers or
// flags. Rows are the elements of a list, the "classes" of check-hf, or the "benchmarks" of Google
// Benchmark. Returns none for rows of layers and of the all-to-all problem, which have charts of
// their own, and for anything that is no rows: each row must be an object with a suite or a
// machine, and one of them must have a number or a status.
std::optional<Table> table_of(const Json& file, std::string name);

}  // namespace switchyard::report
