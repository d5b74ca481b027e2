// Specs of the C interface as the C++ interface has them.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/c.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"

namespace switchyard::c_api {

// All throw Error{kInvalidArgument} for a kind that is none. The result of spec_of() passes
// require_valid().
LayerSpec spec_of(const sy_layer_spec& given);
// Like validate(), but the message names fields as callers of C and Python know them.
void require_valid(const LayerSpec& spec);
// Reads an array, whose elements are as long as its first one says.
std::vector<LayerSpec> specs_of(const sy_layer_spec* specs, std::int32_t count);
Backend backend_of(sy_device_type given);
RoutingSpec routing_of(const sy_routing& given);
Activation activation_of(const sy_activation& given);
GateOrder order_of(sy_gate_order given);
RowLayout layout_of(const sy_row_layout& given);
sy_activation to_c(const Activation& activation);

}  // namespace switchyard::c_api
