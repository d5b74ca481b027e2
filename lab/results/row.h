// One point of a benchmark of layers as files keep it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "results/row_file.h"

namespace switchyard::results {

// One point: a layer, a number of tokens, a skew. Loads are those of the most loaded rank. Fields
// that are optional or empty may be absent from files: rows of earlier versions lack them, or they
// do not apply.
struct Row {
  std::string suite, machine, commit, command;
  std::string date;
  std::string model;
  std::int64_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  std::string dtype;             // of the expert weights, as short_name() has it
  std::string compute = "bf16";  // the arithmetic; rows from before FP8 lack it
  // Where weights have four bits: `dtype` and `compute` again, the type that tokens are multiplied
  // in. Empty elsewhere.
  std::string weights, tokens_in;
  std::string routing = "gate";  // "gate", or "given": the gate was not timed
  std::int64_t ranks = 1, tokens_per_rank = 0;
  double beta = 1;                     // the balancedness asked for
  std::optional<double> beta_reached;  // of the experts' histogram
  // The main numbers: of replayed graphs if there are any, else of plain calls.
  double median_us = 0, p10_us = 0, p90_us = 0;
  std::int64_t repeats = 0;
  double touched_bytes = 0, flops = 0, nvlink_bytes = 0;
  std::optional<double> floor_us;  // none for a machine whose roofs are not known
  std::optional<Rival> rival;
  std::optional<double> median_us_no_graph;  // of plain calls
  std::optional<std::int64_t> experts_hit;
  // Tokens of an expert over the experts' mean, ascending: at most 64 quantiles.
  std::vector<double> expert_load;
  std::optional<std::int64_t> rotation_copies;  // of the layer's weights, which passes took in turn
  std::optional<std::int64_t> rotation_passes;  // timed together
  std::optional<std::int64_t> graph_nodes;      // GPU operations of one pass
  std::optional<double> error, error_bound;     // of --verify
  std::optional<bool> gate;                     // of the suite thesis: the gate is in the time
  std::vector<double> times_us;                 // of every repetition, in their order
  std::vector<double> times_us_no_graph;        // the same of plain calls, where both were timed

  std::optional<double> time_over_floor() const {
    return floor_us ? std::optional(median_us / *floor_us) : std::nullopt;
  }
  std::optional<double> speed_up() const {
    return rival ? std::optional(rival->median_us / median_us) : std::nullopt;
  }

  static constexpr const char* kKind = "layers";
  static constexpr const char* kRemedy = "give files that 'switchyard bench --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_head(row, field);
    field.text_if_any("date", row.date);
    visit_layer(row, field);
    field.text_if_any("compute", row.compute);
    field.text_if_any("weights", row.weights);
    field.text_if_any("tokens_in", row.tokens_in);
    field.count("ranks", row.ranks);
    field.count("tokens_per_rank", row.tokens_per_rank);
    field.share("beta", row.beta);
    visit_times(row, field);
    field.amount("touched_bytes", row.touched_bytes);
    field.amount("flops", row.flops);
    field.amount("nvlink_bytes", row.nvlink_bytes);
    field.time("floor_us", row.floor_us);
    field.rival(row.rival);
    field.time("median_us_no_graph", row.median_us_no_graph);
    field.share("beta_reached", row.beta_reached);
    field.whole("experts_hit", row.experts_hit);
    field.quantiles("expert_load", row.expert_load);
    field.text_if_any("routing", row.routing);
    field.whole("rotation_copies", row.rotation_copies);
    field.whole("rotation_passes", row.rotation_passes);
    field.whole("graph_nodes", row.graph_nodes);
    field.error("error", row.error);
    field.error("error_bound", row.error_bound);
    field.flag("gate", row.gate);
    field.times("times_us", row.times_us);
    field.times("times_us_no_graph", row.times_us_no_graph);
  }
  std::string point() const;
  void judge(const FieldReader& read) const;
};

// Reads the rows of all files, in order. Throws as parse_rows() does, and also if a file has none
// or two rows are of the same point.
std::vector<Row> read_rows(std::span<const std::filesystem::path> paths);

}  // namespace switchyard::results
