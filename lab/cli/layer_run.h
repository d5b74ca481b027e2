// The common part of the commands that run a layer over ranks: their options, and the run itself.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "cli/arguments.h"
#include "cli/source.h"
#include "run/batch.h"
#include "run/ranks.h"

namespace switchyard::cli {

using run::Batch;
using run::BatchOptions;
using run::RankOptions;
using run::RunResult;

struct LayerRunOptions {
  SourceOptions source;
  BatchOptions batch;
  RankOptions ranks;
  bool ranks_given = false, seed_given = false;
  std::optional<Backend> backend;
  std::optional<DType> compute;
  std::optional<double> capacity_factor;
  bool capacity_of_tokens = false;  // CapacityRule::kTokens
};

// Adds --checkpoint, --model and the other options that choose a layer.
void add_source_options(Command& command, LayerRunOptions& options);
// Adds --tokens, --input and --balancedness.
void add_batch_options(Command& command, LayerRunOptions& options);
// Adds --backend, --ranks and the other options that tell where the layer runs.
void add_execution_options(Command& command, LayerRunOptions& options);

// Adds a command that runs a layer, whose own options are those that `add` adds to the common ones.
template <typename Options>
void add_layer_command(CommandLine& line, const char* name, const char* about,
                       void (*add)(Command&, Options&), const char* examples,
                       int (*run)(Options&)) {
  Command& command = line.add_command(name, about);
  const auto options = std::make_shared<Options>();
  add_source_options(command, *options);
  add_batch_options(command, *options);
  add_execution_options(command, *options);
  add(command, *options);
  command.footer(examples);
  command.runs([&command, options, run] {
    options->ranks_given = command.has("--ranks");
    options->seed_given = command.has("--seed");
    return run(*options);
  });
}

// Returns output_file() of an option, or an empty path if `path` is empty. Commands call this
// before a run, so that a long run does not end with an error of this kind.
std::filesystem::path place_for(const char* option, const std::string& path,
                                const LayerRunOptions& options);

struct LayerRun {
  Source source;
  Batch batch;
  std::optional<RunResult> result;  // empty in a process that is another rank than 0
};

// Runs a layer for as many passes as options.ranks says. Chooses options.ranks.backend and
// options.ranks.compute if they are not given. Throws Error for options that cannot work, if
// possible before it generates weights.
LayerRun run_layer(LayerRunOptions& options, bool show_progress);

}  // namespace switchyard::cli
