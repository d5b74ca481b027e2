#include "cli/bench_exchange.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/plural.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "cli/rows_printer.h"

namespace switchyard::cli {
namespace {

using results::ExchangeRow;

class ExchangePrinter : public RowsPrinter<bench::ExchangeObserver, ExchangeRow> {
 public:
  using RowsPrinter::RowsPrinter;

 private:
  void print(const ExchangeRow& row) override { fmt::print("{}\n", exchange_text(row)); }
};

}  // namespace

std::string exchange_heading() {
  return fmt::format("{:>8} {:>6} {:>5} {:>4} {:>5} {:>7} {:>10} {:>21} {:>9} {:>6}", "stage",
                     "hidden", "exp.", "topk", "dtype", "tokens", "time us", "p10 .. p90 us",
                     "MB sent", "GB/s");
}

std::string exchange_text(const ExchangeRow& row) {
  return fmt::format(
      "{:>8} {:>6} {:>5} {:>4} {:>5} {:>7} {:>10.1f} {:>9.1f} .. {:>8.1f} {:>9.2f} "
      "{:>6.2f}",
      row.stage, row.hidden, row.experts, row.top_k, row.dtype, row.tokens_per_rank, row.median_us,
      row.p10_us, row.p90_us, row.nvlink_bytes * 1e-6, row.nvlink_bytes * 1e-3 / row.median_us);
}

int print_exchange(const bench::ExchangeBenchOptions& options,
                   const std::vector<bench::ExchangePoint>& points,
                   const std::filesystem::path& json) {
  ExchangePrinter printer(json);
  bench::ExchangeSession session(options, printer);
  fmt::print("{}; Exchange alone over {}{}\n", session.machine(), plural(options.ranks, "rank"),
             options.pre_sum ? ", a token's results of one rank summed before they travel" : "");
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(exchange_heading()));
  std::fflush(stdout);
  session.run(points);
  return printer.failed_any() ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
