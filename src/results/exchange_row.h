// One stage of an exchange as files keep it: its key, its fields, and how they are written and
// read. `switchyard bench --suite exchange` writes such rows.
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
};

// The key of a row's point, as point_of(const Row&).
std::string point_of(const ExchangeRow& row);

Json to_json(const ExchangeRow& row);

// These are as those of Row (results/row.h).
std::vector<ExchangeRow> parse_exchange_rows(std::string_view text, const std::string& source);
void require_mergeable_exchange(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const ExchangeRow> rows);

}  // namespace switchyard::results
