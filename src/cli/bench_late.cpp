#include "cli/bench_late.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/names.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "cli/progress.h"

namespace switchyard::cli {
namespace {

using results::LateRow;

class LatePrinter : public bench::LateObserver {
 public:
  // `json` is the file for the rows. If it is empty, they are only printed.
  explicit LatePrinter(std::filesystem::path json) : json_(std::move(json)) {}

  bool failed_any() const { return failed_; }

  void measuring(std::uint64_t done_points, std::uint64_t all_points) override {
    progress_.update(done_points, all_points);
  }
  void measured(const LateRow& row) override {
    progress_.clear();
    fmt::print("{}\n", late_text(row));
    std::fflush(stdout);
  }
  void keep(const std::vector<LateRow>& rows) override {
    if (!json_.empty()) results::merge_rows(json_, rows);
  }
  void failed(const std::string& what, const std::string& problem) override {
    failed_ = true;
    progress_.clear();
    std::fflush(stdout);
    std::fprintf(stderr, "switchyard: %s: %s\n", what.c_str(), problem.c_str());
  }

 private:
  std::filesystem::path json_;
  ProgressBar progress_{"measuring", true, Counted::kPoints};
  bool failed_ = false;
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
  fmt::print("{}; {} ranks, weights and arithmetic in {}\n", session.machine(), options.ranks,
             short_name(options.dtype));
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(late_heading()));
  std::fflush(stdout);
  session.run();
  return printer.failed_any() ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
