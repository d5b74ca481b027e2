// One point of a benchmark as files keep it: its key, its fields, and how they are written and
// read. Reading is strict, because a page must not show a number that no file has.
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
  std::optional<std::int64_t> rotation_passes;  // timed together
  std::optional<std::int64_t> graph_nodes;      // GPU operations of one pass
  std::optional<double> error, error_bound;     // of --verify
  std::optional<bool> gate;                     // of the suite thesis: the gate is in the time
  std::vector<double> times_us;                 // of every repetition, in their order
  std::vector<double> times_us_no_graph;        // the same of plain calls, where both were timed

  std::optional<double> time_over_floor() const {
    return floor_us ? std::optional(median_us / *floor_us) : std::nullopt;
  }
  std::optional<double> speed_up() const {
    return rival ? std::optional(rival->median_us / median_us) : std::nullopt;
  }
};

// Returns the key of a row's point: suite, model and sizes, types, ranks, tokens, beta, and who
// routes. Two rows with equal keys are of the same point. Messages name a point by its key.
std::string point_of(const Row& row);

// Writes a row. Times are rounded to hundredths of a microsecond, because events resolve no more.
Json to_json(const Row& row);

// Reads a list of rows. Throws Error{kInvalidFile} if an element is not a row. The error names
// `source`, the element (counted from 1) and the field.
std::vector<Row> parse_rows(std::string_view text, const std::string& source);

// Reads the rows of all files, in order. Throws as parse_rows() does, and also if two rows are of
// the same point.
std::vector<Row> read_rows(std::span<const std::filesystem::path> paths);

// Throws what merge_rows() would throw for this file. Call it before a measurement, so that its
// rows are not lost.
void require_mergeable(const std::filesystem::path& file);

// Replaces the rows of a file that are of the same point as one of `rows`, and appends the others.
// The rest of the file stays as it is. The new file appears whole or not at all. Processes that
// merge at the same time wait for each other. With `keep_rival`, a row without a rival inherits the
// rival of the row that it replaces. Throws Error{kInvalidFile} if the file holds something else,
// and what write_whole() throws.
void merge_rows(const std::filesystem::path& file, std::span<const Row> rows, bool keep_rival);

}  // namespace switchyard::results
