// Rows that a file may not hold.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "model/errors.h"
#include "results/row_file.h"

namespace switchyard::results {

template <typename Row>
void expect_refused(const Row& row, const char* part,
                    const std::function<void(nlohmann::ordered_json&)>& change) {
  nlohmann::ordered_json json = test::parsed(to_json(row));
  change(json);
  EXPECT_ERROR(parse_rows<Row>("[" + json.dump() + "]", "rows.json"), kInvalidFile, part);
}

}  // namespace switchyard::results
