// A row of `switchyard bench hosts`: one measurement over several hosts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

// Fields that are optional may be absent from files.
struct HostsRow {
  std::string suite, machine, commit, command;
  std::string engine;  // "cpu", "cuda"
  // "flag": a flag to another host and back; "stream": all ranks send to the next host at once;
  // "dispatch" and "combine": those of Exchange, of which the fields up to tokens_per_rank speak;
  // "combine_summed": with ExchangeSpec::pre_sum_per_host; "layer_summed": a pass of MoeLayer;
  // "layer_summed_fp8": the same with FP8 weights. Older files also have "layer": a pass that sent
  // a row for each slot (decision 40).
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

  static constexpr const char* kKind = "the suite hosts";
  static constexpr const char* kRemedy = "give files that 'switchyard bench hosts --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text("engine", row.engine);
    field.text("stage", row.stage);
    field.text("link", row.link);
    field.count("hosts", row.hosts);
    field.count("ranks", row.ranks);
    field.whole("hidden", row.hidden);
    field.whole("experts", row.experts);
    field.whole("top_k", row.top_k);
    field.whole("tokens_per_rank", row.tokens_per_rank);
    visit_times(row, field);
    field.amount("link_bytes", row.link_bytes);
    field.amount("wrong", row.wrong);
    field.time("model_us", row.model_us);
    field.times("times_us", row.times_us);
  }
  std::string point() const;
  void judge(const FieldReader& read) const;
};

}  // namespace switchyard::results
