#include <fmt/core.h>

#include <Eigen/QR>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "base/join.h"
#include "base/plural.h"
#include "base/printable.h"
#include "switchyard/tuner.h"
#include "tuner/terms.h"

namespace switchyard::tuner {
namespace {

// A measurement that a configuration is fitted on.
struct Sample {
  Work work;
  double scale = 1;  // of the terms that belong to tasks
  double time_us = 0;
};

// Returns the samples of a configuration. For other models, terms that belong to tasks are scaled
// by the columns of K, because a task's time grows with them.
std::vector<Sample> samples_of(const Profile& profile, std::size_t model, std::size_t configuration,
                               bool from_other_models) {
  std::vector<Sample> samples;
  for (const Point& point : profile.points) {
    if (!point.fit || (point.model == model) == from_other_models) continue;
    if (point.times_us[configuration] <= 0) continue;
    const Model& its = profile.models[point.model];
    samples.push_back({work_of(profile.configurations[configuration], its.n, point.counts),
                       from_other_models ? its.k : 1.0, point.times_us[configuration]});
  }
  return samples;
}

// Marks the configurations of a model that must not be chosen: those that are pruned and, if there
// are such, those that are far from the best at every point to fit on. Pilots alone are no grid to
// fit on, and a prediction could be chosen where nothing was timed. The far ones were timed on only
// for the sake of a Prediction. A line through their times is no reason to choose them elsewhere.
std::vector<bool> left_out(const Profile& profile, std::size_t model) {
  constexpr double kFar = 1.25, kNever = std::numeric_limits<double>::infinity();
  const std::size_t count = profile.configurations.size();
  std::vector<bool> pruned(count);
  std::vector<double> least(count, kNever);  // time over the best one's, at any point to fit on
  for (const Point& point : profile.points) {
    if (point.model != model) continue;
    double best = kNever;
    for (std::size_t c = 0; c < count; ++c) {
      const double time = point.times_us[c];
      if (time == kPruned) pruned[c] = true;
      if (time > 0 && !profile.configurations[c].is_rule) best = std::min(best, time);
    }
    for (std::size_t c = 0; c < count; ++c) {
      const double time = point.times_us[c];
      if (point.fit && time > 0) least[c] = std::min(least[c], time / best);
    }
  }
  if (std::find(pruned.begin(), pruned.end(), true) == pruned.end()) return pruned;
  std::vector<bool> out(count);
  for (std::size_t c = 0; c < count; ++c) out[c] = pruned[c] || least[c] > kFar;
  return out;
}

bool is_below_a_wave(std::vector<Sample> samples, int num_sms) {
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end(),
                   [](const Sample& a, const Sample& b) { return a.work.grid < b.work.grid; });
  return middle->work.grid < num_sms;
}

Coefficients solve(const std::vector<Sample>& samples, const FitOptions& options, int num_sms) {
  const Terms terms{options.form, num_sms};
  const bool with_last =
      terms.of_experts() || (terms.may_have_log() && is_below_a_wave(samples, num_sms));
  const int rounds = terms.rounds() ? 1 : 0;
  const auto rows = static_cast<Eigen::Index>(samples.size());
  // One row for each sample: 1, waves if they are rounded, tasks, and the last term.
  Eigen::MatrixXd x(rows, 2 + rounds + (with_last ? 1 : 0));
  Eigen::VectorXd times(rows), weights(rows);
  for (Eigen::Index i = 0; i < rows; ++i) {
    const Sample& sample = samples[static_cast<std::size_t>(i)];
    times(i) = sample.time_us;
    weights(i) = options.relative ? 1 / sample.time_us : 1;
    x(i, 0) = 1;
    if (terms.rounds()) x(i, 1) = sample.scale * terms.waves(sample.work);
    x(i, 1 + rounds) = sample.scale * terms.tasks(sample.work);
    if (with_last) {
      x(i, 2 + rounds) = (terms.of_experts() ? sample.scale : 1) * terms.last(sample.work);
    }
  }
  // Columns get the same length: otherwise the rank would be a matter of units.
  const Eigen::MatrixXd weighted = weights.asDiagonal() * x;
  const Eigen::VectorXd lengths = weighted.colwise().norm().cwiseMax(1e-300);
  const Eigen::MatrixXd scaled = weighted * lengths.cwiseInverse().asDiagonal();
  // Points of too few grids cannot tell some terms apart: the solution of least norm then holds.
  const Eigen::VectorXd solution = scaled.completeOrthogonalDecomposition()
                                       .solve(weights.cwiseProduct(times))
                                       .cwiseQuotient(lengths);

  Coefficients k;
  k.a = static_cast<float>(solution(0));
  if (terms.rounds()) k.b = static_cast<float>(solution(1));
  k.c = static_cast<float>(solution(1 + rounds));
  if (with_last) k.d = static_cast<float>(solution(2 + rounds));
  k.points = static_cast<int>(samples.size());
  const Eigen::VectorXd errors = times - x * solution;
  const Eigen::VectorXd from_mean = times.array() - times.mean();
  const double total = from_mean.squaredNorm();
  k.r2 = total > 0 ? 1 - errors.squaredNorm() / total : 1;
  return k;
}

}  // namespace

