// A row of `switchyard bench chain`: a layer and the small kernel before it, in a chain of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

struct ChainRow {
  std::string suite, machine, commit, command;
  std::string model;
  std::int64_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  std::string dtype, compute;  // of the weights, and the arithmetic
  std::int64_t tokens = 0;
  std::int64_t layers = 0;    // of the chain, each behind a small kernel
  bool early_launch = false;  // kernels are launched while the one before them still runs
  // Time of a small kernel and a layer, in replayed graphs.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;  // of all captures
  std::int64_t captures = 0;
  std::optional<std::int64_t> rotation_copies;  // of the weights, which the layers take in turn
  std::optional<double> error, error_bound;     // of the last layer, against fp64
  std::vector<double> times_us;                 // of every repetition, one capture's after another

  static constexpr const char* kKind = "the suite chain";
  static constexpr const char* kRemedy = "give files that 'switchyard bench chain --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    visit_layer(row, field);
    field.text("compute", row.compute);
    field.count("tokens", row.tokens);
    field.count("layers", row.layers);
    field.flag("early_launch", row.early_launch);
    visit_times(row, field);
    field.count("captures", row.captures);
    field.whole("rotation_copies", row.rotation_copies);
    field.error("error", row.error);
    field.error("error_bound", row.error_bound);
    field.times("times_us", row.times_us);
  }
  std::string point() const;
};

}  // namespace switchyard::results
