// A layer whose shared expert is a layer of its own, of one rank, beside that of the routed
// experts: for engines that multiply all experts of a layer in one type.
#pragma once

#include <functional>
#include <memory>

#include "layer/engine.h"

namespace switchyard {

// The spec of a layer of so many of a layer's FFNs, one for each token, whose caller routes.
LayerSpec spec_of_networks(const LayerSpec& spec, int networks, int intermediate, bool biased);
// A layer's shared expert as the only one of another layer.
MoeWeights only_shared(const MoeWeights& all);

// The routing of tokens to no expert, ids of kNoExpert and weights, where the engine reads it.
struct NoRouting {
  std::shared_ptr<const void> ids, weights;  // [max_tokens], i32 and f32
};

using EngineMaker =
    std::function<std::unique_ptr<LayerEngine>(const World&, const LayerSpec&, const MoeWeights&,
                                               const LayerOptions&, std::shared_ptr<PassMemory>)>;

// Makes both layers with `make`, and is called as it is. The layer of the shared expert has memory
// of its own.
std::unique_ptr<LayerEngine> make_shared_beside(const World& world, const LayerSpec& spec,
                                                const MoeWeights& weights,
                                                const LayerOptions& options,
                                                std::shared_ptr<PassMemory> memory,
                                                const EngineMaker& make,
                                                const std::function<NoRouting()>& no_routing);

}  // namespace switchyard