Work work_of(const Configuration& configuration, int n, std::span<const std::int64_t> counts) {
  Work work;
  std::int64_t with_rows = 0;
  for (const std::int64_t count : counts) {
    if (count > 0) ++with_rows;
    work.highest = std::max(work.highest, std::min<std::int64_t>(count, configuration.token_rows));
  }
  work.grid = grid_of(configuration, n, counts);
  // One row is one tile.
  work.experts = with_rows * grid_of(configuration, n, std::array<std::int64_t, 1>{1});
  return work;
}

int fewest_points(Form form) {
  if (form == Form::kTasks) return 2;
  const Terms terms{form, 1};
  return terms.may_have_log() || terms.of_experts() ? 4 : 3;
}

Fit fit(const Profile& profile, const FitOptions& options) {
  Fit fit;
  fit.kernel = profile.kernel;
  fit.version = profile.version;
  fit.device = profile.device;
  fit.options = options;
  fit.configurations = profile.configurations;
  fit.models = profile.models;
  if (options.from_other_models && profile.models.size() < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a fit from other models needs two or more, and the profile has {}; "
                            "measure more models",
                            profile.models.size()));
  }
  const auto fewest = static_cast<std::size_t>(fewest_points(options.form));
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    std::vector<Coefficients>& of_model = fit.coefficients.emplace_back();
    const std::vector<bool> out = left_out(profile, m);
    std::size_t most = 0;
    for (std::size_t c = 0; c < profile.configurations.size(); ++c) {
      std::vector<Sample> samples = samples_of(profile, m, c, options.from_other_models);
      if (out[c]) samples.clear();
      most = std::max(most, samples.size());
      of_model.push_back(samples.size() < fewest ? Coefficients{}
                                                 : solve(samples, options, profile.device.num_sms));
      if (!options.from_other_models) continue;
      const auto columns = static_cast<float>(profile.models[m].k);  // its own
      of_model.back().b *= columns;
      of_model.back().c *= columns;
      if (Terms{options.form, 1}.of_experts()) of_model.back().d *= columns;
    }
    if (most >= fewest) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the model {} has at most {} with times of one configuration, "
                            "and the form {} has {}; go on measuring (--resume), or "
                            "leave the model out",
                            printable(profile.models[m].name), plural(most, "point"),
                            to_string(options.form), plural(fewest, "coefficient")));
  }
  return fit;
}

double predict_us(const Fit& fit, std::size_t model, std::size_t configuration,
                  std::span<const std::int64_t> counts) {
  const Coefficients& k = fit.coefficients[model][configuration];
  const Work work = work_of(fit.configurations[configuration], fit.models[model].n, counts);
  const Terms terms{fit.options.form, fit.device.num_sms};
  return k.a + k.b * terms.waves(work) + k.c * terms.tasks(work) + k.d * terms.last(work);
}

std::optional<std::size_t> select_among(const Fit& fit, std::size_t model,
                                        std::span<const std::int64_t> counts,
                                        const std::function<bool(std::size_t)>& may) {
  std::optional<std::size_t> best;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t c = 0; c < fit.configurations.size(); ++c) {
    if (fit.coefficients[model][c].points == 0 || fit.configurations[c].is_rule || !may(c)) {
      continue;
    }
    const double time = predict_us(fit, model, c, counts);
    if (!best || time < least) {
      best = c;
      least = time;
    }
  }
  return best;
}

std::size_t select(const Fit& fit, std::size_t model, std::span<const std::int64_t> counts) {
  if (model >= fit.models.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("there is no model {}; the fit has {}", model, fit.models.size()));
  }
  if (counts.size() != static_cast<std::size_t>(fit.models[model].num_experts)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("counts are of {}, and the model {} has {}", plural(counts.size(), "expert"),
                    printable(fit.models[model].name), fit.models[model].num_experts));
  }
  const auto best = select_among(fit, model, counts, [](std::size_t) { return true; });
  if (!best) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("no configuration of the model {} is fitted; measure some",
                            printable(fit.models[model].name)));
  }
  return *best;
}

std::size_t model_index(const Fit& fit, std::string_view name) {
  std::vector<std::string> names;
  for (std::size_t m = 0; m < fit.models.size(); ++m) {
    if (fit.models[m].name == name) return m;
    names.push_back(fit.models[m].name);
  }
  throw Error(ErrorCode::kInvalidArgument, fmt::format("the fit has no model '{}'; it has {}",
                                                       printable(name), join(names, ", ")));
}

}  // namespace switchyard::tuner
