// Times calls that return when they are done, by the host's clock.
#pragma once

#include <chrono>
#include <vector>

namespace switchyard::bench {

// Returns the microseconds of each of `repeat` calls of run().
template <typename Run>
std::vector<double> wall_times(int repeat, Run&& run) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < repeat; ++i) {
    const Clock::time_point begin = Clock::now();
    run();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  return times;
}

}  // namespace switchyard::bench
