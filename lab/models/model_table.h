// The models whose MoE layers the library is built and tested for, under the names that the command
// line uses.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard {

struct ModelEntry {
  const char* name;         // "olmoe", "deepseek-v3", ...
  const char* config_json;  // the MoE-related keys of the model's config.json
  DType dtype;              // of the published experts, or the usual one to serve them in
};

const std::vector<ModelEntry>& model_table();

// Finds a model by name. Throws Error{kInvalidArgument} naming the nearest known names.
const ModelEntry& find_model(std::string_view name);

}  // namespace switchyard
