// One stage of an exchange as files keep it: its key, its fields, and how they are written and
// read. `switchyard bench exchange` writes such rows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

// Fields that are optional may be absent from files.
struct ExchangeRow {
  std::string suite, machine, commit, command;
  std::string stage;  // "dispatch" or "combine"
  std::string dtype;  // of tokens as they travel, as in Row; results are in bf16 where that is FP8
  std::int64_t hidden = 0, experts = 0, top_k = 0;
  std::int64_t ranks = 0, tokens_per_rank = 0;
  bool pre_sum = false;  // a token's results of one rank travel as one
  // The main numbers: of the slowest rank in each repetition.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double nvlink_bytes = 0;         // that the busiest rank wrote into other ranks' memory
  std::optional<double> floor_us;  // two flags and the bytes at the links' rate
  std::string rival;               // empty: none
  std::optional<double> rival_us;
  std::vector<double> times_us;  // of every repetition, in their order

  static constexpr const char* kKind = "an exchange";
  static constexpr const char* kRemedy = "give files that 'switchyard bench exchange --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text("stage", row.stage);
    field.text("dtype", row.dtype);
    field.count("hidden", row.hidden);
    field.count("experts", row.experts);
    field.count("top_k", row.top_k);
    field.count("ranks", row.ranks);
    field.count("tokens_per_rank", row.tokens_per_rank);
    field.flag("pre_sum", row.pre_sum);
    visit_times(row, field);
    field.amount("nvlink_bytes", row.nvlink_bytes);
    field.time("floor_us", row.floor_us);
    field.text_if_any("rival", row.rival);
    field.time("rival_us", row.rival_us);
    field.times("times_us", row.times_us);
  }
  std::string point() const;
};

}  // namespace switchyard::results
