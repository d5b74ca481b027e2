// `switchyard bench late`: ranks that come late.
#include "bench/late.h"

#include <memory>

#include "base/names.h"
#include "base/plural.h"
#include "bench/measure.h"
#include "cli/bench/common.h"
#include "cli/lists.h"
#include "protocol/control.h"

namespace switchyard::cli {
namespace {

using results::LateRow;

struct LateCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  int ranks = 2;
  std::vector<std::string> models;
  std::vector<std::int64_t> tokens, late_us;
  std::optional<DType> dtype;
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench late --model olmoe --tokens 8,512 --late 200,2000 --json late.json

The last of the ranks, or every rank, comes late by --late, and the suite tells how long the others
take from its start on ('after us'). 'own' is the share of their work that is the late rank's
tokens', 'early' that of their tasks that they had done when it came. The policy 'waits' computes
nothing routed before all counts are there; 'works' (cpu) is the layer as it is. Ranks are threads,
on GPUs with --backend cuda.)";

std::string heading() {
  return fmt::format("{:<16} {:>6} {:<6} {:<4} {:>7} {:>10} {:>10} {:>21} {:>5} {:>6}", "model",
                     "tokens", "policy", "late", "by us", "prompt us", "after us", "p10 .. p90 us",
                     "own", "early");
}

void print(const LateRow& row) {
  fmt::print(
      "{:<16} {:>6} {:<6} {:<4} {:>7.0f} {:>10.1f} {:>10.1f} {:>9.1f} .. {:>8.1f} {:>5} {:>6}\n",
      row.model, row.tokens_per_rank, row.policy, row.jitter ? "all" : "one", row.late_us,
      row.prompt_us, row.median_us, row.p10_us, row.p90_us,
      row.jitter ? "-" : fmt::format("{:.2f}", row.own_share),
      row.early_share ? fmt::format("{:.2f}", *row.early_share) : "-");
}

int run(const LateCommand& o) {
  const std::filesystem::path json = o.rows_file<LateRow>();
  bench::LateOptions options = bench::late_suite(o.backend.value_or(Backend::kCpu));
  if (o.quick) {
    options.models.resize(1);
    options.tokens = {8};
    options.late_us = {options.late_us.front(), options.late_us.back()};
  }
  if (!o.models.empty()) options.models = o.models;
  if (!o.tokens.empty()) options.tokens = o.tokens;
  if (!o.late_us.empty()) options.late_us = o.late_us;
  options.ranks = o.ranks;
  options.dtype = o.dtype.value_or(DType::kBF16);
  options.repeat = o.repeat_or(5);
  static_cast<bench::RunNote&>(options) = o;
  RowsPrinter<bench::LateObserver, LateRow> printer(json, print);
  bench::LateSession session(options, printer);
  print_head(fmt::format("{}; {}, weights in {}, arithmetic in {}", session.machine(),
                         plural(options.ranks, "rank"), short_name(options.dtype),
                         short_name(bench::default_compute(options.dtype))),
             "", heading());
  session.run();
  return printer.exit_code();
}

}  // namespace

void add_late(Command& bench, const std::string& typed) {
  Command& command = bench.add_command("late", "What a late rank costs the others");
  const auto o = std::make_shared<LateCommand>(typed);
  command.heading("Points");
  add_names(command, "--model", o->models, "Layers of these models (default the suite's)");
  command.add_whole("--ranks", o->ranks, 1, protocol::kMaxRanks, "Ranks (default 2)");
  add_wholes(command, "--tokens", o->tokens, 1 << 20, "Tokens of each rank (default the suite's)");
  add_wholes(command, "--late", o->late_us, 10'000'000,
             "Microseconds by which a rank comes late (default the suite's)");
  command.add_dtype("--dtype", o->dtype, TypeOf::kWeights,
                    fmt::format("Weights in {}\n(default bf16)", type_names(TypeOf::kWeights)));
  add_common_options(command, *o,
                     "One model, 8 tokens, the least and the most late, 5 passes each");
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
