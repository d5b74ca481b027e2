// The terms of the cost model.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "switchyard/tuner.h"

namespace switchyard::tuner {

// The work that a configuration has with a histogram.
struct Work {
  std::int64_t grid = 0;     // g: see grid_of()
  std::int64_t experts = 0;  // e: the grid if the rows of every expert were one tile
  std::int64_t highest = 0;  // h: rows of the highest tile
};
Work work_of(const Configuration& configuration, int n, std::span<const std::int64_t> counts);

struct Terms {
  Form form;
  int num_sms;

  bool of_experts() const { return form == Form::kExperts; }
  bool rounds() const { return rounds_waves(form); }
  bool may_have_log() const { return form == Form::kFull || form == Form::kRoundedFull; }
  // The regressor of b. Unrounded waves would only be c's again, in other units, so b stays 0 (see
  // Form).
  double waves(const Work& work) const {
    return rounds() ? std::ceil(static_cast<double>(work.grid) / num_sms) : 0;
  }
  // The regressor of c.
  double tasks(const Work& work) const {
    return static_cast<double>(of_experts() ? work.experts : work.grid);
  }
  // The regressor of d.
  double last(const Work& work) const {
    return of_experts() ? static_cast<double>(work.highest)
                        : std::log(static_cast<double>(work.grid) + 1);
  }
};

// Returns the configuration with the least predicted time of those that may be chosen, if there is
// one.
std::optional<std::size_t> select_among(const Fit& fit, std::size_t model,
                                        std::span<const std::int64_t> counts,
                                        const std::function<bool(std::size_t configuration)>& may);

}  // namespace switchyard::tuner
