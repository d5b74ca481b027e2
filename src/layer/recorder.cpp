#include "layer/recorder.h"

#include <algorithm>

namespace switchyard {

Recording empty_recording(const LayerSpec& spec, const LayerOptions& options, const World& world) {
  Recording recording;
  recording.layer = options.diagnostics.name;
  recording.rank = world.rank();
  recording.num_ranks = world.size();
  recording.num_experts = spec.num_experts;
  recording.top_k = spec.top_k;
  recording.n = spec.intermediate * (spec.activation.gated ? 2 : 1);
  recording.k = spec.hidden;
  return recording;
}

void read_ring(const protocol::RoutingRing& ring,
               const std::function<int(std::uint64_t step, int place)>& expert_of,
               Recording& recording) {
  const std::uint64_t steps = *ring.words;
  recording.overwritten = steps - std::min<std::uint64_t>(steps, ring.slots);
  for (std::uint64_t step = recording.overwritten; step < steps; ++step) {
    std::uint64_t* const slot = ring.slot(step);
    const std::uint32_t* const rows = protocol::RoutingRing::rows(slot);
    RecordedStep recorded{step, slot[0], static_cast<std::int64_t>(slot[1]), {}};
    recorded.counts.resize(static_cast<std::size_t>(recording.num_experts));
    for (std::uint32_t p = 0; p < ring.experts; ++p) {
      const int expert = expert_of(step, static_cast<int>(p));
      recorded.counts[static_cast<std::size_t>(expert)] += rows[p];
    }
    recording.steps.push_back(std::move(recorded));
  }
}

void record_step(const protocol::RoutingRing& ring, std::uint64_t epoch, std::int64_t tokens,
                 std::span<const std::int64_t> rows) {
  std::uint64_t* const slot = ring.slot(*ring.words);
  slot[0] = epoch;
  slot[1] = static_cast<std::uint64_t>(tokens);
  std::transform(rows.begin(), rows.end(), protocol::RoutingRing::rows(slot),
                 [](std::int64_t count) { return static_cast<std::uint32_t>(count); });
  ++*ring.words;
}

}  // namespace switchyard
