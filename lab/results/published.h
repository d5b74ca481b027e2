// Measurements of a layer that others published, to stand beside our rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace switchyard::results {

// A series of times, each of the slowest rank.
struct Published {
  std::string rival, source, model;
  std::string compute;  // only for rows with this `compute`; empty: for all
  std::int64_t experts = 0, ranks = 0;
  std::vector<std::pair<std::int64_t, double>> time_us;  // (tokens per rank, time), ascending
};

// Parses a list of series in the form of results/published.json. Throws Error{kInvalidFile} as
// parse_rows() does.
std::vector<Published> parse_published(std::string_view text, const std::string& source);

// Reads the series of a file.
std::vector<Published> read_published(const std::filesystem::path& path);

}  // namespace switchyard::results
