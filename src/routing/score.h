// The arithmetic of routing for one expert's logit, and the total order by which experts are
// chosen. Compiled for host and device. Everything is fp32, branch-free and without calls into a
// maths library other than sqrtf, so that loops over experts vectorise.
//
// The device gives the host's results bit for bit, so that both choose the same experts: nvcc would
// by default contract a product and a sum into one FMA, which rounds once instead of twice, so sums
// of products are spelt rounded_product() and rounded_sum() wherever that makes a difference. This
// holds for a host that does not contract either (x86-64 without -mfma, or -ffp-contract=off), and
// for device code compiled with nvcc's default -ftz=false -prec-div=true -prec-sqrt=true.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "switchyard/layer_spec.h"

namespace switchyard::routing {

SWITCHYARD_HOST_DEVICE inline std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

SWITCHYARD_HOST_DEVICE inline float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// a * b and a + b, never contracted on the device.
SWITCHYARD_HOST_DEVICE inline float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SWITCHYARD_HOST_DEVICE inline float rounded_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// a * b + c in two roundings.
SWITCHYARD_HOST_DEVICE inline float multiply_add(float a, float b, float c) {
  return rounded_sum(rounded_product(a, b), c);
}

// n / d for the divisions of the score functions, for a y in [0, 1] that is 0 or normal:
// 1 / (1 + y), y / (1 + y) or y / (2 + y), with rounded denominators.
SWITCHYARD_HOST_DEVICE inline float divide_small(float n, float d) {
#if defined(__CUDA_ARCH__)
  // The compiler's own division branches to a slow path for operands that do not occur here, and
  // branches of several experts in a row cannot overlap. Every quotient is correctly rounded even
  // if the approximation of 1 / d is 2 ulps off, because the reciprocal is rounded upwards. If it
  // were rounded to nearest, 1 / (2 - 2^-23) could go wrong. tests/gpu/route_test.cu tries every
  // operand.
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = __fmaf_ru(r, __fmaf_rn(-d, r, 1.0f), r);
  const float q = __fmul_rn(n, r);
  return __fmaf_rn(__fmaf_rn(-d, q, n), r, q);
#else
  return n / d;
#endif
}

// A number that orders as the value does, with -0 equal to +0. Greater is better; between equal
// keys the lower expert index wins. It is an integer, because a float comparison cannot rank a NaN.
using OrderKey = std::int32_t;

// The key of NaN and of experts that may not be chosen: below the key of -infinity.
inline constexpr OrderKey kNeverChosen = INT32_MIN;

SWITCHYARD_HOST_DEVICE inline OrderKey order_key(float value) {
  // Adding +0 turns -0 into +0 and changes nothing else.
  const auto bits = static_cast<std::int32_t>(bits_of(value + 0.0f));
  // Negative floats order backwards as integers: flip all but the sign.
  const OrderKey key = bits ^ ((bits >> 31) & INT32_MAX);
  return value == value ? key : kNeverChosen;
}

// The value that order_key() was made from (+0 for -0). The key must not be kNeverChosen.
SWITCHYARD_HOST_DEVICE inline float value_of(OrderKey key) {
  return float_of(static_cast<std::uint32_t>(key ^ ((key >> 31) & INT32_MAX)));
}

// e^x for x <= 0 with a relative error below 1.5 * 2^-24; 0 where the result would be subnormal
// (x < -87.33).
// x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series of e^r to r^7 leaves less than 2^-27.
SWITCHYARD_HOST_DEVICE inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  // ln 2 in two parts; the first has 9 significant bits, so that its product with n is exact.
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  // Adding 1.5 * 2^23 leaves a number's nearest integer in the low bits of the mantissa.
  constexpr float kRoundToInteger = 12582912.0f;
  const float rounded = multiply_add(x, kLog2E, kRoundToInteger);
  const float n = rounded - kRoundToInteger;
  // The first product is exact, so contracting it changes nothing.
  const float r = rounded_sum(x - n * kLn2High, -rounded_product(n, kLn2Low));
  float p = 1.0f / 5040.0f;
  p = multiply_add(p, r, 1.0f / 720.0f);
  p = multiply_add(p, r, 1.0f / 120.0f);
  p = multiply_add(p, r, 1.0f / 24.0f);
  p = multiply_add(p, r, 1.0f / 6.0f);
  p = multiply_add(p, r, 0.5f);
  p = multiply_add(rounded_product(p, r), r, r);
  const float two_to_n = float_of((bits_of(rounded) << 23) + bits_of(1.0f));
  const float result = multiply_add(p, two_to_n, two_to_n);
  return x < -87.33f ? 0.0f : result;
}

// ln(1 + y) for y in [0, 1], as 2 atanh(y / (2 + y)): the argument is at most 1/3, and the series
// to its 15th power leaves less than 2^-27.
SWITCHYARD_HOST_DEVICE inline float log_one_plus_unit(float y) {
  const float s = divide_small(y, 2.0f + y);
  const float z = s * s;
  float p = 1.0f / 15.0f;
  p = multiply_add(p, z, 1.0f / 13.0f);
  p = multiply_add(p, z, 1.0f / 11.0f);
  p = multiply_add(p, z, 1.0f / 9.0f);
  p = multiply_add(p, z, 1.0f / 7.0f);
  p = multiply_add(p, z, 1.0f / 5.0f);
  p = multiply_add(p, z, 1.0f / 3.0f);
  return 2.0f * multiply_add(s, rounded_product(z, p), s);
}

// e^(logit - max), a softmax's numerator. Equal operands give 1 even where both are infinite, which
// is the limit of the softmax: +infinity takes all the weight, and shares it evenly with its
// equals. 0 for a NaN.
SWITCHYARD_HOST_DEVICE inline float softmax_term(float logit, float max) {
  const float term = exp_nonpositive(logit == max ? 0.0f : logit - max);
  return logit == logit ? term : 0.0f;
}

SWITCHYARD_HOST_DEVICE inline float sigmoid(float logit) {
  // The exponent is never positive, so nothing overflows and small results keep full precision.
  const float e = exp_nonpositive(-std::fabs(logit));
  return divide_small(logit >= 0.0f ? 1.0f : e, 1.0f + e);
}

SWITCHYARD_HOST_DEVICE inline float sqrt_softplus(float logit) {
  const float e = exp_nonpositive(-std::fabs(logit));
  return std::sqrt((logit > 0.0f ? logit : 0.0f) + log_one_plus_unit(e));
}

// Phi-3.5's sparsemixer drops an expert from a round's softmax if its logit is further below the
// round's best, relative to max(|logit|, best), than the threshold 2 * jitter_eps. The clamp is
// against `best` itself and not |best|, as in the model's own code. 0 / 0 compares false: kept.
SWITCHYARD_HOST_DEVICE inline bool sparse_mixer_drops(float logit, float best, float threshold) {
  const float magnitude = std::fabs(logit);
  const float factor = magnitude > best ? magnitude : best;
  return (best - logit) / factor > threshold;
}

// True if choosing by logit gives the same experts. Every score function increases with the logit,
// so this holds where nothing is added to the scores. It avoids the ties that rounding makes among
// scores (a sigmoid is 1 for every logit above 17). Sums of scores have no such shortcut.
SWITCHYARD_HOST_DEVICE inline bool chooses_by_logit(const RoutingSpec& routing) {
  if (routing.top_k_before_score) return true;
  const bool sums_scores = routing.num_groups > 1 && routing.group_score == GroupScore::kSumTopTwo;
  return !routing.has_correction_bias && !sums_scores;
}

}  // namespace switchyard::routing
