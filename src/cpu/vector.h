// A register of fp32 lanes and the few functions that the kernels need, in the compiler's portable
// vector types: the same source becomes AVX-512, AVX2 or SSE2 code by the file's target flags.
//
// Included by kernels_impl.cpp only, inside a namespace per instruction set, so that the linker can
// never mix them.

// The lanes of a vector are those of the target's registers: the compiler splits wider vectors lane
// by lane.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Bytes = std::uint8_t __attribute__((vector_size(kLanes)));
using F16Lanes = std::uint16_t __attribute__((vector_size(kLanes * 2)));
using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = std::int32_t __attribute__((vector_size(kLanes * 4)));
using Words = std::uint32_t __attribute__((vector_size(kLanes * 4)));

inline Floats splat(float value) { return Floats{} + value; }

// a * b + c, rounded once. Written out, because compilers fuse in one version and not in the next,
// and sums are to have the bits that they have on GPUs. Without FMA instructions the product is
// exact and the sum is rounded twice, which hardly ever shows.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  using Doubles = double __attribute__((vector_size(kLanes * 8)));
  return __builtin_convertvector(
      __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles) +
          __builtin_convertvector(c, Doubles),
      Floats);
#endif
}

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

// IEEE fp16 of normal and subnormal values, infinities and NaN: the exponent is re-based by a
// multiplication, which also normalises subnormals.
inline Floats load_f16(const std::uint16_t* p) {
  F16Lanes v;
  __builtin_memcpy(&v, p, sizeof(v));
  const Words code = __builtin_convertvector(v, Words);
  const Words sign = (code & 0x8000) << 16;
  const Words magnitude = (code & 0x7fff) << 13;
  const Words finite = bits<Words>(bits<Floats>(magnitude) * 0x1p112f);
  const Words special = magnitude | 0x7f800000;
  return bits<Floats>(sign | (((code & 0x7c00) == 0x7c00) ? special : finite));
}

// Round to nearest even, as f32_to_f16() of base/convert.h, where the constants are explained. The
// magnitudes are compared as signed numbers, which every instruction set can do.
inline F16Lanes to_f16(Floats v) {
  const Words u = bits<Words>(v);
  const Words sign = (u >> 16) & 0x8000;
  const Ints a = bits<Ints>(u & 0x7fffffff);
  const Ints capped = (a < 0x47800000) ? a : (Ints{} + 0x47800000);
  const Ints normal = (capped + 0xfff + ((capped >> 13) & 1) - (112 << 23)) >> 13;
  const Ints subnormal = bits<Ints>(bits<Floats>(capped) + 0.5f) - 0x3f000000;
  const Ints finite = (a < 0x38800000) ? subnormal : normal;
  const Ints nan = 0x7e00 | ((a >> 13) & 0x3ff);
  return __builtin_convertvector(sign | bits<Words>((a > 0x7f800000) ? nan : finite), F16Lanes);
}
inline void store_f16(std::uint16_t* p, Floats v) {
  const F16Lanes narrow = to_f16(v);
  __builtin_memcpy(p, &narrow, sizeof(narrow));
}

// OCP FP8 E4M3 ("fn"): no infinities, NaN at 0x7f. Integer arithmetic for normal codes; the eight
// subnormal ones are small integers times 2^-9.
inline Floats load_f8e4m3(const std::uint8_t* p) {
  Bytes v;
  __builtin_memcpy(&v, p, sizeof(v));
  const Words code = __builtin_convertvector(v, Words);
  const Words sign = (code & 0x80) << 24;
  const Words low = code & 0x7f;
  const Words normal = (low << 20) + (120u << 23);
  const Words subnormal =
      bits<Words>(__builtin_convertvector(bits<Ints>(low & 7), Floats) * 0x1p-9f);
  const Words finite = (low < 8) ? subnormal : normal;
  return bits<Floats>(sign | ((low == 0x7f) ? (Words{} + 0x7fc00000) : finite));
}

