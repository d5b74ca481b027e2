#pragma once

#include "gpu/tile/params.h"
#include "switchyard/layer_spec.h"

namespace switchyard::gpu {

// Throws Error{kUnsupported} for kSitu.
ActivationForm form_of(const Activation& activation);

}  // namespace switchyard::gpu
