// The choice of a kernel's configurations on the page: a profile, and the judgement of its fit.
#pragma once

#include <filesystem>
#include <string>

#include "base/json.h"
#include "tuning/regions.h"

namespace switchyard::report {

struct Tuning {
  tuner::Profile profile;  // of models that are timed completely
  tuner::Fit fit;
  tuner::DeviceConstants constants;
  int element_bytes = 1;
  std::string file;  // the name that the page shows
};

// Reads a profile and fits it with the default form. Throws what read_profile() and fit() throw,
// and Error{kInvalidArgument} if no model is timed completely.
Tuning read_tuning(const std::filesystem::path& path, const std::string& name);

// Returns the data that the page's script draws.
Json tuning_json(const Tuning& tuning);

}  // namespace switchyard::report
