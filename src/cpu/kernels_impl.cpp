// Compiled once per instruction set with SWITCHYARD_ISA naming it (see CMakeLists.txt).
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "base/convert.h"
#include "base/quantize.h"
#include "cpu/kernels.h"

#define SWITCHYARD_STRINGIZE(x) #x
#define SWITCHYARD_NAME_OF(x) SWITCHYARD_STRINGIZE(x)

namespace switchyard::cpu {
namespace SWITCHYARD_ISA {
namespace {

#include "cpu/vector.h"

template <DType kDType>
inline Floats load(const void* p, std::int64_t i) {
  if constexpr (kDType == DType::kF32) {
    return load_f32(static_cast<const float*>(p) + i);
  } else if constexpr (kDType == DType::kBF16) {
    return load_bf16(static_cast<const std::uint16_t*>(p) + i);
  } else {
    return load_f16(static_cast<const std::uint16_t*>(p) + i);
  }
}

template <DType kDType>
inline void store(void* p, std::int64_t i, Floats v) {
  if constexpr (kDType == DType::kF32) {
    store_f32(static_cast<float*>(p) + i, v);
  } else if constexpr (kDType == DType::kBF16) {
    store_bf16(static_cast<std::uint16_t*>(p) + i, v);
  } else {
    store_f16(static_cast<std::uint16_t*>(p) + i, v);
  }
}

// A last, partial vector goes through a buffer, so that every kernel has one body for all of it.
template <DType kDType>
inline Floats load_first(const void* p, std::int64_t i, std::int64_t count) {
  alignas(64) std::byte buffer[kLanes * 4] = {};
  std::memcpy(buffer, static_cast<const std::byte*>(p) + i * std::int64_t(size_of(kDType)),
              static_cast<std::size_t>(count) * size_of(kDType));
  return load<kDType>(buffer, 0);
}
template <DType kDType>
inline void store_first(void* p, std::int64_t i, Floats v, std::int64_t count) {
  alignas(64) std::byte buffer[kLanes * 4];
  store<kDType>(buffer, 0, v);
  std::memcpy(static_cast<std::byte*>(p) + i * std::int64_t(size_of(kDType)), buffer,
              static_cast<std::size_t>(count) * size_of(kDType));
}

// Calls f.template operator()<dtype>() for a floating dtype known at run time.
template <typename F>
inline auto with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32: return f.template operator()<DType::kF32>();
    case DType::kF16: return f.template operator()<DType::kF16>();
    default: return f.template operator()<DType::kBF16>();
  }
}

void convert(const void* in, DType in_dtype, void* out, DType out_dtype, std::int64_t count,
             float scale) {
  if (in_dtype == out_dtype && scale == 1.0f) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * size_of(in_dtype));
    return;
  }
  with_dtype(in_dtype, [&]<DType kIn>() {
    with_dtype(out_dtype, [&]<DType kOut>() {
      std::int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) store<kOut>(out, i, load<kIn>(in, i) * scale);
      if (i < count)
        store_first<kOut>(out, i, load_first<kIn>(in, i, count - i) * scale, count - i);
    });
  });
}

void dequantize(const std::uint8_t* in, const float* scales, std::int64_t scale_cols, void* out,
                DType out_dtype, std::int64_t count) {
  with_dtype(out_dtype, [&]<DType kOut>() {
    for (std::int64_t begin = 0; begin < count; begin += scale_cols) {
      const std::int64_t end = begin + scale_cols < count ? begin + scale_cols : count;
      const float scale = scales[begin / scale_cols];
      for (std::int64_t i = begin; i < end; i += kLanes) {
        const std::int64_t lanes = end - i < kLanes ? end - i : kLanes;
        if (lanes == kLanes) {
          store<kOut>(out, i, load_f8e4m3(in + i) * scale);
        } else {
          std::uint8_t buffer[kLanes] = {};
          std::memcpy(buffer, in + i, static_cast<std::size_t>(lanes));
          store_first<kOut>(out, i, load_f8e4m3(buffer) * scale, lanes);
        }
      }
    }
  });
}

