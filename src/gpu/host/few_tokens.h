// Hands passes of few tokens to their own kernel.
#pragma once

#include "gpu/host/weights.h"
#include "gpu/layer/few_tokens.h"
#include "gpu/layer/params.h"

namespace switchyard::gpu {

// Returns whether the kernel computes all that the call asks for, and whether the pass fits it.
// `call` says what the pass itself converts.
bool few_tokens_serve(const LayerParams& layer, const CallParams& call, const PolicyFacts& policy);

FewParams few_params(const LayerParams& layer, const CallParams& call, const DeviceFfn& experts,
                     const PolicyFacts& policy);

}  // namespace switchyard::gpu
