#include "base/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

namespace switchyard {
namespace {

// The definition: sign, exponent and mantissa fields, evaluated in double.
double decode(std::uint32_t code, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const std::uint32_t mantissa_mask = (1u << mantissa_bits) - 1;
  const std::uint32_t exponent_mask = (1u << exponent_bits) - 1;
  const std::uint32_t mantissa = code & mantissa_mask;
  const std::uint32_t exponent = (code >> mantissa_bits) & exponent_mask;
  const double sign = (code >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == exponent_mask) {
    if (has_infinity && mantissa == 0) return sign * std::numeric_limits<double>::infinity();
    if (has_infinity || mantissa == mantissa_mask) return std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1u << mantissa_bits),
                           static_cast<int>(exponent) - bias - mantissa_bits);
}

// The nearest of `values` (ascending, index = code) to a finite x >= 0; ties to the even code.
std::uint32_t nearest(const std::vector<double>& values, double x) {
  std::size_t above = 0;
  while (above < values.size() && values[above] < x) ++above;
  if (above == 0) return 0;
  if (above == values.size()) return static_cast<std::uint32_t>(values.size() - 1);
  const double up = values[above] - x;
  const double down = x - values[above - 1];
  if (up != down) return static_cast<std::uint32_t>(up < down ? above : above - 1);
  return static_cast<std::uint32_t>(above % 2 == 0 ? above : above - 1);
}

TEST(Convert, EveryF8E4M3CodeDecodesAsDefined) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const float value = f8e4m3_to_f32(static_cast<std::uint8_t>(code));
    const double expected = decode(code, 4, 3, false);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(f32_to_f8e4m3(value), code);
      continue;
    }
    EXPECT_EQ(value, expected) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    EXPECT_EQ(f32_to_f8e4m3(value), code);
  }
}

TEST(Convert, EveryF16CodeDecodesAsDefinedAndRoundTrips) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const float value = f16_to_f32(static_cast<std::uint16_t>(code));
    const double expected = decode(code, 5, 10, true);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << code;
      ASSERT_TRUE(std::isnan(f16_to_f32(f32_to_f16(value)))) << code;
      continue;
    }
    ASSERT_EQ(value, expected) << code;
    ASSERT_EQ(f32_to_f16(value), code);
  }
}

TEST(Convert, EveryBF16CodeDecodesAsDefinedAndRoundTrips) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const float value = bf16_to_f32(static_cast<std::uint16_t>(code));
    const double expected = decode(code, 8, 7, true);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << code;
      ASSERT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(value)))) << code;
      continue;
    }
    ASSERT_EQ(value, expected) << code;
    ASSERT_EQ(f32_to_bf16(value), code);
  }
}

TEST(Convert, F8E4M3RoundsToNearestEvenAndSaturates) {
  std::vector<double> values;
  for (std::uint32_t code = 0; code <= 0x7e; ++code) values.push_back(decode(code, 4, 3, false));
  for (std::size_t code = 0; code + 1 < values.size(); ++code) {
    const float middle = static_cast<float>((values[code] + values[code + 1]) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      EXPECT_EQ(f32_to_f8e4m3(x), nearest(values, static_cast<double>(x))) << x;
      EXPECT_EQ(f32_to_f8e4m3(-x), 0x80u | nearest(values, static_cast<double>(x))) << -x;
    }
  }
  for (const float x : {449.0f, 464.0f, 465.0f, 1e30f, std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(f32_to_f8e4m3(x), 0x7e) << x;
    EXPECT_EQ(f32_to_f8e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(f32_to_f8e4m3(std::numeric_limits<float>::quiet_NaN()), 0x7f);
}

TEST(Convert, F16RoundsToNearestEven) {
  std::vector<double> values;
  for (std::uint32_t code = 0; code <= 0x7bff; ++code) values.push_back(decode(code, 5, 10, true));
  for (std::size_t code = 0; code + 1 < values.size(); ++code) {
    const float middle = static_cast<float>((values[code] + values[code + 1]) / 2);
    ASSERT_EQ(f32_to_f16(middle), code % 2 == 0 ? code : code + 1) << middle;
    ASSERT_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), code);
    ASSERT_EQ(f32_to_f16(std::nextafter(middle, 1e9f)), code + 1);
  }
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Convert, BF16RoundsToNearestEven) {
  for (std::uint32_t code = 0; code < 0x7f80; ++code) {
    const std::uint32_t low = code << 16;
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low | 0x7fffu)), code);
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low | 0x8000u)), code % 2 == 0 ? code : code + 1);
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low | 0x8001u)), code + 1);
  }
  // A payload in the low half only must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Convert, F8E8M0IsAPowerOfTwo) {
  for (std::uint32_t code = 0; code < 255; ++code)
    EXPECT_EQ(f8e8m0_to_f32(static_cast<std::uint8_t>(code)),
              std::ldexp(1.0, static_cast<int>(code) - 127));
  EXPECT_TRUE(std::isnan(f8e8m0_to_f32(255)));
}

TEST(Convert, ArrayFormsAgreeWithScalars) {
  std::mt19937 generator(7);
  std::vector<float> in(1003);
  for (float& value : in) value = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
  std::vector<std::uint16_t> half(in.size());
  std::vector<std::uint8_t> byte(in.size());
  f32_to_bf16(in.data(), half.data(), in.size());
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(half[i], f32_to_bf16(in[i]));
  f32_to_f16(in.data(), half.data(), in.size());
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(half[i], f32_to_f16(in[i]));
  f32_to_f8e4m3(in.data(), byte.data(), in.size());
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(byte[i], f32_to_f8e4m3(in[i]));
}

}  // namespace
}  // namespace switchyard
