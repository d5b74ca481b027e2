#include "reference/decode.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "switchyard/error.h"

namespace switchyard::reference {

double bf16_to_double(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

double f16_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  double magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (bits & 0x8000) ? -magnitude : magnitude;
}

double f8e4m3_to_double(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 0xf;
  const int mantissa = bits & 0x7;
  double magnitude;
  if (exponent == 0xf && mantissa == 0x7) {
    magnitude = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -9);
  } else {
    magnitude = std::ldexp(8 + mantissa, exponent - 10);
  }
  return (bits & 0x80) ? -magnitude : magnitude;
}

std::uint8_t nearest_f8e4m3(double value) {
  constexpr int kLargest = 0x7e;  // 448; codes are in the order of their magnitudes
  static const auto magnitudes = [] {
    std::array<double, kLargest + 1> table;
    for (int code = 0; code <= kLargest; ++code) {
      table[static_cast<std::size_t>(code)] = f8e4m3_to_double(static_cast<std::uint8_t>(code));
    }
    return table;
  }();
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7f);
  const double magnitude = std::abs(value);
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  int code = static_cast<int>(above - magnitudes.begin());
  if (code > kLargest) {
    code = kLargest;
  } else if (code > 0) {
    const double up = *above - magnitude;
    const double down = magnitude - *(above - 1);
    if (down < up || (down == up && code % 2 != 0)) --code;
  }
  return static_cast<std::uint8_t>(sign | code);
}

float round_to_bf16(float value) {
  if (std::isnan(value)) return value;
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0x7fff + ((bits >> 16) & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

namespace {

template <typename Stored, typename Decode>
void decode_strided(const void* data, std::int64_t count, std::int64_t stride, double* out,
                    Decode decode) {
  const auto* stored = static_cast<const Stored*>(data);
  if (stride == 1) {  // a loop of its own, so that the compiler vectorises it
    for (std::int64_t i = 0; i < count; ++i) out[i] = decode(stored[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = decode(stored[i * stride]);
  }
}

template <typename Bits, typename Decode>
std::array<double, std::size_t{1} << (8 * sizeof(Bits))> tabulate(Decode decode) {
  std::array<double, std::size_t{1} << (8 * sizeof(Bits))> table;
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = decode(static_cast<Bits>(i));
  return table;
}

void decode_elements(const void* data, DType dtype, std::int64_t count, std::int64_t stride,
                     double* out) {
  switch (dtype) {
    case DType::kF32:
      return decode_strided<float>(data, count, stride, out, [](float v) { return double{v}; });
    case DType::kBF16:
      return decode_strided<std::uint16_t>(data, count, stride, out, [](std::uint16_t bits) {
        return double{std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16)};
      });
    case DType::kF16: {
      static const auto table = tabulate<std::uint16_t>(f16_to_double);
      return decode_strided<std::uint16_t>(data, count, stride, out,
                                           [](std::uint16_t bits) { return table[bits]; });
    }
    case DType::kF8E4M3: {
      static const auto table = tabulate<std::uint8_t>(f8e4m3_to_double);
      return decode_strided<std::uint8_t>(data, count, stride, out,
                                          [](std::uint8_t bits) { return table[bits]; });
    }
    case DType::kI32:
    case DType::kI64:
    case DType::kU8:
    case DType::kF4E2M1:
    case DType::kU4:
    case DType::kF8E8M0: break;
  }
  throw Error(ErrorCode::kDTypeMismatch,
              fmt::format("the reference layer computes with floating-point tensors, not {}",
                          to_string(dtype)));
}

}  // namespace

double f4e2m1_to_double(std::uint8_t code) {
  constexpr std::array kMagnitudes = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  const double magnitude = kMagnitudes[code & 7];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

namespace {

double scale_to_double(const void* scales, DType dtype, std::int64_t i) {
  if (dtype == DType::kF8E8M0) {
    const int code = static_cast<const std::uint8_t*>(scales)[i];
    return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
  }
  double value = 0;
  decode_elements(static_cast<const std::byte*>(scales) + bytes_of(dtype, i), dtype, 1, 1, &value);
  return value;
}

void decode_four_bit_row(const MatrixView& matrix, std::int64_t r, double* out) {
  const auto* const codes = static_cast<const std::uint8_t*>(matrix.row(r));
  const std::int64_t first = r / matrix.scale_rows * matrix.scale_stride;
  for (std::int64_t c = 0; c < matrix.cols; ++c) {
    const std::int64_t at = first + c / matrix.scale_cols;
    const int code = c % 2 == 0 ? codes[c / 2] & 15 : codes[c / 2] >> 4;
    const int zero = matrix.zero == nullptr ? 8 : matrix.zero[at];
    const double value = matrix.dtype == DType::kU4
                             ? code - zero
                             : f4e2m1_to_double(static_cast<std::uint8_t>(code));
    out[c] = value * scale_to_double(matrix.scale, matrix.scale_dtype, at);
  }
}

}  // namespace

void decode_row(const MatrixView& matrix, std::int64_t r, double* out) {
  if (is_four_bit(matrix.dtype)) return decode_four_bit_row(matrix, r, out);
  decode_elements(matrix.row(r), matrix.dtype, matrix.cols, matrix.col_stride, out);
  if (matrix.scale == nullptr) return;
  const auto* const scales = static_cast<const float*>(matrix.row_scale(r));
  for (std::int64_t c = 0; c < matrix.cols; ++c) out[c] *= double{scales[c / matrix.scale_cols]};
}

void decode_vector(const VectorView& vector, double* out) {
  decode_elements(vector.data, vector.dtype, vector.size, vector.stride, out);
}

}  // namespace switchyard::reference
