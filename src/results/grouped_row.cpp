#include "results/grouped_row.h"

#include <fmt/core.h>

#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy =
    "give files that 'switchyard bench --suite grouped --json' or bench/grouped_rivals.py wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("implementation", row.implementation);
  field.count("experts", row.experts);
  field.count("n", row.n);
  field.count("k", row.k);
  field.count("rows_per_expert", row.rows_per_expert);
  field.text("activation", row.activation);
  field.text("dtype", row.dtype);
  field.text("compute", row.compute);
  field.share("beta", row.beta);
  field.share("beta_reached", row.beta_reached);
  field.count("rows", row.rows);
  field.whole("experts_hit", row.experts_hit);
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.amount("touched_bytes", row.touched_bytes);
  field.amount("flops", row.flops);
  field.time("floor_us", row.floor_us);
  field.time("median_us_no_graph", row.median_us_no_graph);
  field.whole("rotation_copies", row.rotation_copies);
  field.whole("rotation_passes", row.rotation_passes);
  field.error("error", row.error);
  field.error("error_bound", row.error_bound);
  field.times("times_us", row.times_us);
  field.times("times_us_no_graph", row.times_us_no_graph);
}

}  // namespace

std::string point_of(const GroupedRow& row) {
  return fmt::format(
      "{}: {}, {} experts, N {}, K {}, {} rows each{}, activation {}, {} computed in {}", row.suite,
      row.implementation, row.experts, row.n, row.k, row.rows_per_expert,
      row.beta ? fmt::format(" at beta {}", *row.beta) : "", row.activation, row.dtype,
      row.compute);
}

Json to_json(const GroupedRow& row) {
  Json json;
  visit(row, FieldWriter(json));
  return json;
}

std::vector<GroupedRow> grouped_rows_of(const Json& file, const std::string& source,
                                        const char* remedy) {
  return rows_of_list<GroupedRow>(
      file, source, remedy, [](auto& row, auto&& field) { visit(row, field); },
      [](const FieldReader&, const GroupedRow&) {});
}

std::vector<GroupedRow> parse_grouped_rows(std::string_view text, const std::string& source) {
  return grouped_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

}  // namespace switchyard::results
