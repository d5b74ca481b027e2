#include "results/hosts_row.h"

#include <fmt/core.h>

#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy = "give files that 'switchyard bench --suite hosts --json' wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("engine", row.engine);
  field.text("stage", row.stage);
  field.text("link", row.link);
  field.count("hosts", row.hosts);
  field.count("ranks", row.ranks);
  field.whole("hidden", row.hidden);
  field.whole("experts", row.experts);
  field.whole("top_k", row.top_k);
  field.whole("tokens_per_rank", row.tokens_per_rank);
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.amount("link_bytes", row.link_bytes);
  field.amount("wrong", row.wrong);
  field.time("model_us", row.model_us);
  field.times("times_us", row.times_us);
}

}  // namespace

std::string point_of(const HostsRow& row) {
  const std::string of_exchange =
      row.tokens_per_rank
          ? fmt::format(", H {}, top-{} of {}, {} tokens each", row.hidden.value_or(0),
                        row.top_k.value_or(0), row.experts.value_or(0), *row.tokens_per_rank)
          : "";
  return fmt::format("{}: {} on {}, {} hosts with {} ranks over {}{}", row.suite, row.stage,
                     row.engine, row.hosts, row.ranks, row.link, of_exchange);
}

Json to_json(const HostsRow& row) {
  Json json;
  visit(row, FieldWriter(json));
  return json;
}

std::vector<HostsRow> hosts_rows_of(const Json& file, const std::string& source,
                                    const char* remedy) {
  return rows_of_list<HostsRow>(
      file, source, remedy, [](auto& row, auto&& field) { visit(row, field); },
      [](const FieldReader& read, const HostsRow& row) {
        if (row.ranks < row.hosts) read.refuse("ranks", "at least one rank for each host");
      });
}

std::vector<HostsRow> parse_hosts_rows(std::string_view text, const std::string& source) {
  return hosts_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

}  // namespace switchyard::results