// kLanes codes of four bits: the first of each byte is its low half.
template <std::size_t... j>
inline Words load_four_bits(const std::uint8_t* p, std::index_sequence<j...>) {
  Bytes v = {};
  __builtin_memcpy(&v, p, kLanes / 2);
  const Words pairs = __builtin_convertvector(__builtin_shufflevector(v, v, int(j) / 2 ...), Words);
  return (pairs >> Words{(j % 2 * 4)...}) & 15;
}
inline Words load_four_bits(const std::uint8_t* p) {
  return load_four_bits(p, std::make_index_sequence<kLanes>());
}
// The numbers of a table of 16 that the codes, 0 to 15, stand for.
inline Floats look_up(const float* table, Words codes) {
#if defined(__AVX512F__)
  // (Without a mask GCC takes a vector that the header leaves undefined for a fault of ours.)
  return _mm512_maskz_permutexvar_ps(0xffff, bits<__m512i>(codes), _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256i index = bits<__m256i>(codes);
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
  // The code's bit 3, as a sign.
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
  Floats values;
  for (int i = 0; i < kLanes; ++i) values[i] = table[codes[i]];
  return values;
#endif
}

// Numbers of 16 bits for 32 codes in 16 bytes.
inline void look_up_32(const std::uint16_t* table, const std::uint8_t* codes, std::uint16_t* to) {
#if defined(__SSSE3__)
  const __m128i byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(0x0f);
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8));
  // The lower and the higher bytes of the table.
  const __m128i low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
  const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i even = _mm_and_si128(pairs, nibble);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
  const __m128i in_order[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
  for (int i = 0; i < 2; ++i) {
    const __m128i l = _mm_shuffle_epi8(low, in_order[i]), h = _mm_shuffle_epi8(high, in_order[i]);
    auto* const out = reinterpret_cast<__m128i*>(to + 16 * i);
    _mm_storeu_si128(out, _mm_unpacklo_epi8(l, h));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi8(l, h));
  }
#else
  for (int i = 0; i < 16; ++i) {
    to[2 * i] = table[codes[i] & 15];
    to[2 * i + 1] = table[codes[i] >> 4];
  }
#endif
}

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

// tanh(x) = x + x z p(z), z = x^2, p the minimax polynomial of degree 4 up to 0.625, where
// 1 - 2 / (1 + e^2x) takes over: relative error below 2e-7.
inline Floats tanh(Floats x) {
  const Floats z = x * x;
  Floats p = splat(-5.70498686e-3f);
  p = p * z + 2.06390861e-2f;
  p = p * z - 5.37397154e-2f;
  p = p * z + 1.33314416e-1f;
  p = p * z - 3.33332807e-1f;
  return (z < 0.390625f) ? x + x * (z * p) : 1.0f - 2.0f / (1.0f + exp(2.0f * x));
}

// erfc(x) = t exp(-x^2 + Q(t)), t = 1 / (1 + x / 2), for x >= 0; 2 - erfc(-x) below. Q is the
// Chebyshev interpolant of degree 9 of ln(erfc(x) / t) + x^2 on t in [1/6, 1] (x up to 10):
// relative error 5e-8, in fp32 arithmetic 3e-7 of the larger of erfc(x) and erfc(-x).
inline Floats erfc(Floats x) {
  const Floats a = (x < 0.0f) ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.5f * a);
  Floats q = splat(0.144930214f);
  q = q * t - 0.680827179f;
  q = q * t + 1.15673376f;
  q = q * t - 0.696251903f;
  q = q * t - 0.0802804286f;
  q = q * t + 0.00126758448f;
  q = q * t + 0.0346028006f;
  q = q * t + 0.386640412f;
  q = q * t + 0.998632783f;
  q = q * t - 1.265448f;
  const Floats tail = t * exp(q - a * a);
  return (x < 0.0f) ? 2.0f - tail : tail;
}

// One stage of a transposition: exchanges the off-diagonal blocks of size `kSpan`.
template <int kSpan, std::size_t... j>
inline void exchange(Floats& a, Floats& b, std::index_sequence<j...>) {
  const Floats upper =
      __builtin_shufflevector(a, b, ((int(j) & kSpan) == 0 ? int(j) : kLanes + int(j) - kSpan)...);
  const Floats lower =
      __builtin_shufflevector(a, b, ((int(j) & kSpan) == 0 ? int(j) + kSpan : kLanes + int(j))...);
  a = upper;
  b = lower;
}
// Transposes a square of kLanes x kLanes.
template <int kSpan = kLanes / 2>
inline void transpose(Floats (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kSpan) == 0) {
      exchange<kSpan>(rows[i], rows[i + kSpan], std::make_index_sequence<kLanes>());
    }
  }
  if constexpr (kSpan > 1) transpose<kSpan / 2>(rows);
}
