#include "cli/bench_all_to_all.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>
#include <utility>

#include "base/plural.h"
#include "base/whole_file.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "cli/rows_printer.h"

namespace switchyard::cli {
namespace {

using results::AllToAllRow;

constexpr const char* kNames[results::kNumStages] = {"d. send", "d. recv", "experts", "c. send",
                                                     "c. recv"};

// Widths of the columns: a rung or rank, its time, the stages' times.
std::string line(const std::string& name, const std::string& time,
                 const std::vector<std::string>& stages) {
  std::string text = fmt::format("{:<20} {:>9}", name, time);
  for (const std::string& stage : stages) text += fmt::format(" {:>8}", stage);
  return text;
}

class AllToAllPrinter : public RowsPrinter<bench::AllToAllObserver, AllToAllRow> {
 public:
  using RowsPrinter::RowsPrinter;

  void checked(std::size_t cases) override {
    clear_progress();
    fmt::print("{}: right on all rungs\n", plural(cases, "test case"));
    std::fflush(stdout);
  }

 private:
  void print(const AllToAllRow& row) override {
    if (row.problem != case_) {
      case_ = row.problem;
      fmt::print("\n{}{}\n", case_,
                 row.floor_us ? fmt::format("; F is {:.1f} us", *row.floor_us) : "");
      fmt::print("{}\n", Palette::for_output(STDOUT_FILENO).bold(all_to_all_heading()));
    }
    for (const std::string& text : all_to_all_text(row)) fmt::print("{}\n", text);
  }

  std::string case_;
};

}  // namespace

std::string all_to_all_heading() {
  std::string heading = line("rung, rank", "time us", {std::begin(kNames), std::end(kNames)});
  return heading + fmt::format(" {:>9} {:>7}", "time / F", "uneven");
}

std::vector<std::string> all_to_all_text(const AllToAllRow& row) {
  std::vector<std::string> lines;
  const std::string over =
      row.floor_us ? fmt::format("{:.2f}", row.median_us / *row.floor_us) : std::string("-");
  lines.push_back(
      line(row.rung, fmt::format("{:.1f}", row.median_us),
           std::vector<std::string>(results::kNumStages)) +
      fmt::format(" {:>9} {:>7}", over,
                  row.receive_imbalance ? fmt::format("{:.2f}", *row.receive_imbalance) : "-"));
  for (std::size_t r = 0; r < row.rank_us.size(); ++r) {
    std::vector<std::string> stages;
    for (const std::vector<double>& of_stage : row.stage_us) {
      stages.push_back(of_stage.empty() ? "-" : fmt::format("{:.1f}", of_stage[r]));
    }
    lines.push_back(
        line(fmt::format("  rank {}", r), fmt::format("{:.1f}", row.rank_us[r]), stages));
  }
  return lines;
}

int print_all_to_all(const bench::AllToAllOptions& options, const std::filesystem::path& json,
                     const std::filesystem::path& trace) {
  AllToAllPrinter printer(json);
  bench::AllToAllSession session(options, printer);
  fmt::print(
      "{}; the all-to-all problem over {}{}\n", session.machine(), plural(options.ranks, "rank"),
      options.stand_in == all_to_all::StandIn::kRandom ? ", experts multiply by random weights"
                                                       : "");
  std::fflush(stdout);
  const std::vector<AllToAllRow> rows = session.run();
  if (!rows.empty()) fmt::print("\n");
  for (const bench::RungMean& mean : bench::rung_means(rows)) {
    fmt::print("{:<20} {:>9.1f} us, geometric mean of {}\n", mean.rung, mean.mean_us,
               plural(mean.cases, "case"));
  }
  if (!trace.empty() && !session.traces().empty()) {
    std::ostringstream text;
    bench::write_all_to_all_trace(text, session.traces());
    write_whole(trace, text.str());
    fmt::print("{}: a call of each rung, of the last case\n", trace.filename().string());
  }
  return printer.failed_any() ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
