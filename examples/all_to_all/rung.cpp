#include "all_to_all/rung.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/join.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::all_to_all {
namespace {

struct Step {
  const char* name;
  bool Features::*feature;
};
constexpr Step kSteps[] = {{"flag_per_token", &Features::flag_per_token},
                           {"fused", &Features::fused},
                           {"epochs", &Features::epochs},
                           {"flattened", &Features::flattened},
                           {"tuned", &Features::tuned}};

}  // namespace

const std::vector<Rung>& ladder() {
  static const std::vector<Rung> rungs = [] {
    std::vector<Rung> made(2);
    made[0].name = "host";
    made[0].features.host = true;
    made[1].name = "flag_per_rank";
    Features features;
    for (const Step& step : kSteps) {
      features.*step.feature = true;
      made.push_back({step.name, features});
    }
    return made;
  }();
  return rungs;
}

const std::vector<Rung>& steps_alone() {
  static const std::vector<Rung> rungs = [] {
    std::vector<Rung> made;
    for (const Step& step : kSteps) {
      Features features;
      features.*step.feature = true;
      made.push_back({std::string(step.name) + "_alone", features});
    }
    return made;
  }();
  return rungs;
}

std::vector<Rung> find_rungs(std::string_view names) {
  if (names == "all") return ladder();
  std::vector<Rung> known = ladder();
  known.insert(known.end(), steps_alone().begin(), steps_alone().end());
  if (names == "alone") {
    std::vector<Rung> rungs = {ladder()[1]};
    rungs.insert(rungs.end(), steps_alone().begin(), steps_alone().end());
    return rungs;
  }
  std::vector<Rung> rungs;
  while (true) {
    const std::size_t comma = names.find(',');
    const std::string_view name = names.substr(0, comma);
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const Rung& rung) { return rung.name == name; });
    if (found == known.end()) {
      std::vector<std::string> all = {"all", "alone"};
      for (const Rung& rung : known) all.push_back(rung.name);
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is no rung; use one of {}", printable(std::string(name)),
                              join(all, ", ")));
    }
    rungs.push_back(*found);
    if (comma == std::string_view::npos) return rungs;
    names.remove_prefix(comma + 1);
  }
}

const char* to_string(Stage stage) {
  switch (stage) {
    case Stage::kDispatchSend: return "dispatch send";
    case Stage::kDispatchReceive: return "dispatch receive";
    case Stage::kExperts: return "experts";
    case Stage::kCombineSend: return "combine send";
    case Stage::kCombineReceive: return "combine receive";
  }
  return "unknown";
}

}  // namespace switchyard::all_to_all
