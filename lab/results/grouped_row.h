// One point of the grouped GEMM alone as files keep it: its key, its fields, and how they are
// written and read. `switchyard bench grouped` and bench/grouped_rivals.py write such rows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

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

  static constexpr const char* kKind = "the grouped GEMM";
  static constexpr const char* kRemedy =
      "give files that 'switchyard bench grouped --json' or bench/grouped_rivals.py wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text("implementation", row.implementation);
    field.count("experts", row.experts);
    field.count("n", row.n);
    field.count("k", row.k);
    field.count("rows_per_expert", row.rows_per_expert);
    field.text("activation", row.activation);
    field.text("dtype", row.dtype);
    field.text("compute", row.compute);
    field.share("beta", row.beta);
    field.share("beta_reached", row.beta_reached);
    field.count("rows", row.rows);
    field.whole("experts_hit", row.experts_hit);
    visit_times(row, field);
    field.amount("touched_bytes", row.touched_bytes);
    field.amount("flops", row.flops);
    field.time("floor_us", row.floor_us);
    field.time("median_us_no_graph", row.median_us_no_graph);
    field.whole("rotation_copies", row.rotation_copies);
    field.whole("rotation_passes", row.rotation_passes);
    field.error("error", row.error);
    field.error("error_bound", row.error_bound);
    field.times("times_us", row.times_us);
    field.times("times_us_no_graph", row.times_us_no_graph);
  }
  std::string point() const;
};

}  // namespace switchyard::results
