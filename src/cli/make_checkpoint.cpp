// `switchyard make-checkpoint`: a Hugging Face directory of random weights with a model's geometry.
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/source.h"
#include "model/generate.h"
#include "model/model_table.h"
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
  switchyard make-checkpoint --model deepseek-v3 --experts 16 --layers 2 --out /tmp/small-v3)";

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
  fmt::print("{}: {} in {} safetensors {}\n", options.directory,
             format_bytes(static_cast<double>(written.bytes)), written.shards,
             written.shards == 1 ? "file" : "files");
  fmt::print("{} MoE {} of {} in {}, seed {}:", layers.size(),
             layers.size() == 1 ? "layer" : "layers", options.model,
             dtype_argument(checkpoint.dtype()), options.write.seed);
  for (const int layer : layers) fmt::print(" {}", layer);
  fmt::print("\n");
  for (const std::string& line :
       wrap(describe(checkpoint.layer_spec(layers.front())), kReportColumns)) {
    fmt::print("{}\n", line);
  }
}

int make_checkpoint(MakeOptions& options) {
  const ModelEntry& entry = find_model(options.model);
  {
    ProgressBar bar("writing", !options.quiet);
    options.write.progress = [&bar](std::uint64_t done, std::uint64_t total) {
      bar.update(done, total);
    };
    write_checkpoint(entry, options.directory, options.write);
  }
  if (!options.quiet) print_summary(options);
  return kExitOk;
}

}  // namespace

Subcommand add_make_checkpoint(CLI::App& root) {
  CLI::App* const app =
      root.add_subcommand("make-checkpoint", "Write a checkpoint of random weights");
  const auto options = std::make_shared<MakeOptions>();
  options->write.overrides.num_moe_layers = 1;
  app->add_option("--model", options->model, "Model to imitate ('switchyard models')")
      ->type_name("NAME")
      ->required();
  app->add_option("--out", options->directory, "Directory to make; it must not hold anything yet")
      ->type_name("DIR")
      ->required();
  add_whole(*app, "--layers", options->write.overrides.num_moe_layers, 1, 1 << 20,
            "MoE layers to write, from the first on (default 1)");
  add_dtype(*app, "--dtype", options->write.dtype, true,
            "bf16, f32, f16 or fp8 (default: the model's)");
  add_whole(*app, "--seed", options->write.seed, 0, std::numeric_limits<std::int64_t>::max(),
            "Of the weights (default 0)");
  add_bytes(*app, "--max-shard-size", options->write.max_shard_bytes,
            "Largest file, such as 2GB (default 5GiB)");
  add_override_options(*app, options->write.overrides);
  app->add_flag("--quiet", options->quiet, "Print only errors");
  app->footer(kExamples);
  return {app, [options] { return make_checkpoint(*options); }};
}

}  // namespace switchyard::cli
