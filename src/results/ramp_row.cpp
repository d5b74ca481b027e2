#include "results/ramp_row.h"

#include <fmt/core.h>

#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy = "give files that 'switchyard tune --evaluate' wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit_head(RowType& row, Visitor& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("kernel", row.kernel);
  field.text("model", row.model);
}

template <typename Visitor>
void visit_all(auto& row, Visitor&& field) requires requires {
  row.exhaustive_us;
}
{
  visit_head(row, field);
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

template <typename Visitor>
void visit_all(auto& row, Visitor&& field) requires requires {
  row.prediction;
}
{
  visit_head(row, field);
  field.text("generator", row.generator);
  field.text("prediction", row.prediction);
  field.flag("predicted", row.predicted);
  field.ratio("measured_ratio", row.measured_ratio);
  field.count("points", row.points);
}

template <typename RowType>
std::vector<RowType> rows_in(const Json& file, const std::string& source, const char* remedy) {
  if (!file.is_array()) refuse_file(source, "is not a list of rows", remedy);
  const Remedies remedies = remedies_of(remedy);
  std::vector<RowType> rows;
  for (const Json& element : file.elements()) {
    const FieldReader read(element, source, rows.size() + 1, remedies);
    visit_all(rows.emplace_back(), FieldFiller(read));
  }
  return rows;
}

}  // namespace

std::string point_of(const RampRow& row) {
  return fmt::format("{}: {} on {}, {} experts, {} tokens, beta {} ({})", row.suite, row.kernel,
                     row.model, row.experts, row.tokens_per_rank, row.beta, row.generator);
}
std::string point_of(const RegionRow& row) {
  return fmt::format("{}: {} on {} ({}), {} predicted {}", row.suite, row.kernel, row.model,
                     row.generator, row.prediction, row.predicted ? "to help" : "not to help");
}

Json to_json(const RampRow& row) {
  Json json;
  visit_all(row, FieldWriter(json));
  return json;
}
Json to_json(const RegionRow& row) {
  Json json;
  visit_all(row, FieldWriter(json));
  return json;
}

std::vector<RampRow> ramp_rows_of(const Json& file, const std::string& source, const char* remedy) {
  return rows_in<RampRow>(file, source, remedy);
}
std::vector<RegionRow> region_rows_of(const Json& file, const std::string& source,
                                      const char* remedy) {
  return rows_in<RegionRow>(file, source, remedy);
}

std::vector<RampRow> parse_ramp_rows(std::string_view text, const std::string& source) {
  return ramp_rows_of(parse(text, source, kRemedy), source, kRemedy);
}
std::vector<RegionRow> parse_region_rows(std::string_view text, const std::string& source) {
  return region_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

}  // namespace switchyard::results
