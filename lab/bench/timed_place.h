// Calls whose inputs and outputs are in place, and how all suites on one GPU time them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/rotation.h"
#include "switchyard/layer.h"

namespace switchyard::bench {

inline constexpr std::uint8_t kPoison = 0xff;  // NaN in every floating type
inline constexpr int kTimingWarmUps = 3;

struct TimingOptions {
  Backend backend = Backend::kCpu;
  int repeat = 0;        // timed repetitions; 0: chosen by their duration
  bool graph = true;     // kCuda: replay a graph
  bool no_graph = true;  // one call after the other
  bool cold = false;     // kCuda: each call by itself, behind a flush of the L2 cache
};

// A place on the CPU has neither graphs nor copies to rotate.
class TimedPlace {
 public:
  virtual ~TimedPlace() = default;
  virtual void poison_output() = 0;
  virtual void run_once() = 0;
  // Sets the rotation of the calls that are timed from now on.
  virtual void set_rotation(const Rotation&) {}
  // These time `repeat` repetitions and return the microseconds per call of each.
  virtual std::vector<double> time(int repeat) = 0;
  virtual std::vector<double> time_graph(int) { return {}; }
  virtual bool has_graphs() const { return false; }
  // The output of the last call.
  virtual std::vector<std::byte> output() = 0;
};

struct CallTimes {
  std::vector<double> graph_us, no_graph_us;
  Rotation rotation;
  std::vector<std::string> problems;  // outputs that have other bits than the first
};
// Times calls that read `touched_bytes`, whose output was `first` before.
CallTimes time_calls(TimedPlace& place, const TimingOptions& options, std::uint64_t touched_bytes,
                     const std::vector<std::byte>& first);

bool all_finite(const std::vector<std::byte>& output, DType dtype);

// Returns how often to repeat a measurement of `duration_us` if the user gave no number.
int default_repeats(Backend backend, double duration_us);

}  // namespace switchyard::bench
