#include "gpu/host/layer_choices.h"

#include <fmt/core.h>

#include <limits>

#include "base/printable.h"
#include "gpu/host/grouped_choices.h"
#include "switchyard/error.h"
#include "switchyard/layer.h"

namespace switchyard::gpu {

Schedule layer_schedule_of(const tuner::Configuration& configuration) {
  Schedule schedule;
  for (const auto& [name, value] : configuration.values) {
    const auto whole = static_cast<int>(value);
    if (whole != value) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the configuration '{}' has {} {}; use a whole number of 32 bits",
                              printable(configuration.name), printable(name), value));
    }
    if (name == "small_tokens") {
      schedule.small_tokens = whole;
    } else if (name == "paired_rows") {
      schedule.paired_rows = whole;
    } else if (name == "lag") {
      schedule.lag = whole;
    } else if (name == "band") {
      schedule.band = whole;
    } else if (name == "splits") {
      schedule.splits = whole;
    } else {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the configuration '{}' has a value {}, which no layer has; use "
                              "small_tokens, paired_rows, lag, band and splits",
                              printable(configuration.name), printable(name)));
    }
  }
  if (!schedule.small_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the configuration '{}' tells no small_tokens; a layer's has some",
                            printable(configuration.name)));
  }
  return schedule;
}

LayerChoices::LayerChoices(const tuner::Table& table, const LayerSpec& spec, DType compute,
                           int num_sms)
    : num_experts_(spec.num_experts), top_k_(spec.top_k) {
  const int n = spec.intermediate * (spec.activation.gated ? 2 : 1);
  check_table(
      table, "layer",
      {layer_kernel_name(compute), kLayerKernelVersion, spec.num_experts, n, spec.hidden, num_sms});
  CandidateMaker make(table, n, rule_);
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    schedules_.push_back(layer_schedule_of(table.entries[i].configuration));
    all_.push_back(make(i));
    if (*schedules_.back().small_tokens == 0) large_.push_back(all_.back());
  }
}

std::size_t LayerChoices::choose(std::int64_t tokens, bool can_be_small) {
  const auto [known, is_new] = known_.try_emplace({tokens, can_be_small}, 0);
  if (is_new) {
    const std::vector<Candidate>& some = can_be_small || large_.empty() ? all_ : large_;
    known->second = gpu::choose(some, rule_, balanced_rows(num_experts_, tokens * top_k_)).entry;
  }
  return known->second;
}

}  // namespace switchyard::gpu
