// What others publish of a layer, to stand beside rows of it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace switchyard::results {

// Times are of the slowest rank.
struct Published {
  std::string rival, source, model;
  std::string compute;  // of the rows that it stands beside; empty: of all
  std::int64_t experts = 0, ranks = 0;
  std::vector<std::pair<std::int64_t, double>> time_us;  // by tokens per rank, ascending
};

// A list of series, as in results/published.json. Throws Error{kInvalidFile} as parse_rows() does.
std::vector<Published> parse_published(std::string_view text, const std::string& source);

// The series of a file.
std::vector<Published> read_published(const std::filesystem::path& path);

}  // namespace switchyard::results
