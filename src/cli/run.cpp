// `switchyard run`: one MoE layer over some ranks.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>

#include "cli/commands.h"
#include "cli/run_report.h"
#include "fabric/environment.h"
#include "gpu/device.h"
#include "layer/compute.h"
#include "model/safetensors.h"
#include "protocol/layout.h"

namespace switchyard::cli {
namespace {

struct RunOptions {
  SourceOptions source;
  BatchOptions batch;
  RankOptions ranks;
  bool ranks_given = false;
  std::optional<Backend> backend;
  std::optional<DType> compute;
  std::optional<double> capacity_factor;
  std::string output;
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
`topk_weights` f32 [T, K], and `token_ids` i32/i64 [T].

Exit codes: 0 done; 1 --verify failed; 2 unusable arguments or files; 3 a rank did not do its part.)";

void add_source_options(CLI::App& app, RunOptions& o) {
  const char* const group = "Layer";
  app.add_option("--checkpoint", o.source.checkpoint, "Hugging Face directory to take it from")
      ->type_name("DIR")
      ->group(group);
  app.add_option("--model", o.source.model, "Model whose layer to make up ('switchyard models')")
      ->type_name("NAME")
      ->group(group);
  add_whole(app, "--layer", o.source.layer, 0, 1 << 20,
            "Which layer (default: the first with experts)")
      ->group(group);
  const std::size_t before = app.get_options().size();
  add_override_options(app, o.source.overrides);
  add_dtype(app, "--dtype", o.source.dtype, true,
            "Made-up weights in bf16, f32, f16 or fp8 (default: the model's)");
  add_whole(app, "--seed", o.source.seed, 0, std::numeric_limits<std::int64_t>::max(),
            "Of made-up weights, activations and routing (default 0)");
  add_real(app, "--capacity-factor", o.capacity_factor, 1e-6, 1e6,
           "Drop slots beyond this multiple of an even share (default: never)");
  for (std::size_t i = before; i < app.get_options().size(); ++i) {
    app.get_options()[i]->group(group);
  }
}

void add_batch_options(CLI::App& app, RunOptions& o) {
  const char* const group = "Batch";
  add_whole(app, "--tokens", o.batch.tokens, 1, 1 << 24,
            "Tokens over all ranks, dealt evenly (default 1024)")
      ->group(group);
  app.add_option("--input", o.batch.input, "Safetensors file with activations, see below")
      ->type_name("FILE")
      ->group(group);
  app.add_option("--output", o.output, "Write output, topk_ids and topk_weights there")
      ->type_name("FILE")
      ->group(group);
  add_real(app, "--balancedness", o.batch.balancedness, 0, 1,
           "Route at random, with this relative entropy, instead of by gate")
      ->group(group);
}

void add_execution_options(CLI::App& app, RunOptions& o) {
  const char* const group = "Execution";
  add_backend(app, "--backend", o.backend,
              "cpu or cuda (default: cuda where it suits and ranks have a GPU each)")
      ->group(group);
  add_whole(app, "--ranks", o.ranks.ranks, 1, protocol::kMaxRanks,
            "Ranks, as threads of this process (default 1, or the launcher's)")
      ->group(group);
  add_whole(app, "--threads", o.ranks.threads, 0, 1024,
            "Compute threads of each rank (cpu; default 0: the machine's, shared out)")
      ->group(group);
  add_whole(app, "--reserved-sms", o.ranks.reserved_sms, 0, 1024,
            "SMs of the GPU to leave free (cuda; default: those of other ranks on it)")
      ->group(group);
  add_dtype(app, "--compute", o.compute, false,
            "Arithmetic and wire type: bf16, f32 or fp8 (default: by the weights)")
      ->group(group);
  add_whole(app, "--repeat", o.ranks.repeat, 1, 1'000'000,
            "Timed passes after a warm-up (default 5)")
      ->group(group);
  add_seconds(app, "--deadline", o.ranks.deadline, "Longest wait for another rank (default 30)")
      ->group(group);
}

void add_report_options(CLI::App& app, RunOptions& o) {
  const char* const group = "Report";
  app.add_flag("--verify", o.verify, "Compare output and routing with an fp64 reference")
      ->group(group);
  app.add_flag("--json", o.json, "Report as JSON")->group(group);
  app.add_flag("--quiet", o.quiet, "Report only errors")->group(group);
}

void write_output(const std::string& path, const LayerSpec& spec, RunResult& result) {
  const MatrixView output = result.output_view(spec.hidden);
  const MatrixView ids = {result.topk_ids.data(), DType::kI32, output.rows, spec.top_k, spec.top_k};
  const MatrixView weights = {result.topk_weights.data(), DType::kF32, output.rows, spec.top_k,
                              spec.top_k};
  write_matrices(path, {{"output", output}, {"topk_ids", ids}, {"topk_weights", weights}});
}

// A long run should not end with this.
void require_place_for(const std::string& path) {
  if (path.empty()) return;
  const auto directory = std::filesystem::absolute(path).parent_path();
  if (std::filesystem::is_directory(directory)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--output is '{}', but there is no directory '{}'; make it first", path,
                          directory.string()));
}

void print(const Report& report, const RunOptions& options) {
  if (options.json) {
    fmt::print("{}\n", to_json(report).dump(2));
    return;
  }
  for (const std::string& line : to_text(report, Palette::for_output(STDOUT_FILENO))) {
    fmt::print("{}\n", line);
  }
}

int report(const RunOptions& options, const Source& source, const Batch& batch,
           const RunResult& result) {
  Report told{source, batch, options.ranks, result, {}, {}};
  const bool silent = options.quiet && !options.json;
  if (!silent && result.backend == Backend::kCpu) {
    told.rates = measure_rates(source, batch, result, options.ranks.compute);
  }
  if (options.verify) told.verification = verify(source, batch, result, options.ranks.compute);
  if (!silent) print(told, options);
  if (!told.verification || told.verification->ok()) return kExitOk;
  const Verification& v = *told.verification;
  fmt::print(stderr,
             "switchyard: verification failed: error {:.3e} with a bound of {:.3e}, {} misrouted "
             "tokens\n",
             v.error, v.bound, v.misrouted_tokens);
  return kExitVerification;
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// What a chosen backend cannot do, told before weights are made up for it.
void require_consistent(const RunOptions& options) {
  if (options.backend != Backend::kCuda) {
    if (options.backend && options.ranks.reserved_sms) {
      refuse("--reserved-sms is for --backend cuda; leave it out");
    }
    return;
  }
  if (options.ranks.threads > 0) refuse("--threads is for --backend cpu; leave it out");
  if (gpu::device_count() > 0) return;
  throw Error(ErrorCode::kUnsupported,
              gpu::built_with_cuda()
                  ? "--backend cuda needs a GPU, and there is none that CUDA can use "
                    "('switchyard doctor' tells more); use --backend cpu"
                  : "--backend cuda is not part of this build, which found no nvcc or no CUTLASS "
                    "headers; use --backend cpu");
}

// GPUs for what they run well, unless an option only makes sense elsewhere.
Backend default_backend(const RunOptions& options, int ranks, int rank) {
  const bool suits = options.ranks.threads == 0 && options.ranks.compute != DType::kF32 &&
                     !options.capacity_factor;
  const int num_devices = gpu::device_count();
  if (suits && ranks <= num_devices && gpu::device_info(rank % num_devices).runs_our_kernels()) {
    return Backend::kCuda;
  }
  if (options.ranks.reserved_sms) {
    refuse(
        "--reserved-sms is for --backend cuda, but this would run on the cpu; leave it out, or "
        "give --backend cuda as well");
  }
  return Backend::kCpu;
}

int run(RunOptions& options) {
  const auto launched = parse_launched_rank([](const char* name) { return std::getenv(name); });
  const bool as_process = launched && launched->size > 1 && !options.ranks_given;
  const bool leads = !as_process || launched->rank == 0;

  const int ranks = as_process ? launched->size : options.ranks.ranks;
  require_place_for(options.output);
  require_consistent(options);
  options.batch.seed = options.source.seed;
  Source source =
      load_source(options.source, as_process ? launched->size : 1, leads && !options.quiet);
  if (options.capacity_factor) {
    source.spec.capacity_factor = static_cast<float>(*options.capacity_factor);
  }
  options.ranks.compute = resolve_compute(source.weights, options.compute);
  options.ranks.backend = options.backend
                              ? *options.backend
                              : default_backend(options, ranks, as_process ? launched->rank : 0);
  const Batch batch = make_batch(options.batch, source, value_type(options.ranks.compute));

  std::optional<RunResult> result = as_process ? run_as_process(source, batch, options.ranks)
                                               : run_as_threads(source, batch, options.ranks);
  if (!result) return kExitOk;
  if (!options.output.empty()) write_output(options.output, source.spec, *result);
  return report(options, source, batch, *result);
}

}  // namespace

Subcommand add_run(CLI::App& root) {
  CLI::App* const app = root.add_subcommand("run", "Run one MoE layer and tell how it went");
  const auto options = std::make_shared<RunOptions>();
  add_source_options(*app, *options);
  add_batch_options(*app, *options);
  add_execution_options(*app, *options);
  add_report_options(*app, *options);
  app->footer(kExamples);
  return {app, [app, options] {
            options->ranks_given = app->count("--ranks") > 0;
            return run(*options);
          }};
}

}  // namespace switchyard::cli
