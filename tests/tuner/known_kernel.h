// A kernel whose cost is known, with noise.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/mix64.h"
#include "switchyard/tuner.h"

namespace switchyard::tuner::test {

inline const Device kDevice{"Imagined 100, 100 SMs", 100, std::uint64_t{60} << 20};
inline const Model kSmall{"small", 32, 4, 1024, 1024};
inline const Model kTiny{"tiny", 16, 2, 256, 2048};  // never a whole wave of high tiles
inline const Model kLarge{"large", 8, 2, 8192, 4096};

// Uniform in [-1, 1), of the arguments alone.
inline double noise_of(std::size_t configuration, std::span<const std::int64_t> counts) {
  std::uint64_t key = mix64(configuration + 1);
  for (const std::int64_t count : counts) key = mix64(key ^ static_cast<std::uint64_t>(count));
  return static_cast<double>(key >> 11) * 0x1p-52 - 1;
}

// A task of `token_rows` rows takes a time that grows with them and with K, a wave of tasks takes a
// task's time, and below one wave memory limits: a log term.
inline double cost_us(const Model& model, const Configuration& c, double grid) {
  const double depth = model.k / 1024.0;
  const double task = (1 + 0.05 * c.token_rows) * depth * (c.weight_rows / 128.0);
  return 8 + task * std::ceil(grid / kDevice.num_sms) + 0.01 * task * grid;
}

struct KnownKernel {
  double noise = 0;
  double log_term = 0;
  int calls = 0;
  Kernel kernel;

  explicit KnownKernel(double its_noise = 0, double its_log_term = 0)
      : noise(its_noise), log_term(its_log_term) {
    kernel.name = "known";
    kernel.version = 3;
    for (const int token_rows : {4, 16, 64}) {
      for (const int weight_rows : {128, 256}) {
        Configuration c;
        c.name = "rows " + std::to_string(token_rows) + " x " + std::to_string(weight_rows);
        c.token_rows = token_rows;
        c.weight_rows = weight_rows;
        c.values = {{"token_rows", token_rows}};
        kernel.configurations.push_back(c);
      }
    }
    kernel.time = [this](const Model& model, std::size_t i, std::span<const std::int64_t> counts) {
      ++calls;
      const Configuration& c = kernel.configurations[i];
      const auto grid = static_cast<double>(grid_of(c, model.n, counts));
      const double time = cost_us(model, c, grid) + log_term * std::log(grid + 1);
      return Timing{time * (1 + noise * noise_of(i, counts)), noise};
    };
  }
  KnownKernel(const KnownKernel&) = delete;
  KnownKernel& operator=(const KnownKernel&) = delete;
};

inline Plan plan_of(std::vector<Model> models) {
  Plan plan;
  plan.models = std::move(models);
  plan.seed = 5;
  return plan;
}

inline Profile measured(const KnownKernel& known, const std::vector<Model>& models) {
  Profile profile = new_profile(known.kernel, kDevice, plan_of(models));
  measure(profile, known.kernel);
  return profile;
}

}  // namespace switchyard::tuner::test
