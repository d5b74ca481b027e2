// Hands passes of few tokens to their own kernel.
#pragma once

#include "gpu/host/weights.h"
#include "gpu/layer/few_tokens.h"
#include "gpu/layer/params.h"

namespace switchyard::gpu {

// Returns whether the kernel is for such a layer, and whether passes of so many tokens fit it. Over
// ranks it is the same on all of them. `rows_per_rank`: the tokens or, over ranks, the most that
// any rank has.
bool few_tokens_serve(const LayerParams& layer, const PolicyFacts& policy,
                      std::int64_t rows_per_rank);
// Returns whether the kernel computes what the call asks for. `call` says what the pass converts.
bool few_tokens_take(const LayerParams& layer, const CallParams& call);

FewParams few_params(const LayerParams& layer, const CallParams& call, const DeviceFfn& experts,
                     const PolicyFacts& policy, std::int64_t rows_per_rank);

}  // namespace switchyard::gpu
