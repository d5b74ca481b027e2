// `switchyard make-checkpoint`: a Hugging Face directory of random weights with a model's geometry.
#include <fmt/core.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/join.h"
#include "base/names.h"
#include "base/printable.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/progress.h"
#include "cli/source.h"
#include "model/config.h"
#include "models/generate.h"
#include "models/model_table.h"
#include "switchyard/checkpoint.h"
#include "switchyard/weights.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;

struct MakeOptions {
  std::string model;
  std::string directory;
  WriteOptions write;
  bool quiet = false;
};

constexpr const char* kExamples = R"(Examples:
  switchyard make-checkpoint --model olmoe --out /tmp/olmoe
  switchyard make-checkpoint --model deepseek-v3 --experts 16 --layers 2 --out /tmp/small-v3
  switchyard make-checkpoint --model kimi-k3 --experts 16 --out /tmp/small-k3

Four-bit experts are written as they are published: gpt-oss's and DeepSeek-V4's MXFP4, and
compressed-tensors' mxfp4-pack-quantized (mxfp4) and pack-quantized (int4) of models that have a
module for each expert.)";

struct Written {
  std::uint64_t bytes = 0;
  int shards = 0;
};

Written measure_directory(const fs::path& directory) {
  Written written;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    written.bytes += entry.file_size();
    if (entry.path().extension() == ".safetensors") ++written.shards;
  }
  return written;
}

void print_summary(const MakeOptions& options) {
  const Written written = measure_directory(options.directory);
  const Checkpoint checkpoint = Checkpoint::open(options.directory);
  const std::vector<int> layers = checkpoint.moe_layers();
  fmt::print("{}: {} in {}\n", printable(options.directory),
             format_bytes(static_cast<double>(written.bytes)),
             plural(written.shards, "safetensors file"));
  const std::string made =
      fmt::format("{} of {} in {}, made with --seed {}: {} {}", plural(layers.size(), "MoE layer"),
                  options.model, short_name(checkpoint.dtype()), options.write.seed,
                  layers.size() == 1 ? "layer" : "layers", join(layers, ", "));
  for (const std::string& line : wrap(made, kReportColumns)) fmt::print("{}\n", line);
  for (const std::string& line :
       wrap(describe(checkpoint.layer_spec(layers.front())), kReportColumns)) {
    fmt::print("{}\n", line);
  }
}

// While it lives, a signal that asks the process to end is only remembered. The command looks for
// it with seen(), so that it can remove a half-written checkpoint first. The same signal a second
// time ends the process at once.
class DelayedSignals {
 public:
  DelayedSignals() {
    seen_ = 0;
    struct sigaction remember {};
    remember.sa_handler = [](int number) { seen_ = number; };
    remember.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &remember, nullptr);
    }
  }
  ~DelayedSignals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &before_[i], nullptr);
    }
  }
  DelayedSignals(const DelayedSignals&) = delete;
  DelayedSignals& operator=(const DelayedSignals&) = delete;

  // Returns the signal that came, or 0.
  static int seen() { return seen_; }

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  inline static volatile std::sig_atomic_t seen_ = 0;
  std::array<struct sigaction, kSignals.size()> before_{};
};

struct Interrupted {};

int make_checkpoint(MakeOptions& options) {
  const ModelEntry& entry = find_model(options.model);
  naming_overrides(entry.name, options.write.overrides, [&] {
    return rewrite_config(entry.config_json, options.write.overrides,
                          options.write.dtype.value_or(entry.dtype));
  });
  try {
    const DelayedSignals signals;
    ProgressBar bar("writing", !options.quiet);
    options.write.progress = [&bar](std::uint64_t done, std::uint64_t total) {
      if (DelayedSignals::seen() != 0) throw Interrupted{};
      bar.update(done, total);
    };
    write_checkpoint(entry, options.directory, options.write);
  } catch (const Interrupted&) {
    ::raise(DelayedSignals::seen());
    return kExitInternal;  // reached only if the signal does not end the process
  }
  if (!options.quiet) print_summary(options);
  return kExitOk;
}

}  // namespace

void add_make_checkpoint(CommandLine& line) {
  Command& command = line.add_command("make-checkpoint", "Write a checkpoint of random weights");
  const auto options = std::make_shared<MakeOptions>();
  options->write.overrides.num_moe_layers = 1;
  command.add_text("--model", options->model, "NAME", "Model to imitate ('switchyard models')")
      .required();
  command
      .add_text("-o,--output,--out", options->directory, "DIR",
                "Directory to make; it must not hold anything yet")
      .required();
  command.add_whole("--layers", options->write.overrides.num_moe_layers, 1, 1 << 20,
                    "MoE layers to write, from the first on (default 1)");
  command.add_dtype("--dtype", options->write.dtype, TypeOf::kWeights,
                    type_names(TypeOf::kWeights) + " (default: the model's)");
  command.add_whole("--seed", options->write.seed, 0, std::numeric_limits<std::int64_t>::max(),
                    "Of the weights (default 0)");
  command.add_bytes("--max-shard-size", options->write.max_shard_bytes,
                    "Largest file, such as 2GB (default 5GiB)");
  add_override_options(command, options->write.overrides);
  command.add_flag("--quiet", options->quiet, "Print only errors");
  command.footer(kExamples);
  command.runs([options] { return make_checkpoint(*options); });
}

}  // namespace switchyard::cli
