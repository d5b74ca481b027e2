#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "switchyard/tuner.h"
#include "tuner/terms.h"

namespace switchyard::tuner {
namespace {

std::size_t best_of(const Profile& profile, const Point& point) {
  std::size_t best = point.times_us.size();
  for (std::size_t c = 0; c < point.times_us.size(); ++c) {
    if (point.times_us[c] <= 0 || profile.configurations[c].is_rule) continue;
    if (best == point.times_us.size() || point.times_us[c] < point.times_us[best]) best = c;
  }
  return best;
}

bool is_timed(const Point& point) {
  return std::find(point.times_us.begin(), point.times_us.end(), kNotTimed) == point.times_us.end();
}

// True if a configuration can run the call: kernels do not choose one that cannot.
bool runs(const Point& point, std::size_t configuration) {
  return point.times_us[configuration] > 0;
}

double distance(int a, int b) { return std::abs(std::log(static_cast<double>(a) / b)); }

// Returns the time of the best configuration at the nearest number of tokens with beta 1. `coarse`:
// only every second number of tokens is known.
std::optional<double> static_time(const Profile& profile, const Point& at, bool coarse) {
  std::set<int> known;
  for (const Point& point : profile.points) {
    if (point.model == at.model && point.beta == 1 && is_timed(point)) known.insert(point.tokens);
  }
  int nearest = 0, index = 0;
  for (const int tokens : known) {
    if (coarse && index++ % 2 != 0) continue;
    // If two are equally near, the smaller one wins.
    if (nearest == 0 || distance(tokens, at.tokens) < distance(nearest, at.tokens)) {
      nearest = tokens;
    }
  }
  for (const Point& point : profile.points) {
    if (point.model != at.model || point.beta != 1 || point.tokens != nearest) continue;
    if (!is_timed(point)) continue;
    const std::size_t best = best_of(profile, point);
    if (best < at.times_us.size() && at.times_us[best] > 0) return at.times_us[best];
  }
  return {};
}

}  // namespace

std::vector<Outcome> evaluate(const Profile& profile, const Fit& fit) {
  std::vector<Outcome> outcomes;
  for (std::size_t p = 0; p < profile.points.size(); ++p) {
    const Point& point = profile.points[p];
    if (!point.test || !is_timed(point)) continue;
    Outcome outcome;
    outcome.point = p;
    outcome.best = best_of(profile, point);
    if (outcome.best == point.times_us.size()) continue;  // nothing can run it
    const auto chosen = select_among(fit, model_index(fit, profile.models[point.model].name),
                                     point.counts, [&](std::size_t c) { return runs(point, c); });
    if (!chosen) continue;
    outcome.chosen = *chosen;
    outcome.exhaustive_us = point.times_us[outcome.best];
    outcome.chosen_us = point.times_us[outcome.chosen];
    outcome.predicted_us = predict_us(fit, point.model, outcome.chosen, point.counts);
    outcome.static_us = static_time(profile, point, false);
    outcome.coarse_static_us = static_time(profile, point, true);
    for (std::size_t c = 0; c < point.times_us.size(); ++c) {
      if (profile.configurations[c].is_rule && point.times_us[c] > 0) {
        outcome.rule_us = point.times_us[c];
      }
    }
    outcomes.push_back(outcome);
  }
  return outcomes;
}

}  // namespace switchyard::tuner
