// `switchyard run`: one MoE layer over some ranks.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/mapped_file.h"
#include "base/printable.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/layer_run.h"
#include "cli/run_report.h"
#include "machine/description.h"
#include "models/matrix_file.h"
#include "switchyard/recording.h"

namespace switchyard::cli {
namespace {

struct RunOptions : LayerRunOptions {
  std::string output, record;
  bool verify = false;
  bool json = false;
  bool quiet = false;
};

constexpr const char* kExamples = R"(Examples:
  switchyard run --model olmoe --tokens 1024 --ranks 4 --verify
  switchyard run --model deepseek-v3 --experts 32 --tokens 64 --balancedness 0.7
  switchyard run --checkpoint ~/models/OLMoE-1B-7B --layer 3 --input x.safetensors
                 --output y.safetensors
  switchyard run --model qwen3-30b --tokens 32 --backend cuda --ranks 2 --verify
  switchyard launch -n 4 -- switchyard run --checkpoint ~/models/OLMoE-1B-7B --json

Started by a launcher (switchyard launch, torchrun, mpirun, srun) without --ranks, each process is
one rank, and rank 0 reports. With --backend cuda, ranks are dealt to the machine's GPUs in turn.
--input holds `activations` [T, H] in bf16, f16 or f32, and may hold `topk_ids` i32/i64 [T, K] with
`topk_weights` f32 [T, K], and `token_ids` i32/i64 [T], which layers that route by hashes read.

A token with a NaN among its logits loses experts. The report tells how many tokens did, as does a
line on stderr with --json or --quiet, and --verify fails.

Exit codes: 0 done; 1 --verify failed; 2 unusable arguments or files; 3 a rank did not do its part.)";

void add_run_options(Command& command, RunOptions& o) {
  command.heading("Batch");
  command.add_text("-o,--output,--out", o.output, "FILE",
                   "Write output, topk_ids and topk_weights there");
  command.add_text("--record", o.record, "FILE",
                   "Write the rows of each expert in every pass there, as 'switchyard\nreport "
                   "--routing' and 'switchyard tune --histograms' take them");
  command.heading("Execution");
  command.add_whole("--repeat", o.ranks.repeat, 1, 1'000'000,
                    "Timed passes after a warm-up (default 5)");
  command.heading("Report");
  command.add_flag("--verify", o.verify, "Compare output and routing with an fp64 reference");
  command.add_flag("--json", o.json, "Report as JSON");
  command.add_flag("--quiet", o.quiet, "Report only errors");
}

void write_output(const std::filesystem::path& path, const LayerSpec& spec, RunResult& result) {
  const MatrixView output = result.output_view(spec.hidden);
  const MatrixView ids = {result.topk_ids.data(), DType::kI32, output.rows, spec.top_k, spec.top_k};
  const MatrixView weights = {result.topk_weights.data(), DType::kF32, output.rows, spec.top_k,
                              spec.top_k};
  write_matrices(path, {{"output", output}, {"topk_ids", ids}, {"topk_weights", weights}});
}

void print(const Report& report, const RunOptions& options) {
  if (options.json) {
    // ASCII suits every terminal. It also avoids trouble with paths, which need not be UTF-8.
    fmt::print("{}\n", to_json(report).dump({.indent = 2, .ascii = true}));
    return;
  }
  for (const std::string& line : to_text(report, Palette::for_output(STDOUT_FILENO))) {
    fmt::print("{}\n", line);
  }
  if (!options.output.empty()) {
    fmt::print("\nfile        {}, with output, topk_ids and topk_weights\n",
               printable(options.output));
  }
}

// Throws nothing: if stderr is full or closed, the exit code still tells of a failure.
void say(const std::string& text) { std::fprintf(stderr, "switchyard: %s\n", text.c_str()); }

int report(const RunOptions& options, const Source& source, const Batch& batch,
           const RunResult& result) {
  Report told{source, batch, options.ranks, result, {}, {}};
  const bool silent = options.quiet && !options.json;
  if (!silent && result.backend == Backend::kCpu) {
    told.rates = measure_rates(source, batch, result, options.ranks.compute);
  }
  if (options.verify) {
    told.verification = run::verify(source, batch, result, options.ranks.compute);
    MappedFile::require_all_whole();
  }
  if (!silent) print(told, options);
  const bool shown = !silent && !options.json;
  if (result.nan_tokens > 0 && (!shown || options.verify)) {
    say(nan_text(result));
  }
  if (!told.verification || told.verification->ok()) return kExitOk;
  const Verification& v = *told.verification;
  say(fmt::format(
      "verification failed: error {:.3e} with a bound of {:.3e}, {}, {} with NaN logits", v.error,
      v.bound, plural(v.misrouted_tokens, "misrouted token"), plural(v.nan_tokens, "token")));
  return kExitVerification;
}

int run(RunOptions& options) {
  const std::filesystem::path output = place_for("--output", options.output, options);
  const std::filesystem::path record = place_for("--record", options.record, options);
  if (!record.empty()) {
    constexpr int kMostKept = 1 << 16;
    options.ranks.recorded_steps = std::min(options.ranks.repeat + 1, kMostKept);
    options.ranks.recorded_name = options.source.layer >= 0
                                      ? fmt::format("layers.{}", options.source.layer)
                                  : options.source.model.empty() ? "layers"
                                                                 : options.source.model;
  }
  LayerRun run = run_layer(options, !options.quiet);
  if (!run.result) return kExitOk;
  if (!output.empty()) write_output(output, run.source.spec, *run.result);
  if (!record.empty()) {
    write_recordings(record, {machine::describe_machine(run.result->backend, 1),
                              {run.result->recording.value()}});
  }
  return report(options, run.source, run.batch, *run.result);
}

}  // namespace

void add_run(CommandLine& line) {
  add_layer_command(line, "run", "Run one MoE layer and tell how it went", add_run_options,
                    kExamples, run);
}

}  // namespace switchyard::cli
