#pragma once

#include "gpu/tile/params.h"
#include "switchyard/layer_spec.h"

namespace switchyard::gpu {

ActivationForm form_of(const Activation& activation);

}  // namespace switchyard::gpu
