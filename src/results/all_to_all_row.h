// One rung of the all-to-all problem on one case as files keep it. `switchyard bench --suite
// all_to_all` writes such rows.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

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
};

// The key of a row's point, as point_of(const Row&).
std::string point_of(const AllToAllRow& row);

Json to_json(const AllToAllRow& row);

// These are as those of Row (results/row.h).
std::vector<AllToAllRow> parse_all_to_all_rows(std::string_view text, const std::string& source);
std::vector<AllToAllRow> read_all_to_all_rows(const std::filesystem::path& file);
// True if the file is a list whose first element has a rung. False for everything else, also for
// files that cannot be read.
bool has_all_to_all_rows(const std::filesystem::path& file);
void require_mergeable_all_to_all(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const AllToAllRow> rows);

}  // namespace switchyard::results
