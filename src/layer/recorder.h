// The recordings that both engines make of a ring of routings.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "protocol/recorder.h"
#include "switchyard/layer.h"
#include "switchyard/recording.h"

namespace switchyard {

// The most steps that a layer keeps: those of a day at a hundred a second would not fit either.
inline constexpr int kMostRecordedSteps = 1 << 20;

// A recording without steps, of a layer on this rank.
Recording empty_recording(const LayerSpec& spec, const LayerOptions& options, const World& world);

// Adds what the ring has, which the host can read. `expert_of(step, place)` tells the expert that
// had a place in a step.
void read_ring(const protocol::RoutingRing& ring,
               const std::function<int(std::uint64_t step, int place)>& expert_of,
               Recording& recording);

// Records a step in a ring of the host's. `rows`: of each expert.
void record_step(const protocol::RoutingRing& ring, std::uint64_t epoch, std::int64_t tokens,
                 std::span<const std::int64_t> rows);

}  // namespace switchyard
