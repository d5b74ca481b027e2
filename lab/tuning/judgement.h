// Summaries of a fit's choices, over the points that evaluate() judges.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "switchyard/tuner.h"

namespace switchyard::tuner {

// R squared: 1 - residual / total sum of squares, over all of a model's times that were fitted on.
// With `of_logarithms` over their logarithms, since configurations differ by orders of magnitude.
double r_squared(const Profile& profile, const Fit& fit, std::size_t model,
                 bool of_logarithms = false);

struct Regret {
  std::size_t points = 0;
  double mean = 0, standard_error = 0, max = 0;  // shares: 0.01 is 1 %
};
Regret regret_of(std::span<const Outcome> outcomes);
// The geometric mean of another way's time over that of the cost model's choice. None if no outcome
// has that time.
std::optional<double> speed_up(std::span<const Outcome> outcomes,
                               std::optional<double> Outcome::*before);

}  // namespace switchyard::tuner
