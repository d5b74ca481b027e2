// The activations between an expert's two GEMMs.
#pragma once

#include "gpu/ptx/convert.cuh"
#include "switchyard/layer_spec.h"

namespace switchyard::gpu {

// Most activations are v (1 + tanh(u)) / 2 for some u. They must take few instructions: every tile
// height has its own copy of the epilogue, unrolled over all accumulators, and code that does not
// fit the instruction cache is fetched again for every tile. `slope` is alpha / 2.
template <ActivationKind kKind>
__device__ __forceinline__ float activate(float v, float slope) {
  const float half = 0.5f * v;
  if constexpr (kKind == ActivationKind::kSilu) {
    return half * fast_tanh(slope * v) + half;
  } else if constexpr (kKind == ActivationKind::kGelu) {
    // A minimax fit for v^2 up to 20: the result is within 2.5e-5, with an exact tanh.
    const float square = at_most(v * v, 20.0f);
    const float u = v * ((-3.51516815e-4f * square + 3.70056462e-2f) * square + 0.797507884f);
    return half * fast_tanh(u) + half;
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    return half * fast_tanh(v * (0.035677408f * v * v + 0.79788456f)) + half;
  } else if constexpr (kKind == ActivationKind::kRelu) {
    return at_least(v, 0.0f);
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    const float r = at_least(v, 0.0f);
    return r * r;
  } else {
    return v;
  }
}

}  // namespace switchyard::gpu
