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
    : table_(table), top_k_(spec.top_k) {
  const int n = spec.intermediate * (spec.activation.gated ? 2 : 1);
  check_table(
      table, "layer",
      {layer_kernel_name(compute), kLayerKernelVersion, spec.num_experts, n, spec.hidden, num_sms});
  if (table.by_tokens && table.model.top_k != top_k_) {
    throw tuner::MismatchError(
        fmt::format("the table is of top-{}, and the layer of top-{}; tune that, or give its table",
                    table.model.top_k, top_k_),
        "top_k", fmt::format("{}", table.model.top_k), fmt::format("{}", top_k_));
  }
  CandidateMaker make(table, n, rule_);
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    schedules_.push_back(layer_schedule_of(table.entries[i].configuration));
    all_.push_back(make(i));
    if (*schedules_.back().small_tokens == 0) large_.push_back(all_.back());
  }
}

std::optional<std::size_t> LayerChoices::choose(std::int64_t tokens, int num_ranks,
                                                bool can_be_small) {
  if (table_.by_tokens) {
    const auto entry = num_ranks == 1 ? tuner::entry_for(table_, tokens) : std::nullopt;
    const bool small = entry && *schedules_[*entry].small_tokens > 0;
    return small && !can_be_small ? std::nullopt : entry;
  }
  const auto [known, is_new] = known_.try_emplace({tokens * num_ranks, can_be_small}, 0);
  if (is_new) {
    const std::vector<Candidate>& some = can_be_small || large_.empty() ? all_ : large_;
    const std::vector<std::uint32_t> rows =
        balanced_rows(table_.model.num_experts, tokens * num_ranks * top_k_);
    known->second = gpu::choose(some, rule_, rows).entry;
  }
  return known->second;
}

}  // namespace switchyard::gpu
