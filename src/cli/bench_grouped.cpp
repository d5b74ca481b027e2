#include "cli/bench_grouped.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <utility>

#include "base/names.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "cli/rows_printer.h"

namespace switchyard::cli {
namespace {

using results::GroupedRow;

class GroupedPrinter : public RowsPrinter<bench::GroupedObserver, GroupedRow> {
 public:
  using RowsPrinter::RowsPrinter;

 private:
  void print(const GroupedRow& row) override { fmt::print("{}\n", grouped_text(row)); }
};

}  // namespace

std::string grouped_heading() {
  return fmt::format("{:>4} {:>6} {:>6} {:>6} {:>5} {:>6} {:>9} {:>19} {:>8} {:>7} {:>5} {:>6}",
                     "exp.", "N", "K", "rows", "beta", "act.", "time us", "p10 .. p90 us",
                     "no graph", "TFLOP/s", "TB/s", "roof");
}

std::string grouped_text(const GroupedRow& row) {
  const double seconds = row.median_us * 1e-6;
  const bool both = !row.times_us_no_graph.empty();
  return fmt::format(
      "{:>4} {:>6} {:>6} {:>6} {:>5} {:>6} {:>9.1f} {:>8.1f} .. {:>7.1f} {:>8} {:>7.2f} {:>5.2f} "
      "{:>6}",
      row.experts, row.n, row.k, row.rows_per_expert,
      row.beta ? fmt::format("{:.2f}", row.beta_reached.value_or(*row.beta)) : "equal",
      row.activation == "none" ? "-" : row.activation, row.median_us, row.p10_us, row.p90_us,
      both ? fmt::format("{:.1f}", *row.median_us_no_graph) : "-", row.flops / seconds * 1e-12,
      row.touched_bytes / seconds * 1e-12,
      row.floor_us ? format_percent(*row.share_of_roof()) : "-");
}

int print_grouped(const bench::GroupedOptions& options,
                  const std::vector<bench::GroupedPoint>& points,
                  const std::filesystem::path& json) {
  GroupedPrinter printer(json);
  bench::GroupedSession session(options, printer);
  fmt::print("{}; GroupedGemm alone, weights and rows in {}\n", session.machine(),
             short_name(options.dtype));
  if (!session.why_no_floor().empty()) {
    for (const std::string& line : wrap(session.why_no_floor(), kReportColumns)) {
      fmt::print("{}\n", line);
    }
  }
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(grouped_heading()));
  std::fflush(stdout);
  session.run(points);
  return printer.failed_any() ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
