#include "cli/layer_run.h"

#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/mapped_file.h"
#include "base/names.h"
#include "base/plural.h"
#include "cli/format.h"
#include "cli/no_gpu.h"
#include "cli/output_file.h"
#include "common/host_memory.h"
#include "fabric/environment.h"
#include "gpu/device.h"
#include "layer/compute.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Refuses what the chosen backend cannot do. This is done before weights are generated.
void require_consistent(const LayerRunOptions& options) {
  if (options.capacity_of_tokens && !options.capacity_factor) {
    refuse("--capacity-of-tokens says what --capacity-factor is of; give that, too");
  }
  if (options.backend != Backend::kCuda) {
    if (options.backend && options.ranks.reserved_sms) {
      refuse(fmt::format("--reserved-sms {} is for --backend cuda; leave it out",
                         *options.ranks.reserved_sms));
    }
    return;
  }
  if (options.ranks.threads > 0) {
    refuse(fmt::format("--threads {} is for --backend cpu; leave it out", options.ranks.threads));
  }
  if (gpu::device_count() > 0) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("--backend cuda needs a GPU, and {}; use --backend cpu", why_no_gpu()));
}

// Refuses options that would change nothing, now that it is known what they could change.
void require_used(const LayerRunOptions& options, const LayerRun& run) {
  const bool draws = options.source.checkpoint.empty() || options.batch.input.empty() ||
                     options.batch.balancedness ||
                     run.source.spec.routing.method == RoutingMethod::kHash;
  if (options.seed_given && !draws) {
    refuse(
        fmt::format("--seed is {}, but nothing is drawn at random where --checkpoint and "
                    "--input are given; leave it out",
                    options.source.seed));
  }
}

// Says in the command's words what resolve_compute() says in the library's.
DType compute_of(const LayerRunOptions& options, const MoeWeights& weights) {
  try {
    return resolve_compute(weights, options.compute);
  } catch (const Error& error) {
    if (!options.compute) throw;
    throw Error(error.code(),
                fmt::format("--compute is {}: {}", short_name(*options.compute), error.what()));
  }
}

// Chooses the GPUs if there is one per rank and no option or type suits the CPU only.
Backend default_backend(const LayerRunOptions& options, int ranks, int rank) {
  const bool suits = options.ranks.threads == 0 && options.ranks.compute != DType::kF32;
  const int num_devices = gpu::device_count();
  if (suits && ranks <= num_devices && gpu::device_info(rank % num_devices).runs_our_kernels()) {
    return Backend::kCuda;
  }
  if (options.ranks.reserved_sms) {
    refuse(
        fmt::format("--reserved-sms {} is for --backend cuda, but this would run on the cpu; leave "
                    "it out, or give --backend cuda as well",
                    *options.ranks.reserved_sms));
  }
  return Backend::kCpu;
}

// Before minutes are spent on numbers that have no room: activations and outputs, and on CPUs a
// result for each slot. It is the least; ranks' buffers come on top.
void require_memory(std::int64_t tokens, const LayerSpec& spec, DType dtype, Backend backend) {
  const auto element = static_cast<std::uint64_t>(size_of(dtype));
  const std::uint64_t results =
      backend == Backend::kCpu ? static_cast<std::uint64_t>(spec.top_k) * element : 0;
  const std::uint64_t needed = static_cast<std::uint64_t>(tokens) *
                               static_cast<std::uint64_t>(spec.hidden) *
                               (element + sizeof(float) + results);
  const std::uint64_t available = host_memory().available;
  if (needed <= available) return;
  throw Error(
      ErrorCode::kCapacityExceeded,
      fmt::format("{} of hidden size {} need {} at least, but {} of memory are "
                  "available; give fewer --tokens, or scale the layer down with --hidden",
                  plural(tokens, "token"), spec.hidden, format_bytes(static_cast<double>(needed)),
                  format_bytes(static_cast<double>(available))));
}

}  // namespace

