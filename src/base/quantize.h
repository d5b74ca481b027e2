// FP8 activations: E4M3 codes with a scale for every 128 columns of a row, as both engines make
// them of a token on its way into the first GEMM and of h on its way into the second.
#pragma once

#include "base/host_device.h"

namespace switchyard {

inline constexpr int kQuantGroup = 128;         // columns that share a scale
inline constexpr float kLargestE4M3 = 448.0f;   // what the largest magnitude of a group becomes
inline constexpr float kLeastAmax = 0x1p-100f;  // so that groups of zeros have a finite inverse

struct GroupScale {
  float scale;    // of the codes: value = code * scale
  float inverse;  // code = value * inverse, rounded to nearest even, saturating
};

// Of a group whose largest magnitude is `amax`: NaN if any value is. The scale is then NaN too, and
// for infinity infinite, so that neither is lost in codes that cannot express it.
// Always inlined for the reason given in model/convert.h.
SWITCHYARD_HOST_DEVICE __attribute__((always_inline)) inline GroupScale group_scale(float amax) {
  const float largest = amax < kLeastAmax ? kLeastAmax : amax;
  return {largest * (1.0f / kLargestE4M3), kLargestE4M3 / largest};
}

}  // namespace switchyard
