// One point of a benchmark as files keep it: its key, its fields, how they are written, and how
// they are read strictly. A page must not show a number that no file has.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace switchyard::results {

struct Rival {
  std::string name;  // "torch 2.11.0 ordered"
  double median_us = 0;
  std::optional<double> p10_us, p90_us;
};

// One point: a layer, a number of tokens, a skew. Loads are those of the most loaded rank. Fields
// that are optional or empty may be absent from files: rows of earlier versions lack them, or they
// do not apply.
struct Row {
  std::string suite, machine, commit, command;
  std::string date;
  std::string model;
  std::int64_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  std::string dtype;             // of the expert weights, as short_name() has it
  std::string compute = "bf16";  // the arithmetic; rows from before FP8 lack it
  std::string routing = "gate";  // "gate", or "given": the gate was not timed
  std::int64_t ranks = 1, tokens_per_rank = 0;
  double beta = 1;                     // the balancedness asked for
  std::optional<double> beta_reached;  // of the experts' histogram
  // The main numbers: of replayed graphs if there are any, else of plain calls.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double touched_bytes = 0, flops = 0, nvlink_bytes = 0;
  std::optional<double> floor_us;  // none for a machine whose roofs are not known
  std::optional<Rival> rival;
  std::optional<double> median_us_no_graph;  // of plain calls
  std::optional<std::int64_t> experts_hit;
  // Tokens of an expert over the experts' mean, ascending: at most 64 quantiles.
  std::vector<double> expert_load;
  std::optional<std::int64_t> rotation_copies;  // of the layer's weights, which passes took in turn
  std::optional<std::int64_t> rotation_passes;  // between two looks at the clock
  std::optional<std::int64_t> graph_nodes;      // GPU operations of one pass
  std::optional<double> error, error_bound;     // of --verify
  std::vector<double> times_us;                 // of every repetition, in their order
  std::vector<double> times_us_no_graph;        // the same of plain calls, where both were timed

  std::optional<double> time_over_floor() const {
    return floor_us ? std::optional(median_us / *floor_us) : std::nullopt;
  }
  std::optional<double> speed_up() const {
    return rival ? std::optional(rival->median_us / median_us) : std::nullopt;
  }
};

// What makes two rows the same point: suite, model and sizes, types, ranks, tokens, beta, and who
// routes. Also how messages name it.
std::string point_of(const Row& row);

// Times in hundredths of a microsecond: events resolve no more.
Json to_json(const Row& row);

// Throws Error{kInvalidFile} naming `source`, the row (from 1) and the field of what is no row.
std::vector<Row> parse_rows(std::string_view text, const std::string& source);

// The rows of all files in order. Also throws where two rows are of the same point.
std::vector<Row> read_rows(std::span<const std::filesystem::path> paths);

// Throws what merge_rows() would throw for this file, before there are rows to lose.
void require_mergeable(const std::filesystem::path& file);

// Replaces the rows of a file that are of the same point as one of `rows`, and appends the others;
// the rest of the file stays as it is. The file appears whole or not at all, and processes that do
// it at once wait for each other. `keep_rival`: a row without a rival inherits that of the row it
// replaces. Throws Error{kInvalidFile} for a file of something else, and what write_whole() throws.
void merge_rows(const std::filesystem::path& file, std::span<const Row> rows, bool keep_rival);

}  // namespace switchyard::results
