// Sixteen fp32 lanes and the few functions that the kernels need, in the compiler's portable vector
// types: the same source becomes AVX-512, AVX2 or SSE2 code by the file's target flags.
//
// Included by kernels_impl.cpp only, inside a namespace per instruction set, so that the linker can
// never mix them.

using F16Lanes = std::uint16_t __attribute__((vector_size(32)));
using Floats = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));

constexpr int kLanes = 16;

inline Floats splat(float value) { return Floats{} + value; }

template <typename To, typename From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

inline Floats load_f32(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
inline void store_f32(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }

inline Floats load_bf16(const std::uint16_t* p) {
  F16Lanes v;
  __builtin_memcpy(&v, p, sizeof(v));
  return bits<Floats>(__builtin_convertvector(v, Words) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN.
inline F16Lanes to_bf16(Floats v) {
  const Words u = bits<Words>(v);
  const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const Words quiet = (u >> 16) | 0x40;
  return __builtin_convertvector((v == v) ? rounded : quiet, F16Lanes);
}
inline void store_bf16(std::uint16_t* p, Floats v) {
  const F16Lanes narrow = to_bf16(v);
  __builtin_memcpy(p, &narrow, sizeof(narrow));
}

inline Floats min(Floats a, Floats b) { return (a < b) ? a : b; }
inline Floats max(Floats a, Floats b) { return (a > b) ? a : b; }

// e^x by 2^n * p(r), |r| <= ln 2 / 2, p the degree-6 Taylor polynomial: relative error below 2e-7.
// Saturates outside [-87, 88]; NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats clamped =
      (x < splat(-87.0f)) ? splat(-87.0f) : ((x > splat(88.0f)) ? splat(88.0f) : x);
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = clamped * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Words exponent = (bits<Words>(shifted) - bits<Words>(magic)) << 23;
  return bits<Floats>(bits<Words>(p) + exponent);
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
inline Floats erf(Floats x) {
  const Floats a = (x < 0.0f) ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.3275911f * a);
  Floats p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats magnitude = 1.0f - p * t * exp(-a * a);
  return (x < 0.0f) ? -magnitude : magnitude;
}

// One stage of a 16 x 16 transposition: exchanges the off-diagonal blocks of size `kSpan`.
template <int kSpan, std::size_t... j>
inline void exchange(Floats& a, Floats& b, std::index_sequence<j...>) {
  const Floats upper =
      __builtin_shufflevector(a, b, ((int(j) & kSpan) == 0 ? int(j) : kLanes + int(j) - kSpan)...);
  const Floats lower =
      __builtin_shufflevector(a, b, ((int(j) & kSpan) == 0 ? int(j) + kSpan : kLanes + int(j))...);
  a = upper;
  b = lower;
}
template <int kSpan>
inline void transpose_stage(Floats (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kSpan) == 0) {
      exchange<kSpan>(rows[i], rows[i + kSpan], std::make_index_sequence<kLanes>());
    }
  }
}
inline void transpose(Floats (&rows)[kLanes]) {
  transpose_stage<8>(rows);
  transpose_stage<4>(rows);
  transpose_stage<2>(rows);
  transpose_stage<1>(rows);
}