void add_source_options(Command& command, LayerRunOptions& o) {
  command.heading("Layer");
  command.add_text("--checkpoint", o.source.checkpoint, "DIR",
                   "Hugging Face directory to take it from");
  command.add_text("--model", o.source.model, "NAME",
                   "Model whose layer to make up ('switchyard models')");
  command.add_whole("--layer", o.source.layer, 0, 1 << 20,
                    "Which layer (default: the first with experts)");
  add_override_options(command, o.source.overrides);
  command.add_dtype(
      "--dtype", o.source.dtype, TypeOf::kWeights,
      fmt::format("Made-up weights in {}\n(default: the model's)", type_names(TypeOf::kWeights)));
  command.add_whole("--seed", o.source.seed, 0, std::numeric_limits<std::int64_t>::max(),
                    "Of made-up weights, activations and routing (default 0)");
  command.add_real("--capacity-factor", o.capacity_factor, 1e-6, 1e6,
                   "Drop slots beyond this multiple of an even share (default: never)");
  command.add_flag("--capacity-of-tokens", o.capacity_of_tokens,
                   "An even share is one slot for each token, over the experts, not top-k");
}

void add_batch_options(Command& command, LayerRunOptions& o) {
  command.heading("Batch");
  command.add_whole("--tokens", o.batch.tokens, 1, 1 << 24,
                    "Tokens over all ranks, dealt evenly (default 1024)");
  command.add_text("--input", o.batch.input, "FILE",
                   "Safetensors file with activations and, perhaps, their routing");
  command.add_real("--balancedness", o.batch.balancedness, 0, 1,
                   "Route at random, with this relative entropy, instead of by gate");
}

void add_execution_options(Command& command, LayerRunOptions& o) {
  command.heading("Execution");
  command.add_backend("--backend", o.backend,
                      "cpu or cuda (default: cuda where it suits and ranks have a GPU each)");
  command.add_whole("--ranks", o.ranks.ranks, 1, protocol::kMaxRanks,
                    "Ranks, as threads of this process (default 1, or the launcher's)");
  command.add_whole("--threads", o.ranks.threads, 0, 1024,
                    "Compute threads of each rank (cpu; default 0: the machine's, shared out)");
  command.add_whole("--reserved-sms", o.ranks.reserved_sms, 0, 1024,
                    "SMs of the GPU to leave free (cuda; default: those of other ranks on it)");
  command.add_dtype("--compute", o.compute, TypeOf::kArithmetic,
                    "Arithmetic and wire type: bf16, f32 or fp8 (default: by the weights)");
  command.add_seconds("--deadline", o.ranks.deadline, "Longest wait for another rank (default 30)");
  command.add_flag("--pre-sum-per-host", o.ranks.pre_sum_per_host,
                   "Over hosts, sum a token's results of one host before they travel");
}

std::filesystem::path place_for(const char* option, const std::string& path,
                                const LayerRunOptions& options) {
  if (path.empty()) return {};
  return output_file(option, path, {&options.batch.input, 1}, options.source.checkpoint);
}

LayerRun run_layer(LayerRunOptions& options, bool show_progress) {
  std::optional<LaunchedRank> launched;
  // With --ranks the environment is not read, so nothing that is left over in it can cause an
  // error.
  if (!options.ranks_given) launched = parse_launched_rank(std::getenv);
  const bool as_process = launched && launched->size > 1;
  const bool leads = !as_process || launched->rank == 0;

  const int ranks = as_process ? launched->size : options.ranks.ranks;
  require_consistent(options);
  if (options.ranks.late && ranks == 1) {
    refuse(fmt::format("--late {} is for several ranks; give --ranks, too",
                       options.ranks.late->count()));
  }
  options.batch.seed = options.source.seed;
  LayerRun run{.source =
                   load_source(options.source, as_process ? ranks : 1, leads && show_progress)};
  if (options.capacity_factor) {
    run.source.spec.capacity_factor = static_cast<float>(*options.capacity_factor);
    if (options.capacity_of_tokens) run.source.spec.capacity_rule = CapacityRule::kTokens;
  }
  require_used(options, run);
  options.ranks.compute = compute_of(options, run.source.weights);
  options.ranks.backend = options.backend
                              ? *options.backend
                              : default_backend(options, ranks, as_process ? launched->rank : 0);
  if (options.batch.input.empty()) {
    require_memory(options.batch.tokens, run.source.spec, value_type(options.ranks.compute),
                   options.ranks.backend);
  }
  run.batch = run::make_batch(options.batch, run.source, value_type(options.ranks.compute));
  run.result = as_process ? run::run_as_process(run.source, run.batch, options.ranks)
                          : run::run_as_threads(run.source, run.batch, options.ranks);
  MappedFile::require_all_whole();  // --input, too
  return run;
}

}  // namespace switchyard::cli
