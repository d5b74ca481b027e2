#include "bench/gpu_timing.h"

#include <utility>

namespace switchyard::bench {

std::vector<double> time_on_stream(const gpu::Stream& stream, const Rotation& rotation, int repeat,
                                   const std::function<void()>& calls) {
  std::vector<std::pair<gpu::Event, gpu::Event>> events(static_cast<std::size_t>(repeat));
  for (auto& [begin, end] : events) {
    if (&begin == &events.front().first || rotation.passes == 1) gpu::flush_l2(stream);
    begin.record(stream);
    calls();
    end.record(stream);
  }
  stream.synchronize();
  std::vector<double> times;
  for (const auto& [begin, end] : events) {
    times.push_back(gpu::Event::elapsed_us(begin, end) / rotation.passes);
  }
  return times;
}

}  // namespace switchyard::bench
