#include "results/exchange_row.h"

#include <fmt/core.h>

#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy = "give files that 'switchyard bench --suite exchange --json' wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("stage", row.stage);
  field.text("dtype", row.dtype);
  field.count("hidden", row.hidden);
  field.count("experts", row.experts);
  field.count("top_k", row.top_k);
  field.count("ranks", row.ranks);
  field.count("tokens_per_rank", row.tokens_per_rank);
  field.flag("pre_sum", row.pre_sum);
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.amount("nvlink_bytes", row.nvlink_bytes);
  field.time("floor_us", row.floor_us);
  field.text_if_any("rival", row.rival);
  field.time("rival_us", row.rival_us);
  field.times("times_us", row.times_us);
}

}  // namespace

std::string point_of(const ExchangeRow& row) {
  return fmt::format("{}: {}, H {}, top-{} of {}, {} ranks with {} tokens each, in {}{}", row.suite,
                     row.stage, row.hidden, row.top_k, row.experts, row.ranks, row.tokens_per_rank,
                     row.dtype, row.pre_sum ? ", summed before" : "");
}

Json to_json(const ExchangeRow& row) {
  Json json;
  visit(row, FieldWriter(json));
  return json;
}

std::vector<ExchangeRow> exchange_rows_of(const Json& file, const std::string& source,
                                          const char* remedy) {
  return rows_of_list<ExchangeRow>(
      file, source, remedy, [](auto& row, auto&& field) { visit(row, field); },
      [](const FieldReader&, const ExchangeRow&) {});
}

std::vector<ExchangeRow> parse_exchange_rows(std::string_view text, const std::string& source) {
  return exchange_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

}  // namespace switchyard::results
