// The rows that `switchyard bench --json` writes, read strictly: a page must not show a number that
// no file has.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/error.h"

namespace switchyard::report {

struct Rival {
  std::string name;
  double median_us = 0;
  std::optional<double> p10_us, p90_us;
};

// One point: a layer, a number of tokens, a skew. Loads are those of the most loaded rank.
struct Row {
  std::string suite, machine, commit, command;
  std::string date;  // empty where the row tells none
  std::string model;
  std::int64_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  std::string dtype, compute, routing;
  std::int64_t ranks = 0, tokens_per_rank = 0;
  double beta = 0;
  std::optional<double> beta_reached;
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double touched_bytes = 0, flops = 0, nvlink_bytes = 0;
  std::optional<double> floor_us;
  std::optional<Rival> rival;
  // Tokens of an expert over the experts' mean, ascending: at most 64 quantiles. Empty in rows that
  // were measured before bench kept it.
  std::vector<double> expert_load;

  std::optional<double> time_over_floor() const {
    return floor_us ? std::optional(median_us / *floor_us) : std::nullopt;
  }
  std::optional<double> speed_up() const {
    return rival ? std::optional(rival->median_us / median_us) : std::nullopt;
  }
};

// What others publish of a layer, to stand beside rows of it. Times are of the slowest rank.
struct Published {
  std::string rival, source, model;
  std::string compute;  // of the rows that it stands beside; empty: of all
  std::int64_t experts = 0, ranks = 0;
  std::vector<std::pair<std::int64_t, double>> time_us;  // by tokens per rank, ascending
};

// All of a file, or Error{code} that says why not.
std::string read_file(const std::filesystem::path& path);

// Throws Error{kInvalidFile} naming `source`, the row (from 1) and the field of what is no row.
std::vector<Row> parse_rows(std::string_view text, const std::string& source);

// The rows of all files in order. Also throws where two rows are of the same point.
std::vector<Row> read_rows(std::span<const std::filesystem::path> paths);

// A list of series, as in results/published.json. Throws Error{kInvalidFile} as parse_rows() does.
std::vector<Published> parse_published(std::string_view text, const std::string& source);

}  // namespace switchyard::report
