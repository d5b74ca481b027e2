// FP8 activations: E4M3 codes with a scale for every 128 columns of a row. Both engines quantize
// tokens in this way for the first GEMM, and h for the second.
#pragma once

#include "base/host_device.h"

namespace switchyard {

inline constexpr int kQuantGroup = 128;         // columns that share a scale
inline constexpr float kLargestE4M3 = 448.0f;   // the code that a group's largest magnitude gets
inline constexpr float kLeastAmax = 0x1p-100f;  // keeps the inverse finite for groups of zeros

struct GroupScale {
  float scale;    // of the codes: value = code * scale
  float inverse;  // code = value * inverse, rounded to nearest even, saturating
};

// The scale of a group whose largest magnitude is `amax`; `amax` is NaN if any value is. A NaN
// makes the scale NaN and infinity makes it infinite, so that codes that cannot express them lose
// neither. Always inlined for the reason given in base/convert.h.
SWITCHYARD_HOST_DEVICE __attribute__((always_inline)) inline GroupScale group_scale(float amax) {
  const float largest = amax < kLeastAmax ? kLeastAmax : amax;
  return {largest * (1.0f / kLargestE4M3), kLargestE4M3 / largest};
}

}  // namespace switchyard
