#include "tuning/regions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace switchyard::tuner {
namespace {

// A quotient of measured times may miss a threshold that is a whole number by a rounding.
constexpr double kSlack = 1e-9;

bool has(const Configuration& c, Prediction prediction, int narrow_rows) {
  switch (prediction) {
    case Prediction::kSplitK: return c.splits > 1;
    case Prediction::kGroupM: return c.group_m > 1;
    case Prediction::kWideTiles: break;
  }
  return c.weight_rows > narrow_rows;
}

}  // namespace

Thresholds thresholds_of(const DeviceConstants& device, int element_bytes, int splits) {
  const double numbers[] = {device.block_start_us, device.tile_us, device.split_us, device.l2_share,
                            static_cast<double>(device.l2_bytes)};
  for (const double number : numbers) {
    if (number > 0 && std::isfinite(number)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "a device's constant is not above 0; measure the start of a lone block, the time "
                "per tile, the cost of splitting K and the L2 cache");
  }
  if (element_bytes < 1 || splits < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                "elements have at least 1 byte, and K is split into at least 2 parts");
  }
  Thresholds t;
  t.rho = device.block_start_us / device.tile_us;
  t.lambda_kappa = device.l2_share * static_cast<double>(device.l2_bytes) /
                   (static_cast<double>(kReferenceRows) * kTileColumns * element_bytes);
  t.kappa = device.split_us / (device.tile_us * (1 - 1.0 / splits));
  t.split_omega = 1.0 / (splits + 1);
  return t;
}

std::optional<DeviceConstants> measured_constants(const Profile& profile,
                                                  const DeviceConstants& others) {
  // Finds the reference among the kernel's own configurations.
  const auto distance = [](const Configuration& c) {
    return std::pair(std::abs(std::log2(static_cast<double>(c.weight_rows) / kReferenceRows)),
                     c.token_rows);
  };
  std::optional<std::size_t> reference;
  for (std::size_t c = 0; c < profile.configurations.size(); ++c) {
    const Configuration& its = profile.configurations[c];
    if (its.is_rule || its.splits > 1 || its.blocks > 1) continue;
    if (!reference || distance(its) < distance(profile.configurations[*reference])) reference = c;
  }
  if (!reference) return {};
  const Configuration& its = profile.configurations[*reference];
  struct Sample {
    double kappa, time_us;
    const Point* point;
  };
  std::vector<Sample> samples;
  for (const Point& point : profile.points) {
    const Model& model = profile.models[point.model];
    // Any configuration of this width and without splits will do: their differences cost a lone
    // wave little.
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t c = 0; c < point.times_us.size(); ++c) {
      const Configuration& other = profile.configurations[c];
      if (other.is_rule || other.splits > 1 || other.weight_rows != its.weight_rows) continue;
      if (point.times_us[c] > 0) least = std::min(least, point.times_us[c]);
    }
    const RegionVariables v = region_variables(model, its, point.counts, profile.device.num_sms);
    if (!point.fit || v.omega > 1 || !std::isfinite(least)) continue;
    samples.push_back({v.kappa, least, &point});
  }
  // Weights of 1 / time^2 make errors relative to times.
  double w = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const Sample& s : samples) {
    const double weight = 1 / (s.time_us * s.time_us);
    w += weight;
    x += weight * s.kappa;
    y += weight * s.time_us;
    xx += weight * s.kappa * s.kappa;
    xy += weight * s.kappa * s.time_us;
  }
  const double determinant = w * xx - x * x;
  if (samples.size() < 2 || determinant <= 1e-9 * w * xx) return {};
  const double slope = (w * xy - x * y) / determinant, start = (y - slope * x) / w;
  if (!(slope > 0) || !(start > 0)) return {};
  DeviceConstants constants = others;
  constants.num_sms = profile.device.num_sms;
  if (profile.device.l2_bytes > 0) constants.l2_bytes = profile.device.l2_bytes;
  constants.block_start_us = start;
  constants.tile_us = slope * kReferenceRows / its.weight_rows;
  double lost = 0;
  std::size_t split = 0;
  for (const Sample& s : samples) {
    double least = std::numeric_limits<double>::infinity();
    int splits = 1;
    for (std::size_t c = 0; c < s.point->times_us.size(); ++c) {
      const Configuration& other = profile.configurations[c];
      if (other.is_rule || other.splits <= 1 || other.weight_rows != its.weight_rows) continue;
      if (s.point->times_us[c] <= 0 || s.point->times_us[c] >= least) continue;
      least = s.point->times_us[c];
      splits = other.splits;
    }
    if (splits == 1) continue;
    const double saved = s.kappa * slope * (1 - 1.0 / splits);
    lost += saved - (s.time_us - least);
    ++split;
  }
  if (split > 0 && lost > 0) constants.split_us = lost / static_cast<double>(split);
  return constants;
}

