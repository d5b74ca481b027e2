#include "cli/bench/layer_text.h"

#include <fmt/core.h>

#include <cmath>

#include "base/plural.h"

namespace switchyard::cli {
namespace {

std::string point_heading() {
  return fmt::format("{:<16} {:>4} {:>5} {:>6} {:>5}", "model", "exp.", "ranks", "tokens", "beta");
}
std::string point_text(const Row& row) {
  return fmt::format("{:<16} {:>4} {:>5} {:>6} {:>5.2f}", row.model, row.experts, row.ranks,
                     row.tokens_per_rank, row.beta_reached.value_or(row.beta));
}

std::string point_name(const Row& row) {
  return fmt::format("{}, {}, {}{}, beta {:.2g}", row.model, plural(row.experts, "expert"),
                     plural(row.tokens_per_rank, "token"),
                     row.ranks == 1 ? "" : fmt::format(" on each of {}", plural(row.ranks, "rank")),
                     row.beta);
}

}  // namespace

std::string row_heading() {
  return fmt::format("{} {:>9} {:>19} {:>8} {:>6} {:>7} {:>5}", point_heading(), "time us",
                     "p10 .. p90 us", "no graph", "time/F", "TFLOP/s", "GB/s");
}

std::string row_text(const Row& row) {
  const double seconds = row.median_us * 1e-6;
  const bool both = !row.times_us_no_graph.empty();
  const std::string no_graph =
      both ? fmt::format("{:.1f}", *row.median_us_no_graph) : std::string("-");
  const std::string over_floor =
      row.floor_us ? fmt::format("{:.3f}", *row.time_over_floor()) : std::string("-");
  return fmt::format("{} {:>9.1f} {:>8.1f} .. {:>7.1f} {:>8} {:>6} {:>7.1f} {:>5.0f}",
                     point_text(row), row.median_us, row.p10_us, row.p90_us, no_graph, over_floor,
                     row.flops / seconds * 1e-12, row.touched_bytes / seconds * 1e-9);
}

std::vector<std::string> rival_text(std::span<const Row> rows) {
  std::vector<std::string> lines;
  for (const Row& row : rows) {
    if (!row.rival) continue;
    if (lines.empty()) {
      lines.push_back(fmt::format("{} {:>9} {:>9} {:>9}  {}", point_heading(), "time us",
                                  "rival us", "speed-up", "rival"));
    }
    lines.push_back(fmt::format("{} {:>9.1f} {:>9.1f} {:>9.2f}  {}", point_text(row), row.median_us,
                                row.rival->median_us, row.rival->median_us / row.median_us,
                                row.rival->name));
  }
  return lines;
}

std::vector<std::string> summary_text(std::span<const Row> rows) {
  std::vector<std::string> lines;
  double log_sum = 0;
  std::int64_t with_floor = 0, with_rival = 0;
  const Row* worst = nullptr;
  std::vector<std::string> slower;
  for (const Row& row : rows) {
    if (row.floor_us) {
      ++with_floor;
      log_sum += std::log(*row.time_over_floor());
      if (worst == nullptr || *row.time_over_floor() > *worst->time_over_floor()) worst = &row;
    }
    if (!row.rival) continue;
    ++with_rival;
    if (row.median_us < row.rival->median_us) continue;
    slower.push_back(fmt::format("  {}: {:.1f} us, {} {:.1f} us", point_name(row), row.median_us,
                                 row.rival->name, row.rival->median_us));
  }
  if (worst != nullptr) {
    lines.push_back(fmt::format("time / floor: geometric mean {:.3f} over {}",
                                std::exp(log_sum / static_cast<double>(with_floor)),
                                plural(with_floor, "point")));
    lines.push_back(
        fmt::format("worst: {:.3f} ({})", *worst->time_over_floor(), point_name(*worst)));
  }
  if (with_rival > 0) {
    lines.push_back(fmt::format("slower than the rival: {} of {}{}", slower.size(),
                                plural(with_rival, "point"), slower.empty() ? "" : ":"));
    lines.insert(lines.end(), slower.begin(), slower.end());
  }
  return lines;
}

}  // namespace switchyard::cli
