// What was measured over several hosts, as files keep it. `switchyard bench --suite hosts` writes
// such rows.
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
struct HostsRow {
  std::string suite, machine, commit, command;
  std::string engine;  // "cpu", "cuda"
  // "flag": a flag to another host and back; "stream": all ranks send to the next host at once;
  // "dispatch" and "combine": those of Exchange, of which the fields up to tokens_per_rank speak;
  // "combine_summed": with ExchangeSpec::pre_sum_per_host; "layer": a pass of MoeLayer;
  // "layer_summed": with LayerOptions::pre_sum_per_host; "layer_summed_fp8": the same with FP8
  // weights.
  std::string stage;
  std::string link;  // the network, as World::fabric_name() ends
  std::int64_t hosts = 0, ranks = 0;
  std::optional<std::int64_t> hidden, experts, top_k, tokens_per_rank;
  // The main numbers: of the slowest rank in each repetition.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double link_bytes = 0;  // that left the busiest host in one repetition, headers included
  double wrong = 0;       // results that are not what they must be, of all ranks
  std::optional<double>
      model_us;                  // half a flag's way and back, and link_bytes at the stream's rate
  std::vector<double> times_us;  // of every repetition, in their order
};

// The key of a row's point, as point_of(const Row&).
std::string point_of(const HostsRow& row);

Json to_json(const HostsRow& row);

// These are as those of Row (results/row.h).
std::vector<HostsRow> parse_hosts_rows(std::string_view text, const std::string& source);
void require_mergeable_hosts(const std::filesystem::path& file);
void merge_rows(const std::filesystem::path& file, std::span<const HostsRow> rows);

}  // namespace switchyard::results
