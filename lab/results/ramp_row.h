// What `switchyard tune --evaluate` has found, as files keep it: a point of the choice of a
// kernel's configuration, and a prediction beside what was measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "results/row_file.h"

namespace switchyard::results {

// Both kinds of rows begin with these fields.
template <typename RowType, typename Visitor>
void visit_kernel(RowType& row, Visitor&& field) {
  visit_head(row, field);
  field.text("kernel", row.kernel);
  field.text("model", row.model);
}

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

  static constexpr const char* kKind = "a tuner";
  static constexpr const char* kRemedy = "give files that 'switchyard tune --evaluate' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_kernel(row, field);
    field.count("experts", row.experts);
    field.count("tokens_per_rank", row.tokens_per_rank);
    field.share("beta", row.beta);
    field.share("beta_reached", row.beta_reached);
    field.text("generator", row.generator);
    field.text("form", row.form);
    field.time("exhaustive_us", row.exhaustive_us);
    field.time("chosen_us", row.chosen_us);
    field.time("predicted_us", row.predicted_us);
    field.time("static_us", row.static_us);
    field.time("rule_us", row.rule_us);
    field.text("best", row.best);
    field.text("chosen", row.chosen);
    field.flag("held_out", row.held_out);
    field.flag("unseen", row.unseen);
  }
  std::string point() const;
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

  static constexpr const char* kKind = "a tuner's regions";
  static constexpr const char* kRemedy = "give files that 'switchyard tune --evaluate' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    visit_kernel(row, field);
    field.text("generator", row.generator);
    field.text("prediction", row.prediction);
    field.flag("predicted", row.predicted);
    field.ratio("measured_ratio", row.measured_ratio);
    field.count("points", row.points);
  }
  std::string point() const;
};

}  // namespace switchyard::results
