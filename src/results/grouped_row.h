// One point of the grouped GEMM alone as files keep it: its key, its fields, and how they are
// written and read. `switchyard bench --suite grouped` and bench/grouped_rivals.py write such rows.
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

// One implementation on one point: matrices [experts, n, k], and rows of every expert. Fields that
// are optional may be absent from files.
struct GroupedRow {
  std::string suite, machine, commit, command;
  std::string implementation;  // "switchyard", "torch._grouped_mm"
  std::int64_t experts = 0, n = 0, k = 0;
  std::int64_t rows_per_expert = 0;  // the mean that was asked for
  std::string activation = "none";   // or "swiglu": n / 2 columns of gate, then of up
  std::string dtype, compute;        // of the weights, and the arithmetic, as in Row
  std::optional<double> beta;        // the balancedness asked for; none: rows are equal
  std::optional<double> beta_reached;
  std::int64_t rows = 0;  // of all experts
  std::optional<std::int64_t> experts_hit;
  // The main numbers: of replayed graphs if there are any, else of plain calls.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double touched_bytes = 0, flops = 0;  // weights of experts that have rows, scales included
  std::optional<double> floor_us;       // as Row::floor_us
  std::optional<double> median_us_no_graph;
  std::optional<std::int64_t> rotation_copies, rotation_passes;  // as in Row
  std::optional<double> error, error_bound;                      // against fp64
  std::vector<double> times_us;           // of every repetition, in their order
  std::vector<double> times_us_no_graph;  // the same of plain calls, where both were timed

  std::optional<double> share_of_roof() const {
    return floor_us ? std::optional(*floor_us / median_us) : std::nullopt;
  }
};

// The key of a row's point and its implementation, as point_of(const Row&).
std::string point_of(const GroupedRow& row);

Json to_json(const GroupedRow& row);

// These are as those of Row (results/row.h).
std::vector<GroupedRow> parse_grouped_rows(std::string_view text, const std::string& source);
void require_mergeable_grouped(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const GroupedRow> rows);

}  // namespace switchyard::results
