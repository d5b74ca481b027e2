// A row of `switchyard bench late`: the cost of a late rank for the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

// All times are of the slowest rank that is not late.
struct LateRow {
  std::string suite, machine, commit, command;
  std::string engine;  // "cpu" or "cuda"
  std::string policy;  // "works" ahead of late counts, or "waits" for all of them
  std::string model;
  std::string dtype;
  std::int64_t ranks = 0, tokens_per_rank = 0;
  bool jitter = false;   // every rank is late by a random time up to late_us; else one is, by it
  double late_us = 0;    // that was asked for
  double prompt_us = 0;  // of a pass in which no rank is late
  // Time from the late rank's start, or the last rank's, to the end of the others: in files
  // "after_start_us".
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double own_share = 0;  // of the work on the others that the late rank's tokens are; 0 with jitter
  // Share of the others' GEMM tasks that were done before the late rank started (CPU only).
  std::optional<double> early_share;

  static constexpr const char* kKind = "the suite late";
  static constexpr const char* kRemedy = "give files that 'switchyard bench late --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text("engine", row.engine);
    field.text("policy", row.policy);
    field.text("model", row.model);
    field.text("dtype", row.dtype);
    field.count("ranks", row.ranks);
    field.count("tokens_per_rank", row.tokens_per_rank);
    field.flag("jitter", row.jitter);
    field.amount("late_us", row.late_us);
    field.time("prompt_us", row.prompt_us);
    field.time("after_start_us", row.median_us);
    field.time("p10_us", row.p10_us);
    field.time("p90_us", row.p90_us);
    field.count("repeats", row.repeats);
    field.ratio("own_share", row.own_share);
    field.share("early_share", row.early_share);
  }
  std::string point() const;
  void judge(const FieldReader& read) const;
};

}  // namespace switchyard::results
