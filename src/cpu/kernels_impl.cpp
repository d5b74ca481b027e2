// Compiled once per instruction set with SWITCHYARD_ISA naming it (see CMakeLists.txt).
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
    for (int j = 0; j < kLanes; ++j) static_cast<std::uint16_t*>(p)[i + j] = f32_to_f16(v[j]);
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
    case DType::kF32:
      return f.template operator()<DType::kF32>();
    case DType::kF16:
      return f.template operator()<DType::kF16>();
    default:
      return f.template operator()<DType::kBF16>();
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

void quantize(const std::uint16_t* in, std::uint8_t* codes, float* scales, std::int64_t count) {
  for (std::int64_t begin = 0; begin < count; begin += kQuantGroup) {
    const std::int64_t end = begin + kQuantGroup < count ? begin + kQuantGroup : count;
    // As integers, magnitudes of floats are in order, with infinity and then NaN above all others.
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
  } else {
    return v;
  }
}

template <ActivationKind kKind, bool kGated, DType kOut>
void activate_as(const Activation& a, const float* gate, const float* up, const float* gate_bias,
                 const float* up_bias, int m, int n, void* out, std::int64_t out_stride) {
  const bool limited = std::isfinite(a.limit);
  const Floats limit = splat(a.limit);
  for (int i0 = 0; i0 < m; i0 += kLanes) {
    const int rows = m - i0 < kLanes ? m - i0 : kLanes;
    for (int j0 = 0; j0 < n; j0 += kLanes) {
      Floats h[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const std::int64_t row = i0 + (i < rows ? i : rows - 1);
        Floats u = load_f32(up + row * n + j0);
        if (up_bias != nullptr) u += up_bias[row];
        if constexpr (kGated) {
          Floats g = load_f32(gate + row * n + j0);
          if (gate_bias != nullptr) g += gate_bias[row];
          if (limited) {
            g = (g > limit) ? limit : g;
            u = (u > limit) ? limit : ((u < -limit) ? -limit : u);
          }
          h[i] = apply<kKind>(a, g) * (u + a.up_bias);
        } else {
          h[i] = apply<kKind>(a, u);
        }
      }
      transpose(h);
      for (int j = 0; j < kLanes; ++j) {
        const std::int64_t at = (j0 + j) * out_stride + i0;
        if (rows == kLanes) {
          store<kOut>(out, at, h[j]);
        } else {
          store_first<kOut>(out, at, h[j], rows);
        }
      }
    }
  }
}

template <ActivationKind kKind>
void activate_kind(const Activation& a, const float* gate, const float* up, const float* gate_bias,
                   const float* up_bias, int m, int n, void* out, DType out_dtype,
                   std::int64_t out_stride) {
  with_dtype(out_dtype, [&]<DType kOut>() {
    if (a.gated) {
      activate_as<kKind, true, kOut>(a, gate, up, gate_bias, up_bias, m, n, out, out_stride);
    } else {
      activate_as<kKind, false, kOut>(a, gate, up, gate_bias, up_bias, m, n, out, out_stride);
    }
  });
}

void activate(const Activation& a, const float* gate, const float* up, const float* gate_bias,
              const float* up_bias, int m, int n, void* out, DType out_dtype,
              std::int64_t out_stride) {
  constexpr decltype(&activate_kind<ActivationKind::kSilu>) kByKind[] = {
      activate_kind<ActivationKind::kSilu>,     activate_kind<ActivationKind::kGelu>,
      activate_kind<ActivationKind::kGeluTanh>, activate_kind<ActivationKind::kRelu>,
      activate_kind<ActivationKind::kRelu2>,    activate_kind<ActivationKind::kIdentity>};
  kByKind[static_cast<int>(a.kind)](a, gate, up, gate_bias, up_bias, m, n, out, out_dtype,
                                    out_stride);
}

void scatter(const float* in, const float* bias, int m, int n, int rows, void* const* out,
             DType out_dtype) {
  with_dtype(out_dtype, [&]<DType kOut>() {
    for (int i0 = 0; i0 < m; i0 += kLanes) {
      const int filled = m - i0 < kLanes ? m - i0 : kLanes;
      for (int j0 = 0; j0 < rows; j0 += kLanes) {
        Floats v[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const std::int64_t row = i0 + (i < filled ? i : filled - 1);
          v[i] = load_f32(in + row * n + j0);
          if (bias != nullptr) v[i] += bias[row];
        }
        transpose(v);
        for (int j = 0; j < kLanes && j0 + j < rows; ++j) {
          if (filled == kLanes) {
            store<kOut>(out[j0 + j], i0, v[j]);
          } else {
            store_first<kOut>(out[j0 + j], i0, v[j], filled);
          }
        }
      }
    }
  });
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
          sum += weights[k] * cell;
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
  return with_dtype(a_dtype, [&]<DType kA>() {
    Floats sum{};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sum += load<kA>(a, i) * load_f32(b + i);
    if (i < size) {
      sum += load_first<kA>(a, i, size - i) * load_first<DType::kF32>(b, i, size - i);
    }
    float total = 0;
    for (int j = 0; j < kLanes; ++j) total += sum[j];
    return total;
  });
}

}  // namespace

extern const Kernels table;
const Kernels table = {SWITCHYARD_NAME_OF(SWITCHYARD_ISA),
                       convert,
                       dequantize,
                       quantize,
                       activate,
                       scatter,
                       combine,
                       dot};

}  // namespace SWITCHYARD_ISA
}  // namespace switchyard::cpu
