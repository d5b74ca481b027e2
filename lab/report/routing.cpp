#include "report/routing.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/plural.h"
#include "base/printable.h"

namespace switchyard::report {
namespace {

constexpr std::size_t kMostDrawn = 400;  // steps of a layer

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double four_digits(double value) { return std::stod(fmt::format("{:.4f}", value)); }

}  // namespace

std::string routing_text(const Recording& recording) {
  const std::string name =
      recording.layer.empty() ? "a layer without a name" : printable(recording.layer);
  const std::string overwritten =
      recording.overwritten == 0
          ? ""
          : fmt::format(", {} before them overwritten", recording.overwritten);
  const std::vector<double> betas = balancedness_of(recording);
  if (betas.empty()) return fmt::format("{}: no steps{}", name, overwritten);
  const auto [least, most] = std::minmax_element(betas.begin(), betas.end());
  return fmt::format("{}: {}{}; beta {:.2f} to {:.2f}, mean {:.2f}", name,
                     plural(betas.size(), "step"), overwritten, *least, *most, mean_of(betas));
}

Json routing_json(const Routing& routing) {
  Json layers = Json::array();
  for (const Recording& recording : routing.recordings.layers) {
    const std::vector<double> betas = balancedness_of(recording);
    Json steps = Json::array();
    const std::size_t count = betas.size(), drawn = std::min(count, kMostDrawn);
    for (std::size_t i = 0; i < drawn; ++i) {
      const std::size_t s = i * count / drawn;
      const RecordedStep& step = recording.steps[s];
      steps.push_back(
          {{"step", step.step},
           {"rows", std::accumulate(step.counts.begin(), step.counts.end(), std::int64_t{0})},
           {"beta", four_digits(betas[s])}});
    }
    layers.push_back({{"name", recording.layer},
                      {"experts", recording.num_experts},
                      {"top_k", recording.top_k},
                      {"text", routing_text(recording)},
                      {"steps", steps}});
  }
  return {{"file", routing.file}, {"machine", routing.recordings.machine}, {"layers", layers}};
}

}  // namespace switchyard::report
