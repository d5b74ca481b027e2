// Times a rank's passes on a GPU.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "switchyard/layer.h"
#include "switchyard/world.h"

namespace switchyard::run {

// Collective over the world, for a layer on the current device. `input` and `output` are in host
// memory: the input is copied to the device, and the results of the last pass are copied back. One
// untimed pass runs first. Returns the microseconds of `repeat` passes by the device's clock, with
// the L2 cache flushed before each. A rank that is `late` has each of these passes launched so long
// after the others', and no pass goes before it. Throws Error{kUnsupported} where there is no GPU,
// and whatever MoeLayer throws.
std::vector<double> time_passes_on_device(World& world, MoeLayer& layer, const ForwardInput& input,
                                          const ForwardOutput& output, int repeat,
                                          std::optional<std::chrono::microseconds> late);

}  // namespace switchyard::run
