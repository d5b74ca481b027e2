// The files of results/, which earlier versions wrote.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/temporary_directory.h"
#include "results/row_file.h"

namespace switchyard::results {

// Expects that a file is read without loss. Returns the number of its rows.
template <typename Row>
std::size_t expect_kept(const std::string& name) {
  const std::string path = std::string(SWITCHYARD_RESULTS) + '/' + name + ".json";
  const std::string text = test::read_file(path);
  const auto kept = nlohmann::ordered_json::parse(text);
  const std::vector<Row> rows = parse_rows<Row>(text, path);
  EXPECT_EQ(rows.size(), kept.size()) << path;
  for (std::size_t i = 0; i < rows.size() && i < kept.size(); ++i) {
    EXPECT_EQ(to_json(rows[i]).dump(), kept[i].dump()) << path << " row " << i + 1;
  }
  return rows.size();
}

}  // namespace switchyard::results
