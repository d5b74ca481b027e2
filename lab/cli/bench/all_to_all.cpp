// `switchyard bench all_to_all`: GPU MODE's problem, rung by rung.
#include "bench/all_to_all.h"

#include <memory>
#include <sstream>

#include "base/plural.h"
#include "base/whole_file.h"
#include "cli/bench/common.h"
#include "protocol/control.h"

namespace switchyard::cli {
namespace {

using results::AllToAllRow;

struct AllToAllCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  int ranks = 2;
  std::string rungs, trace;
  bool random_experts = false;
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench all_to_all --ranks 8 --json all_to_all.json --trace rungs.json

Ranks are threads, on GPUs with --backend cuda, as those of 'bench exchange': the nine test cases
are checked, the five benchmark cases checked and timed. Rungs: host (the host reads the counts and
copies), flag_per_rank, and each with one step more flag_per_token, fused (no kernel for the
stand-in experts), epochs (no memset), flattened (no block has one rank's rows), tuned (numbers of
blocks). NAME_alone is that step without those before it. 'uneven' is the rows of the block that
received most over the blocks' mean.)";

constexpr const char* kNames[results::kNumStages] = {"d. send", "d. recv", "experts", "c. send",
                                                     "c. recv"};

// Widths of the columns: a rung or rank, its time, the stages' times.
std::string line(const std::string& name, const std::string& time,
                 const std::vector<std::string>& stages) {
  std::string text = fmt::format("{:<20} {:>9}", name, time);
  for (const std::string& stage : stages) text += fmt::format(" {:>8}", stage);
  return text;
}

std::string heading() {
  std::string heading = line("rung, rank", "time us", {std::begin(kNames), std::end(kNames)});
  return heading + fmt::format(" {:>9} {:>7}", "time / F", "uneven");
}

std::vector<std::string> lines_of(const AllToAllRow& row) {
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

void print(const AllToAllRow& row) {
  for (const std::string& text : lines_of(row)) fmt::print("{}\n", text);
}

class Printer : public RowsPrinter<bench::AllToAllObserver, AllToAllRow> {
 public:
  using RowsPrinter::RowsPrinter;

  void checked(std::size_t cases) override {
    clear_progress();
    fmt::print("{}: right on all rungs\n", plural(cases, "test case"));
    std::fflush(stdout);
  }
  void measured(const AllToAllRow& row) override {
    if (row.problem != case_) {
      case_ = row.problem;
      clear_progress();
      print_head(case_ + (row.floor_us ? fmt::format("; F is {:.1f} us", *row.floor_us) : ""), "",
                 heading());
    }
    RowsPrinter::measured(row);
  }

 private:
  std::string case_;
};

int run(const AllToAllCommand& o) {
  bench::AllToAllOptions options;
  options.backend = o.backend_of_ranks("all_to_all");
  options.rungs = all_to_all::find_rungs(o.rungs.empty() ? "all" : o.rungs);
  const std::vector<std::string> outputs = {o.json};
  const std::filesystem::path json = o.rows_file<AllToAllRow>();
  const std::filesystem::path trace =
      o.trace.empty() ? std::filesystem::path() : output_file("--trace", o.trace, outputs);
  options.ranks = o.ranks;
  if (o.random_experts) options.stand_in = all_to_all::StandIn::kRandom;
  if (o.quick) {
    // The smaller cases.
    options.tests.resize(3);
    options.benchmarks.resize(3);
  }
  options.repeat = o.repeat_or(3);
  static_cast<bench::RunNote&>(options) = o;
  Printer printer(json, print);
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
  return printer.exit_code();
}

}  // namespace

void add_all_to_all(Command& bench, const std::string& typed) {
  Command& command = bench.add_command("all_to_all", "GPU MODE's all-to-all problem, rung by rung");
  const auto o = std::make_shared<AllToAllCommand>(typed);
  command.heading("Points");
  command.add_whole("--ranks", o->ranks, 1, protocol::kMaxRanks, "Ranks (default 2)");
  command.add_text("--rung", o->rungs, "NAME,...",
                   "Only these rungs; all (default), or alone: each step without the others");
  command.add_flag("--random-experts", o->random_experts,
                   "Each expert multiplies by a weight of its own, not by 1 + its rank");
  add_common_options(command, *o, "Only the smaller cases, 3 calls each", false);
  command.add_text("--trace", o->trace, "FILE",
                   "What each block did in a call of each rung, in Chrome's format");
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
