// Where a layer and its weights come from: a checkpoint, or a model of the table with weights made
// up for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/arguments.h"
#include "model/config.h"
#include "run/source.h"

namespace switchyard::cli {

using run::Source;

struct SourceOptions {
  std::string checkpoint;
  std::string model;
  int layer = -1;  // -1: the first MoE layer
  ConfigOverrides overrides;
  std::optional<DType> dtype;
  std::uint64_t seed = 0;
};

// --experts, --top-k, --hidden, --intermediate.
void add_override_options(Command& command, ConfigOverrides& overrides);

// `num_processes` processes of this host load the same source at the same time, each into memory of
// its own unless it is a checkpoint. Throws Error{kInvalidArgument} for options that contradict
// each other, kCapacityExceeded with the remedies if generated weights would not fit, and whatever
// Checkpoint and generate_weights throw.
Source load_source(const SourceOptions& options, int num_processes, bool show_progress);

}  // namespace switchyard::cli
