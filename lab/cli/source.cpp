#include "cli/source.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/join.h"
#include "base/names.h"
#include "base/plural.h"
#include "base/printable.h"
#include "cli/format.h"
#include "cli/progress.h"
#include "common/host_memory.h"
#include "machine/host.h"
#include "models/generate.h"
#include "models/model_table.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

[[noreturn]] void contradiction(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require_consistent(const SourceOptions& options) {
  if (options.checkpoint.empty() == options.model.empty()) {
    contradiction(
        options.model.empty()
            ? "there is no layer to run; give --checkpoint DIR or --model NAME ('switchyard "
              "models' lists the names)"
            : "--checkpoint and --model are both given; the weights come from one of them");
  }
  if (options.checkpoint.empty()) return;
  std::vector<std::string> given = told_overrides(options.overrides);
  if (options.dtype) given.push_back(fmt::format("--dtype {}", short_name(*options.dtype)));
  if (!given.empty()) {
    contradiction(fmt::format(
        "{} would change a --model, but a checkpoint is what it is; leave it out ('switchyard "
        "make-checkpoint' takes it)",
        join(given, ", ")));
  }
}

int choose_layer(int wanted, const std::vector<int>& moe_layers, const std::string& name) {
  if (moe_layers.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} has no MoE layer", printable(name)));
  }
  if (wanted < 0) return moe_layers.front();
  if (std::find(moe_layers.begin(), moe_layers.end(), wanted) != moe_layers.end()) return wanted;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("--layer is {}, which is not an MoE layer of {}; it has {} of them, from {} "
                  "to {}",
                  wanted, printable(name), moe_layers.size(), moe_layers.front(),
                  moe_layers.back()));
}

std::uint64_t expert_bytes(const MoeWeights& weights) {
  return touched_weight_bytes(weights, std::vector<std::int64_t>(weights.experts.size(), 1));
}

Source load_checkpoint(const SourceOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(options.checkpoint);
  const int layer = choose_layer(options.layer, checkpoint.moe_layers(), options.checkpoint);
  Source source;
  source.name = fmt::format("{}, layer {}", checkpoint.model_type(), layer);
  source.origin = options.checkpoint;
  source.spec = checkpoint.layer_spec(layer);
  source.weights = checkpoint.load_layer(layer);
  source.dtype = checkpoint.dtype();
  return source;
}

void require_memory(const std::string& name, std::uint64_t bytes, int num_processes, DType dtype) {
  const std::uint64_t needed = bytes * static_cast<std::uint64_t>(num_processes);
  const std::uint64_t available = host_memory().available;
  if (needed <= available) return;
  const std::string each =
      num_processes == 1
          ? ""
          : fmt::format(" for {} of {}", plural(num_processes, "process", "processes"),
                        format_bytes(static_cast<double>(bytes)));
  const char* const share = num_processes == 1
                                ? ""
                                : ", or let the processes share a checkpoint ('switchyard "
                                  "make-checkpoint', then --checkpoint)";
  throw Error(
      ErrorCode::kCapacityExceeded,
      fmt::format("the weights of {} in {} need {}{}, but {} of memory are available; scale "
                  "the layer down with --experts, --hidden or --intermediate{}{}",
                  name, short_name(dtype), format_bytes(static_cast<double>(needed)), each,
                  format_bytes(static_cast<double>(available)),
                  dtype == DType::kF8E4M3 || is_four_bit(dtype) ? "" : ", store it in --dtype fp8",
                  share));
}

// Generates the weights that make-checkpoint writes with the same options.
Source generate(const SourceOptions& options, int num_processes, bool show_progress) {
  const ModelEntry& entry = find_model(options.model);
  const DType dtype = options.dtype.value_or(entry.dtype);
  const ModelConfig config = naming_overrides(entry.name, options.overrides, [&] {
    return parse_config(rewrite_config(entry.config_json, options.overrides, dtype), entry.name);
  });
  const int layer = choose_layer(options.layer, config.moe_layers(), entry.name);
  Source source;
  source.name = fmt::format("{}, layer {}", entry.name, layer);
  source.origin = fmt::format("generated, seed {}", options.seed);
  source.spec = *config.layers[static_cast<std::size_t>(layer)];
  source.dtype = dtype;

  GenerateOptions generation;
  if (config.vocab_size > 0) generation.vocabulary = config.vocab_size;
  require_memory(source.name, generated_bytes(source.spec, dtype, generation.vocabulary),
                 num_processes, dtype);
  generation.num_threads = std::max(1, machine::hardware_threads() / num_processes);
  ProgressBar bar("generating weights", show_progress);
  generation.progress = [&bar](std::uint64_t done, std::uint64_t total) {
    bar.update(done, total);
  };
  source.weights =
      generate_weights(source.spec, dtype, layer_seed(options.seed, layer), generation);
  return source;
}

}  // namespace

void add_override_options(Command& command, ConfigOverrides& overrides) {
  constexpr std::int64_t kMost = 1 << 20;
  command.add_whole("--experts", overrides.num_experts, 1, kMost, "Scale the model to N experts");
  command.add_whole("--top-k", overrides.top_k, 1, kMost, "Route every token to N experts");
  command.add_whole("--hidden", overrides.hidden, 1, kMost, "Scale the hidden size to N");
  command.add_whole("--intermediate", overrides.intermediate, 1, kMost,
                    "Scale the experts' intermediate size to N");
}

std::vector<std::string> told_overrides(const ConfigOverrides& overrides) {
  std::vector<std::string> told;
  // 1 is the default.
  if (overrides.num_moe_layers > 1)
    told.push_back(fmt::format("--layers {}", overrides.num_moe_layers));
  for (const auto& [name, value] : {std::pair{"--experts", overrides.num_experts},
                                    {"--top-k", overrides.top_k},
                                    {"--hidden", overrides.hidden},
                                    {"--intermediate", overrides.intermediate}}) {
    if (value > 0) told.push_back(fmt::format("{} {}", name, value));
  }
  return told;
}

Source load_source(const SourceOptions& options, int num_processes, bool show_progress) {
  require_consistent(options);
  Source source = options.model.empty() ? load_checkpoint(options)
                                        : generate(options, num_processes, show_progress);
  source.bytes = expert_bytes(source.weights);
  return source;
}

}  // namespace switchyard::cli
