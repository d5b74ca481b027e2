// Where a layer and its weights come from: a checkpoint, or a model of the table with generated
// weights.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/join.h"
#include "cli/arguments.h"
#include "model/config.h"
#include "run/source.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

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

// Adds --experts, --top-k, --hidden and --intermediate.
void add_override_options(Command& command, ConfigOverrides& overrides);

// The overrides that are set, as they are given: "--experts 8".
std::vector<std::string> told_overrides(const ConfigOverrides& overrides);

// Calls `make`, and puts the overrides before what it finds wrong with the model.
template <typename Make>
auto naming_overrides(const std::string& model, const ConfigOverrides& overrides, Make make) {
  try {
    return make();
  } catch (const Error& error) {
    const std::vector<std::string> told = told_overrides(overrides);
    if (told.empty()) throw;
    throw Error(error.code(), fmt::format("{} of {}: {}", join(told, ", "), model, error.what()));
  }
}

// Loads a layer and its weights. `num_processes` processes of this host do so at the same time.
// Each of them needs its own memory for generated weights, but not for a checkpoint. Throws
// Error{kInvalidArgument} for options that contradict each other, Error{kCapacityExceeded} with the
// remedies if generated weights would not fit, and whatever Checkpoint and generate_weights throw.
Source load_source(const SourceOptions& options, int num_processes, bool show_progress);

}  // namespace switchyard::cli
