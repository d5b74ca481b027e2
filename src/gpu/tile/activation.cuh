// The activations between an expert's two GEMMs.
#pragma once

#include "gpu/ptx/convert.cuh"
#include "gpu/tile/params.h"

namespace switchyard::gpu {

// Activations must take few instructions: every tile height has its own copy of the epilogue,
// unrolled over all accumulators, and code that does not fit the instruction cache is fetched again
// for every tile. `slope` is alpha / 2.
__device__ __forceinline__ float silu(float v, float slope) {
  const float half = 0.5f * v;
  return half * fast_tanh(slope * v) + half;
}
__device__ __forceinline__ float activate_tanh(const ActivationForm& form, float v) {
  const float square = at_most(v * v, form.most), half = 0.5f * v;
  const float u = v * ((form.third * square + form.second) * square + form.first);
  return half * fast_tanh(u) + half;
}
__device__ __forceinline__ float activate_bend(const ActivationForm& form, float v) {
  return form.bend * fast_tanh(form.first * v) * (0.5f * fast_tanh(0.5f * v) + 0.5f);
}
__device__ __forceinline__ float activate_ramp(const ActivationForm& form, float v) {
  const float r = at_least(v, form.least);
  return form.squares ? r * r : r;
}
// The up factor beside activate_bend().
__device__ __forceinline__ float bend_up(const ActivationForm& form, float limit, float up) {
  return form.second == 0 ? up : limit * fast_tanh(form.second * up);
}
// Activates sums in place. If kGated, the first kPart of every kStep sums are gate's and are
// multiplied by up's, which follow them.
template <int kPart, int kStep, bool kGated, int kCount>
__device__ __forceinline__ void activate_sums(const ActivationForm& form, float (&sums)[kCount]) {
  const auto each = [&](auto&& value) {
#pragma unroll
    for (int first = 0; first < kCount; first += kStep) {
#pragma unroll
      for (int i = first; i < first + kPart; ++i) {
        const float v = value(sums[i]);
        sums[i] = kGated ? v * sums[i + kPart] : v;
      }
    }
  };
  if (form.is_tanh) {
    each([&](float v) { return activate_tanh(form, v); });
  } else if (form.bend != 0) {
    each([&](float v) { return activate_bend(form, v); });
  } else {
    each([&](float v) { return activate_ramp(form, v); });
  }
}

// Values of h from a thread's sums. With kSilu the activation is compiled in: most models have it.
// `gate` points at a gate's sum, up's follows kPart behind it; or at up's, if not kGated.
template <bool kSilu, bool kGated, int kPart>
class HiddenValues {
 public:
  __device__ explicit HiddenValues(const ActivationForm& form) : form_(form), slope_(form.first) {}

  // Called before the first value.
  template <int kStep, int kCount>
  __device__ __forceinline__ void prepare(float (&sums)[kCount]) const {
    if constexpr (!kSilu) activate_sums<kGated ? kPart : kStep, kStep, kGated>(form_, sums);
  }
  __device__ __forceinline__ float operator()(const float* gate) const {
    if constexpr (!kSilu) return *gate;
    const float v = silu(*gate, slope_);
    return kGated ? v * gate[kPart] : v;
  }

 private:
  const ActivationForm& form_;
  const float slope_;
};

}  // namespace switchyard::gpu
