// What the ranks of a layer must agree on before any of them sends a byte.
#pragma once

#include <cstdint>

#include "fabric/fabric.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard {

struct Declaration {
  LayerSpec spec;
  std::int32_t max_tokens;
  DType compute;
};

// Collective. Throws Error{kSpecMismatch} naming the first rank and field that differ from this
// rank's, with both values.
void agree(Fabric& fabric, const Declaration& mine);

}  // namespace switchyard
