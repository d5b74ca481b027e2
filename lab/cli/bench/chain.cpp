// `switchyard bench chain`: layers in a chain, with and without early launches.
#include "bench/chain.h"

#include <memory>

#include "base/names.h"
#include "base/plural.h"
#include "cli/bench/common.h"
#include "cli/lists.h"

namespace switchyard::cli {
namespace {

using results::ChainRow;

struct ChainCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  std::vector<std::string> models;
  std::vector<std::int64_t> tokens;
  std::optional<DType> dtype;
  int experts = 0, captures = 0;
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench chain --json chain.json
  switchyard bench chain --model olmoe,qwen3-30b --dtype fp8 --tokens 1,8

A graph has 48 pairs of a small kernel (a residual addition and an RMS normalisation) and a layer,
whose routing is given. 'early' is the launch of each kernel while the one before it still runs
(programmatic dependent launch): with 'no' the small kernel is launched without it and invites
nobody. Times are of a pair. Outputs have the bits of a chain in which the host waits for every
kernel, and some tokens of the last layer are compared with fp64.)";

std::string heading() {
  return fmt::format("{:<16} {:<6} {:>7} {:>6} {:<5} {:>10} {:>21}", "model", "dtype", "experts",
                     "tokens", "early", "us a layer", "p10 .. p90 us");
}

void print(const ChainRow& row) {
  fmt::print("{:<16} {:<6} {:>7} {:>6} {:<5} {:>10.2f} {:>9.2f} .. {:>8.2f}\n", row.model,
             row.dtype, row.experts, row.tokens, row.early_launch ? "yes" : "no", row.median_us,
             row.p10_us, row.p90_us);
}

bench::ChainOptions options_of(const ChainCommand& o) {
  bench::ChainOptions options = bench::chain_suite();
  if (o.quick) {
    options.models.resize(1);
    options.tokens = {1, 64};
    options.captures = 1;
  }
  if (!o.models.empty()) {
    options.models.clear();
    for (const std::string& name : o.models) {
      options.models.push_back({name, o.dtype.value_or(DType::kBF16), o.experts});
    }
  } else if (o.dtype || o.experts != 0) {
    refuse(fmt::format("{} is for the models of --model; give that, too",
                       o.dtype ? "--dtype" : "--experts"));
  }
  if (!o.tokens.empty()) options.tokens = o.tokens;
  if (o.captures != 0) options.captures = o.captures;
  if (o.repeat_or(5) != 0) options.repeat = o.repeat_or(5);
  static_cast<bench::RunNote&>(options) = o;
  return options;
}

int run(const ChainCommand& o) {
  if (o.backend == Backend::kCpu) {
    refuse("--backend is cpu, but bench chain times launches on a GPU; leave it out");
  }
  const std::filesystem::path json = o.rows_file<ChainRow>();
  const bench::ChainOptions options = options_of(o);
  RowsPrinter<bench::ChainObserver, ChainRow> printer(json, print);
  bench::ChainSession session(options, printer);
  print_head(fmt::format("{}; chains of {}", session.machine(), plural(options.layers, "layer")),
             "", heading());
  session.run();
  return printer.exit_code();
}

}  // namespace

void add_chain(Command& bench, const std::string& typed) {
  Command& command =
      bench.add_command("chain", "Layers with a small kernel before each, launched early or not");
  const auto o = std::make_shared<ChainCommand>(typed);
  command.heading("Points");
  add_names(command, "--model", o->models, "Layers of these models (default the suite's)");
  command.add_dtype(
      "--dtype", o->dtype, TypeOf::kWeights,
      fmt::format("With --model: weights in {}\n(default bf16)", type_names(TypeOf::kWeights)));
  command.add_whole("--experts", o->experts, 1, 1 << 16,
                    "With --model: so many experts (default the model's)");
  add_wholes(command, "--tokens", o->tokens, 1 << 20, "Tokens (default the suite's)");
  command.add_whole("--captures", o->captures, 1, 1000,
                    "Graphs of each kind of launch (default 3)");
  add_common_options(command, *o, "One model, 1 and 64 tokens, one capture, 5 repetitions");
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
