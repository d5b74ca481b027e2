// What a late rank costs the others, as files keep it. `switchyard bench --suite late` writes such
// rows.
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
  // From the late rank's start, or the last rank's, to the end of the others: in files
  // "after_start_us".
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double own_share = 0;  // of the work on the others that the late rank's tokens are; 0 with jitter
  // Of the GEMM tasks of the others, those done before the late rank started. Known of the CPU.
  std::optional<double> early_share;
};

// The key of a row's point, as point_of(const Row&).
std::string point_of(const LateRow& row);

Json to_json(const LateRow& row);

// These are as those of Row (results/row.h).
std::vector<LateRow> parse_late_rows(std::string_view text, const std::string& source);
void require_mergeable_late(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const LateRow> rows);

}  // namespace switchyard::results
