// A layer whose ranks are on several hosts and compute on devices: the gate and the shared expert
// of one rank, and the experts of the hosts' layers (host_experts.h).
#pragma once

#include <cstdint>
#include <memory>

#include "exchange/staging.h"
#include "layer/engine.h"

namespace switchyard {

// Collective. `options` as for gpu::make_engine(). The device's kernels are those of MoeLayer and
// GroupedGemm with Backend `kernels`, which a test makes kCpu. Rows go through the experts
// `most_rows` at a time: enough that reading weights again costs little, and an amount of device
// memory that does not grow with the world.
inline constexpr std::int64_t kMostRowsAtATime = 16'384;
std::unique_ptr<LayerEngine> make_staged_layer(const World& world, const LayerSpec& spec,
                                               const MoeWeights& weights,
                                               const LayerOptions& options,
                                               std::unique_ptr<StagingDevice> device,
                                               Backend kernels = Backend::kCuda,
                                               std::int64_t most_rows = kMostRowsAtATime);

}  // namespace switchyard
