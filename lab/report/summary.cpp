#include "report/summary.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace switchyard::report {
namespace {

void add_distinct(std::vector<std::string>& values, const std::string& value) {
  if (value.empty() || std::find(values.begin(), values.end(), value) != values.end()) return;
  values.push_back(value);
}

// The geometric mean of a ratio over the rows that have it, and the worst row. `worse(a, b)` is
// true if a is worse than b.
template <typename Worse>
std::optional<Ratio> ratio_of(std::span<const Row* const> rows,
                              std::optional<double> (Row::*ratio)() const, Worse worse) {
  Ratio result;
  double log_sum = 0;
  for (const Row* row : rows) {
    const std::optional<double> value = (row->*ratio)();
    if (!value) continue;
    ++result.points;
    log_sum += std::log(*value);
    if (result.at != nullptr && !worse(*value, result.worst)) continue;
    result.worst = *value;
    result.at = row;
  }
  if (result.points == 0) return std::nullopt;
  result.mean = std::exp(log_sum / static_cast<double>(result.points));
  return result;
}

}  // namespace

std::vector<Suite> suites_of(std::span<const Row> rows) {
  std::vector<Suite> suites;
  for (const Row& row : rows) {
    auto suite = std::find_if(suites.begin(), suites.end(),
                              [&](const Suite& known) { return known.name == row.suite; });
    if (suite == suites.end()) suite = suites.insert(suites.end(), Suite{.name = row.suite});
    suite->rows.push_back(&row);
    add_distinct(suite->machines, row.machine);
    add_distinct(suite->commits, row.commit);
    add_distinct(suite->commands, row.command);
    add_distinct(suite->dates, row.date);
    if (row.rival) add_distinct(suite->rivals, row.rival->name);
  }
  for (Suite& suite : suites) {
    suite.time_over_floor = ratio_of(suite.rows, &Row::time_over_floor, std::greater<>());
    suite.speed_up = ratio_of(suite.rows, &Row::speed_up, std::less<>());
  }
  return suites;
}

}  // namespace switchyard::report
