#pragma once

#include "gpu/tile/params.h"
#include "switchyard/layer_spec.h"

namespace switchyard::gpu {

// The activation, which has passed validate(), in the numbers that kernels compute it with.
ActivationForm form_of(const Activation& activation);

}  // namespace switchyard::gpu
