#include "cli/bench_late.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/names.h"
#include "base/plural.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "cli/rows_printer.h"

namespace switchyard::cli {
namespace {

using results::LateRow;

class LatePrinter : public RowsPrinter<bench::LateObserver, LateRow> {
 public:
  using RowsPrinter::RowsPrinter;

 private:
  void print(const LateRow& row) override { fmt::print("{}\n", late_text(row)); }
};

}  // namespace

std::string late_heading() {
  return fmt::format("{:<16} {:>6} {:<6} {:<4} {:>7} {:>10} {:>10} {:>21} {:>5} {:>6}", "model",
                     "tokens", "policy", "late", "by us", "prompt us", "after us", "p10 .. p90 us",
                     "own", "early");
}

std::string late_text(const LateRow& row) {
  return fmt::format(
      "{:<16} {:>6} {:<6} {:<4} {:>7.0f} {:>10.1f} {:>10.1f} {:>9.1f} .. {:>8.1f} {:>5} {:>6}",
      row.model, row.tokens_per_rank, row.policy, row.jitter ? "all" : "one", row.late_us,
      row.prompt_us, row.median_us, row.p10_us, row.p90_us,
      row.jitter ? "-" : fmt::format("{:.2f}", row.own_share),
      row.early_share ? fmt::format("{:.2f}", *row.early_share) : "-");
}

int print_late(const bench::LateOptions& options, const std::filesystem::path& json) {
  LatePrinter printer(json);
  bench::LateSession session(options, printer);
  fmt::print("{}; {}, weights and arithmetic in {}\n", session.machine(),
             plural(options.ranks, "rank"), short_name(options.dtype));
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(late_heading()));
  std::fflush(stdout);
  session.run();
  return printer.failed_any() ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
