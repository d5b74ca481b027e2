// Specs of the C interface as the C++ interface has them. They are checked by validate().
#pragma once

#include "switchyard/c.h"
#include "switchyard/layer_spec.h"

namespace switchyard::c_api {

// Throws Error{kInvalidArgument} for a kind that is none.
LayerSpec spec_of(const sy_layer_spec& given);
RoutingSpec routing_of(const sy_routing& given);
sy_activation to_c(const Activation& activation);

}  // namespace switchyard::c_api