// A table of the numbers that the codes of a group stand for, and a look-up for each.
void dequantize_four_bit(const MatrixView& matrix, const void* codes, const void* scales,
                         const std::uint8_t* zero, std::int64_t groups, void* out,
                         DType out_dtype) {
  static constexpr float kMx[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  static constexpr float kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::int64_t size = matrix.scale_cols;
  const bool is_float = matrix.dtype == DType::kF4E2M1;
  const float* const values = is_float ? kMx : kIntegers;
  const auto* const in = static_cast<const std::uint8_t*>(codes);
  with_dtype(out_dtype, [&]<DType kOut>() {
    for (std::int64_t group = 0; group < groups; ++group) {
      const float scale = scale_to_f32(scales, matrix.scale_dtype, group);
      const float offset = is_float          ? 0.0f
                           : zero == nullptr ? 8.0f
                                             : static_cast<float>(zero[group]);
      alignas(64) std::byte table[16 * sizeof(float)];
      for (int i = 0; i < 16; i += kLanes) {
        store<kOut>(table, i, (load_f32(values + i) - offset) * scale);
      }
      const std::int64_t end = (group + 1) * size;
      for (std::int64_t i = group * size; i < end; i += 32) {
        if constexpr (kOut != DType::kF32) {
          look_up_32(reinterpret_cast<const std::uint16_t*>(table), in + i / 2,
                     static_cast<std::uint16_t*>(out) + i);
        } else {
          for (std::int64_t j = i; j < i + 32; j += kLanes) {
            store<kOut>(out, j,
                        look_up(reinterpret_cast<const float*>(table), load_four_bits(in + j / 2)));
          }
        }
      }
    }
  });
}

void quantize(const std::uint16_t* in, std::uint8_t* codes, float* scales, std::int64_t count) {
  for (std::int64_t begin = 0; begin < count; begin += kQuantGroup) {
    const std::int64_t end = begin + kQuantGroup < count ? begin + kQuantGroup : count;
    // Magnitudes of floats compare as integers, with infinity and then NaN above all others.
    int largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const int magnitude = in[i] & 0x7fff;
      largest = magnitude > largest ? magnitude : largest;
    }
    const GroupScale s = group_scale(bf16_to_f32(static_cast<std::uint16_t>(largest)));
    for (std::int64_t i = begin; i < end; ++i) {
      codes[i] = f32_to_f8e4m3(bf16_to_f32(in[i]) * s.inverse);
    }
    scales[begin / kQuantGroup] = s.scale;
  }
}

template <ActivationKind kKind>
inline Floats apply(const Activation& a, Floats v) {
  if constexpr (kKind == ActivationKind::kSilu) {
    return v * sigmoid(v * a.alpha);
  } else if constexpr (kKind == ActivationKind::kGelu) {
    return 0.5f * v * erfc(v * -0.70710678f);
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    // 0.5 (1 + tanh u) = sigmoid(2 u)
    return v * sigmoid(1.59576912f * (v + 0.044715f * v * v * v));
  } else if constexpr (kKind == ActivationKind::kRelu) {
    return (v < 0.0f) ? Floats{} : v;
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    const Floats r = (v < 0.0f) ? Floats{} : v;
    return r * r;
  } else if constexpr (kKind == ActivationKind::kSitu) {
    return a.alpha * tanh(v / a.alpha) * sigmoid(v);
  } else {
    return v;
  }
}

// kLanes rows and columns before bias and activation. `gate` and `up` point to the first value of a
// matrix with n columns; biases may be null. Rows from `rows` on repeat the row before them.
struct Square {
  const float *gate, *up, *gate_bias, *up_bias;
  std::int64_t n;
  int rows;
};

template <ActivationKind kKind, bool kGated>
void activate_square(const Activation& a, const Square& in, Floats (&h)[kLanes]) {
  const bool limited = std::isfinite(a.limit);
  const Floats limit = splat(a.limit);
  for (int i = 0; i < kLanes; ++i) {
    const std::int64_t row = i < in.rows ? i : in.rows - 1;
    Floats u = load_f32(in.up + row * in.n);
    if (in.up_bias != nullptr) u += in.up_bias[row];
    if constexpr (kGated) {
      Floats g = load_f32(in.gate + row * in.n);
      if (in.gate_bias != nullptr) g += in.gate_bias[row];
      if (limited && kKind == ActivationKind::kSitu) {
        u = limit * tanh(u / limit);
      } else if (limited) {
        g = (g > limit) ? limit : g;
        u = (u > limit) ? limit : ((u < -limit) ? -limit : u);
      }
      h[i] = apply<kKind>(a, g) * (u + a.up_bias);
    } else {
      h[i] = apply<kKind>(a, u);
    }
  }
}

// Stores the first `rows` values of column j at out[j].
template <DType kOut>
void store_columns(Floats (&square)[kLanes], int rows, std::byte* const (&out)[kLanes],
                   int columns) {
  transpose(square);
  for (int j = 0; j < columns; ++j) {
    if (rows == kLanes) {
      store<kOut>(out[j], 0, square[j]);
    } else {
      store_first<kOut>(out[j], 0, square[j], rows);
    }
  }
}
using StoreColumns = void (*)(Floats (&)[kLanes], int, std::byte* const (&)[kLanes], int);

StoreColumns store_columns_of(DType out) {
  return with_dtype(out, []<DType kOut>() -> StoreColumns { return store_columns<kOut>; });
}

using ActivateSquare = void (*)(const Activation&, const Square&, Floats (&)[kLanes]);

template <ActivationKind kKind>
ActivateSquare activate_square_of(bool gated) {
  return gated ? activate_square<kKind, true> : activate_square<kKind, false>;
}

