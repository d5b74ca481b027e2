// What `switchyard tune --evaluate` has found, as files keep it: a point of the choice of a
// kernel's configuration, and a prediction beside what was measured.
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

// A kernel on a model at one number of tokens and one balancedness. Times are measured ones, of the
// configurations that several ways to choose take.
struct RampRow {
  std::string suite = "ramp", machine, commit, command;
  std::string kernel, model;
  std::int64_t experts = 0;
  std::int64_t tokens_per_rank = 0;
  double beta = 1;                  // the balancedness asked for
  double beta_reached = 1;          // of the histogram
  std::string generator;            // "distinct" or "repeated"
  std::string form;                 // of the cost model
  double exhaustive_us = 0;         // the best configuration
  double chosen_us = 0;             // the cost model's choice
  double predicted_us = 0;          // its time as predicted
  std::optional<double> static_us;  // the best at beta 1
  std::optional<double> rule_us;    // the kernel's own rule
  std::string best, chosen;         // names of configurations
  bool held_out = false;            // the point is not one that was fitted on
  bool unseen = false;              // nothing was developed on the model
};

// A prediction of the regions for a model, for the points where it says yes or those where it says
// no.
struct RegionRow {
  std::string suite = "ramp_regions", machine, commit, command;
  std::string kernel, model, generator;
  std::string prediction;     // "split_k", "group_m", "wide_tiles"
  bool predicted = false;     // to help
  double measured_ratio = 1;  // best time without over best time with it; above 1: it helps
  std::int64_t points = 0;
};

// The keys of rows, as point_of(const Row&).
std::string point_of(const RampRow& row);
std::string point_of(const RegionRow& row);

Json to_json(const RampRow& row);
Json to_json(const RegionRow& row);

// These are as those of Row (results/row.h).
std::vector<RampRow> parse_ramp_rows(std::string_view text, const std::string& source);
std::vector<RegionRow> parse_region_rows(std::string_view text, const std::string& source);
void require_mergeable_ramp(const std::filesystem::path& file);
void require_mergeable_regions(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const RampRow> rows);
void merge_rows(const std::filesystem::path& file, std::span<const RegionRow> rows);

}  // namespace switchyard::results
