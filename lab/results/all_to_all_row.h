// One rung of the all-to-all problem on one case as files keep it. `switchyard bench layers --suite
// all_to_all` writes such rows.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

// The stages of a call, in their order, and the fields of their times.
inline constexpr std::size_t kNumStages = 5;
inline constexpr std::array<const char*, kNumStages> kStageNames = {
    "dispatch send", "dispatch receive", "experts", "combine send", "combine receive"};
inline constexpr std::array<const char*, kNumStages> kStageFields = {
    "dispatch_send_us", "dispatch_receive_us", "experts_us", "combine_send_us",
    "combine_receive_us"};

// Fields that are optional or empty may be absent from files.
struct AllToAllRow {
  std::string suite, machine, commit, command;
  std::string problem;  // the field "case": "E 8, K 2, H 6144, up to 15 tokens"
  std::int64_t experts = 0, top_k = 0, hidden = 0, max_tokens = 0;
  std::string rung;
  std::string stand_in;  // "rank" or "random": what experts multiply by
  std::int64_t ranks = 0;
  std::optional<std::int64_t> gpus;  // that the ranks share; absent on a CPU
  // The main numbers: of the slowest rank in each repetition.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double nvlink_bytes = 0;         // rows that the busiest rank sends to or gets from the others
  std::optional<double> floor_us;  // two flags and the bytes at the links' rate
  std::string blocks;              // of the stages' kernels: "128, 128, 128, 128, 128"
  // Rows of the block that received most over the mean of the blocks, of the worst rank.
  std::optional<double> receive_imbalance;
  std::vector<double> rank_us;  // each rank's median
  // Each stage's medians, by rank; empty for experts that are fused into another stage.
  std::array<std::vector<double>, kNumStages> stage_us;
  std::vector<double> times_us;  // of every repetition, in their order

  static constexpr const char* kKind = "the suite all_to_all";
  static constexpr const char* kRemedy =
      "give files that 'switchyard bench all_to_all --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text("case", row.problem);
    field.count("experts", row.experts);
    field.count("top_k", row.top_k);
    field.count("hidden", row.hidden);
    field.count("max_tokens", row.max_tokens);
    field.text("rung", row.rung);
    field.text("stand_in", row.stand_in);
    field.count("ranks", row.ranks);
    field.whole("gpus", row.gpus);
    visit_times(row, field);
    field.amount("nvlink_bytes", row.nvlink_bytes);
    field.time("floor_us", row.floor_us);
    field.text("blocks", row.blocks);
    field.error("receive_imbalance", row.receive_imbalance);
    field.times("rank_us", row.rank_us);
    for (std::size_t s = 0; s < kNumStages; ++s) field.times(kStageFields[s], row.stage_us[s]);
    field.times("times_us", row.times_us);
  }
  std::string point() const;
  void judge(const FieldReader& read) const;
};

// True if the file is a list whose first element has a rung. False for everything else, also for
// files that cannot be read.
bool has_all_to_all_rows(const std::filesystem::path& file);

}  // namespace switchyard::results
