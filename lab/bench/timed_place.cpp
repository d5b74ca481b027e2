#include "bench/timed_place.h"

#include <algorithm>
#include <cmath>

#include "base/convert.h"
#include "bench/load.h"

namespace switchyard::bench {
namespace {

constexpr int kPilotRepeats = 5;

}  // namespace

CallTimes time_calls(TimedPlace& place, const TimingOptions& options, std::uint64_t touched_bytes,
                     const std::vector<std::byte>& first) {
  CallTimes times;
  if (options.backend == Backend::kCuda && !options.cold) {
    times.rotation = choose_rotation(touched_bytes);
  }
  place.set_rotation(times.rotation);
  const double pilot = percentile(place.time(kPilotRepeats), 0.5);
  const int repeat = options.repeat > 0
                         ? options.repeat
                         : default_repeats(options.backend, pilot * times.rotation.passes);
  const auto expect_same_bits = [&](const char* whose) {
    if (place.output() == first) return;
    times.problems.push_back(std::string("its ") + whose + " output has other bits than its first");
  };
  if (options.graph && place.has_graphs()) {
    place.poison_output();
    place.time_graph(kTimingWarmUps);
    times.graph_us = place.time_graph(repeat);
    expect_same_bits("graph's");
  }
  if (options.no_graph || times.graph_us.empty()) {
    place.poison_output();
    times.no_graph_us = place.time(repeat);
    expect_same_bits("last");
  }
  return times;
}

bool all_finite(const std::vector<std::byte>& output, DType dtype) {
  if (dtype == DType::kF32) {
    const auto* values = reinterpret_cast<const float*>(output.data());
    return std::all_of(values, values + output.size() / sizeof(float),
                       [](float v) { return std::isfinite(v); });
  }
  const auto* codes = reinterpret_cast<const std::uint16_t*>(output.data());
  return std::all_of(codes, codes + output.size() / sizeof(std::uint16_t), [&](std::uint16_t c) {
    return std::isfinite(dtype == DType::kBF16 ? bf16_to_f32(c) : f16_to_f32(c));
  });
}

int default_repeats(Backend backend, double duration_us) {
  // Short measurements are repeated often, so that a percentile means something. Long ones are
  // repeated only a few times.
  const bool gpu = backend == Backend::kCuda;
  const double budget_us = gpu ? 100e3 : 1e6;
  return static_cast<int>(
      std::clamp(budget_us / std::max(duration_us, 1.0), gpu ? 12.0 : 5.0, gpu ? 200.0 : 50.0));
}

}  // namespace switchyard::bench
