#include "results/late_row.h"

#include <fmt/core.h>

#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy = "give files that 'switchyard bench --suite late --json' wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("engine", row.engine);
  field.text("policy", row.policy);
  field.text("model", row.model);
  field.text("dtype", row.dtype);
  field.count("ranks", row.ranks);
  field.count("tokens_per_rank", row.tokens_per_rank);
  field.flag("jitter", row.jitter);
  field.amount("late_us", row.late_us);
  field.time("prompt_us", row.prompt_us);
  field.time("after_start_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.ratio("own_share", row.own_share);
  field.share("early_share", row.early_share);
}

}  // namespace

std::string point_of(const LateRow& row) {
  return fmt::format("{}: {} on {}, {}, {} ranks with {} tokens each, in {}, {} {} us late",
                     row.suite, row.model, row.engine, row.policy, row.ranks, row.tokens_per_rank,
                     row.dtype, row.jitter ? "all up to" : "one", row.late_us);
}

Json to_json(const LateRow& row) {
  Json json;
  visit(row, FieldWriter(json));
  return json;
}

std::vector<LateRow> late_rows_of(const Json& file, const std::string& source, const char* remedy) {
  return rows_of_list<LateRow>(
      file, source, remedy, [](auto& row, auto&& field) { visit(row, field); },
      [](const FieldReader& read, const LateRow& row) {
        if (row.own_share > 1) read.refuse("own_share", "at most 1");
        if (row.engine != "cpu" && row.engine != "cuda") read.refuse("engine", "cpu or cuda");
        if (row.policy != "works" && row.policy != "waits") read.refuse("policy", "works or waits");
      });
}

std::vector<LateRow> parse_late_rows(std::string_view text, const std::string& source) {
  return late_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

}  // namespace switchyard::results