ActivateSquare activate_square_of(const Activation& a) {
  switch (a.kind) {
    case ActivationKind::kSilu: return activate_square_of<ActivationKind::kSilu>(a.gated);
    case ActivationKind::kGelu: return activate_square_of<ActivationKind::kGelu>(a.gated);
    case ActivationKind::kGeluTanh: return activate_square_of<ActivationKind::kGeluTanh>(a.gated);
    case ActivationKind::kRelu: return activate_square_of<ActivationKind::kRelu>(a.gated);
    case ActivationKind::kRelu2: return activate_square_of<ActivationKind::kRelu2>(a.gated);
    case ActivationKind::kSitu: return activate_square<ActivationKind::kSitu, true>;
    case ActivationKind::kIdentity: break;
  }
  return activate_square_of<ActivationKind::kIdentity>(a.gated);
}

// The activation and the output's type are chosen at run time, one by one: their pairs would be
// compiled 36 times, for a call per square.
void activate(const Activation& a, const float* gate, const float* up, const float* gate_bias,
              const float* up_bias, int m, int n, void* out, DType out_dtype,
              std::int64_t out_stride) {
  const ActivateSquare activation = activate_square_of(a);
  const StoreColumns storing = store_columns_of(out_dtype);
  const std::int64_t out_size = static_cast<std::int64_t>(size_of(out_dtype));
  const auto offset = [](const float* p, std::int64_t by) { return p == nullptr ? p : p + by; };
  for (int i0 = 0; i0 < m; i0 += kLanes) {
    const int rows = m - i0 < kLanes ? m - i0 : kLanes;
    for (int j0 = 0; j0 < n; j0 += kLanes) {
      const std::int64_t at = std::int64_t{i0} * n + j0;
      Floats h[kLanes];
      activation(
          a, {offset(gate, at), up + at, offset(gate_bias, i0), offset(up_bias, i0), n, rows}, h);
      std::byte* addresses[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        addresses[j] = static_cast<std::byte*>(out) + ((j0 + j) * out_stride + i0) * out_size;
      }
      storing(h, rows, addresses, kLanes);
    }
  }
}

void scatter(const float* in, const float* bias, int m, int n, int rows, void* const* out,
             DType out_dtype) {
  const StoreColumns storing = store_columns_of(out_dtype);
  const std::int64_t out_size = static_cast<std::int64_t>(size_of(out_dtype));
  for (int i0 = 0; i0 < m; i0 += kLanes) {
    const int filled = m - i0 < kLanes ? m - i0 : kLanes;
    for (int j0 = 0; j0 < rows; j0 += kLanes) {
      const int columns = rows - j0 < kLanes ? rows - j0 : kLanes;
      Floats v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const std::int64_t row = i0 + (i < filled ? i : filled - 1);
        v[i] = load_f32(in + row * n + j0);
        if (bias != nullptr) v[i] += bias[row];
      }
      std::byte* addresses[kLanes];
      for (int j = 0; j < columns; ++j) {
        addresses[j] = static_cast<std::byte*>(out[j0 + j]) + i0 * out_size;
      }
      storing(v, filled, addresses, columns);
    }
  }
}

void combine(const void* const* cells, const float* weights, int count, DType cell_dtype, void* out,
             DType out_dtype, std::int64_t size, float scale, bool accumulate) {
  with_dtype(cell_dtype, [&]<DType kCell>() {
    with_dtype(out_dtype, [&]<DType kOut>() {
      for (std::int64_t i = 0; i < size; i += kLanes) {
        const std::int64_t lanes = size - i < kLanes ? size - i : kLanes;
        Floats sum{};
        for (int k = 0; k < count; ++k) {
          const Floats cell =
              lanes == kLanes ? load<kCell>(cells[k], i) : load_first<kCell>(cells[k], i, lanes);
          sum = fma(splat(weights[k]), cell, sum);
        }
        sum *= scale;
        if (accumulate) {
          sum += lanes == kLanes ? load<kOut>(out, i) : load_first<kOut>(out, i, lanes);
        }
        if (lanes == kLanes) {
          store<kOut>(out, i, sum);
        } else {
          store_first<kOut>(out, i, sum, lanes);
        }
      }
    });
  });
}

float dot(const void* a, DType a_dtype, const float* b, std::int64_t size) {
  // Sixteen partial sums, whatever a register holds: one order for all instruction sets.
  constexpr int kSums = 16 / kLanes;
  return with_dtype(a_dtype, [&]<DType kA>() {
    Floats sums[kSums] = {};
    std::int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      for (int s = 0; s < kSums; ++s) {
        sums[s] += load<kA>(a, i + s * kLanes) * load_f32(b + i + s * kLanes);
      }
    }
    for (int s = 0; s < kSums && i < size; ++s, i += kLanes) {
      const std::int64_t lanes = size - i < kLanes ? size - i : kLanes;
      sums[s] += load_first<kA>(a, i, lanes) * load_first<DType::kF32>(b, i, lanes);
    }
    float total = 0;
    for (int j = 0; j < 16; ++j) total += sums[j / kLanes][j % kLanes];
    return total;
  });
}

}  // namespace

extern const Kernels table;
const Kernels table = {SWITCHYARD_NAME_OF(SWITCHYARD_ISA),
                       convert,
                       dequantize,
                       dequantize_four_bit,
                       quantize,
                       activate,
                       scatter,
                       combine,
                       dot};

}  // namespace SWITCHYARD_ISA
}  // namespace switchyard::cpu