RegionVariables region_variables(const Model& model, const Configuration& configuration,
                                 std::span<const std::int64_t> counts, int num_sms) {
  RegionVariables v;
  v.kappa = static_cast<double>(model.k) / kTileColumns;
  v.lambda = (model.n + configuration.weight_rows - 1) / configuration.weight_rows;
  v.rho = static_cast<double>(model.n) * model.k /
          (static_cast<double>(configuration.weight_rows) * kTileColumns);
  Configuration whole = configuration;
  whole.splits = 1;
  v.omega = static_cast<double>(grid_of(whole, model.n, counts)) / num_sms;
  return v;
}

Region region_of(const RegionVariables& v, const Thresholds& t) {
  const int wave = v.omega < 1 ? 0 : v.omega <= 8 ? 1 : 2;
  return static_cast<Region>((v.rho < t.rho ? 0 : 3) + wave);
}

bool split_k_helps(const RegionVariables& v, const Thresholds& t) {
  return v.kappa >= t.kappa - kSlack && v.omega < t.split_omega;
}
bool group_m_helps(const RegionVariables& v, const Thresholds& t) {
  return v.lambda * v.kappa > t.lambda_kappa;
}
bool wide_tiles_help(const RegionVariables& v, const Thresholds& t) {
  return v.omega > t.wide_omega;
}

std::vector<Finding> findings(const Profile& profile, const DeviceConstants& device,
                              int element_bytes, int token_rows) {
  const Thresholds thresholds = thresholds_of(device, element_bytes);
  Configuration reference;
  reference.token_rows = token_rows;
  reference.weight_rows = kReferenceRows;
  int narrow_rows = std::numeric_limits<int>::max();
  for (const Configuration& c : profile.configurations) {
    if (!c.is_rule) narrow_rows = std::min(narrow_rows, c.weight_rows);
  }
  std::vector<Finding> found;
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    for (const Prediction prediction : kPredictions) {
      Finding of[2];  // predicted not to help, and to help
      double logarithms[2] = {};
      for (const Point& point : profile.points) {
        if (point.model != m) continue;
        constexpr double kNone = std::numeric_limits<double>::infinity();
        double best[2] = {kNone, kNone};  // without, with
        for (std::size_t c = 0; c < point.times_us.size(); ++c) {
          const Configuration& configuration = profile.configurations[c];
          if (point.times_us[c] <= 0 || configuration.is_rule) continue;
          double& least = best[has(configuration, prediction, narrow_rows) ? 1 : 0];
          least = std::min(least, point.times_us[c]);
        }
        if (best[0] == kNone || best[1] == kNone) continue;
        const RegionVariables v =
            region_variables(profile.models[m], reference, point.counts, device.num_sms);
        const bool predicted = prediction == Prediction::kSplitK   ? split_k_helps(v, thresholds)
                               : prediction == Prediction::kGroupM ? group_m_helps(v, thresholds)
                                                                   : wide_tiles_help(v, thresholds);
        ++of[predicted ? 1 : 0].points;
        logarithms[predicted ? 1 : 0] += std::log(best[0] / best[1]);
      }
      for (const bool predicted : {false, true}) {
        Finding& finding = of[predicted ? 1 : 0];
        if (finding.points == 0) continue;
        finding.model = m;
        finding.prediction = prediction;
        finding.predicted = predicted;
        finding.measured_ratio =
            std::exp(logarithms[predicted ? 1 : 0] / static_cast<double>(finding.points));
        found.push_back(finding);
      }
    }
  }
  return found;
}

const char* to_string(Region region) {
  constexpr std::array kNames{"A1", "A2", "A3", "B1", "B2", "B3"};
  return kNames[static_cast<std::size_t>(region)];
}

const char* to_string(Prediction prediction) {
  constexpr std::array kNames{"split_k", "group_m", "wide_tiles"};
  return kNames[static_cast<std::size_t>(prediction)];
}

}  // namespace switchyard::tuner
