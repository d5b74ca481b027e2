// What the commands that run a layer over ranks have in common: their options, and what comes of
// them.
#pragma once

#include <filesystem>
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
  bool ranks_given = false;
  std::optional<Backend> backend;
  std::optional<DType> compute;
  std::optional<double> capacity_factor;
};

// --checkpoint, --model and what else makes a layer.
void add_source_options(Command& command, LayerRunOptions& options);
// --tokens, --input, --balancedness.
void add_batch_options(Command& command, LayerRunOptions& options);
// --backend, --ranks and what else tells where it runs.
void add_execution_options(Command& command, LayerRunOptions& options);

// output_file() of an option, empty if there is none. A long run should not end with this.
std::filesystem::path place_for(const char* option, const std::string& path,
                                const LayerRunOptions& options);

struct LayerRun {
  Source source;
  Batch batch;
  std::optional<RunResult> result;  // none on ranks other than 0, if they are processes
};

// As many passes as options.ranks says. Chooses options.ranks.backend and compute where they are
// not given. Throws Error for what cannot be, before weights are made up for it where possible.
LayerRun run_layer(LayerRunOptions& options, bool show_progress);

}  // namespace switchyard::cli
