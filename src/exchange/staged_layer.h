// A layer whose ranks are on several hosts and compute on devices: the exchange of the CPU engine
// between them, on copies in host memory, and kernels of one rank for the experts.
#pragma once

#include <cstdint>
#include <memory>

#include "exchange/staging.h"
#include "layer/engine.h"

namespace switchyard {

// kRank: every rank computes the routed experts that it has by itself, and a row for each slot
// crosses. kHost: the ranks of each host are a layer of their own, a token crosses once for each
// host, and a sum comes back. Ranks go on as with kRank where those of a host cannot be such a
// layer.
enum class SharedBy : std::uint8_t { kRank, kHost };

// Collective. `options` as for gpu::make_engine(). The device's kernels are those of MoeLayer and
// GroupedGemm with Backend `kernels`, which a test makes kCpu. Received rows go to the device and
// through the experts `most_rows` at a time: enough that reading weights again costs little, and an
// amount of device memory that does not grow with the world.
inline constexpr std::int64_t kMostRows = 16'384;
std::unique_ptr<LayerEngine> make_staged_layer(const World& world, const LayerSpec& spec,
                                               const MoeWeights& weights,
                                               const LayerOptions& options,
                                               std::unique_ptr<StagingDevice> device,
                                               Backend kernels = Backend::kCuda,
                                               std::int64_t most_rows = kMostRows,
                                               SharedBy shared_by = SharedBy::kRank);

}  // namespace switchyard
