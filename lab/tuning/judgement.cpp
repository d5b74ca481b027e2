#include "tuning/judgement.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace switchyard::tuner {

double r_squared(const Profile& profile, const Fit& fit, std::size_t model, bool of_logarithms) {
  std::vector<double> times, errors;
  for (const Point& point : profile.points) {
    if (!point.fit || point.model != model) continue;
    for (std::size_t c = 0; c < point.times_us.size(); ++c) {
      if (point.times_us[c] <= 0 || fit.coefficients[model][c].points == 0) continue;
      const double predicted = predict_us(fit, model, c, point.counts);
      if (of_logarithms) {
        times.push_back(std::log(point.times_us[c]));
        errors.push_back(times.back() - std::log(std::max(predicted, 1e-3)));
      } else {
        times.push_back(point.times_us[c]);
        errors.push_back(times.back() - predicted);
      }
    }
  }
  double mean = 0, total = 0, residual = 0;
  for (const double time : times) mean += time / static_cast<double>(times.size());
  for (std::size_t i = 0; i < times.size(); ++i) {
    total += (times[i] - mean) * (times[i] - mean);
    residual += errors[i] * errors[i];
  }
  return total > 0 ? 1 - residual / total : 1;
}

Regret regret_of(std::span<const Outcome> outcomes) {
  Regret regret;
  regret.points = outcomes.size();
  if (outcomes.empty()) return regret;
  const auto count = static_cast<double>(outcomes.size());
  for (const Outcome& outcome : outcomes) {
    regret.mean += outcome.regret() / count;
    regret.max = std::max(regret.max, outcome.regret());
  }
  if (outcomes.size() < 2) return regret;
  double squares = 0;
  for (const Outcome& outcome : outcomes) {
    squares += (outcome.regret() - regret.mean) * (outcome.regret() - regret.mean);
  }
  regret.standard_error = std::sqrt(squares / (count - 1) / count);
  return regret;
}

std::optional<double> speed_up(std::span<const Outcome> outcomes,
                               std::optional<double> Outcome::*before) {
  double sum = 0;
  std::size_t points = 0;
  for (const Outcome& outcome : outcomes) {
    if (!(outcome.*before)) continue;
    sum += std::log(*(outcome.*before) / outcome.chosen_us);
    ++points;
  }
  if (points == 0) return {};
  return std::exp(sum / static_cast<double>(points));
}

}  // namespace switchyard::tuner
