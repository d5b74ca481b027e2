// The element-wise kernels against scalar arithmetic, on all codes and awkward sizes.
#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/convert.h"
#include "reference/decode.h"

namespace switchyard::cpu {
namespace {

TEST(Kernels, EveryFp8CodeWithBlockScales) {
  std::vector<std::uint8_t> codes(256 + 21);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  const std::vector<float> scales = {1.0f, 0.5f, 3.0f, 0x1p-20f, 0x1p20f};
  constexpr std::int64_t kColumns = 60;  // not a multiple of the vector
  std::vector<float> out(codes.size());
  kernels().dequantize(codes.data(), scales.data(), kColumns, out.data(), DType::kF32,
                       static_cast<std::int64_t>(codes.size()));
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const float expected = f8e4m3_to_f32(codes[i]) * scales[i / kColumns];
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(out[i], expected) << i;
    }
  }
}

// Against the fp64 arithmetic of the reference, of which the quotients below need no rounding.
TEST(Kernels, GroupsAreQuantisedAsDefined) {
  std::mt19937 generator(5);
  std::normal_distribution<float> normal;
  for (const std::int64_t count : {1, 16, 127, 128, 129, 300}) {
    for (const float size : {1.0f, 0x1p-70f, 0x1p-130f, 0x1p100f}) {
      std::vector<std::uint16_t> x(static_cast<std::size_t>(count));
      for (auto& v : x) v = f32_to_bf16(normal(generator) * size);
      std::vector<std::uint8_t> codes(x.size() + 1, 0xaa);
      std::vector<float> scales(x.size() / 128 + 2, -1);
      kernels().quantize(x.data(), codes.data(), scales.data(), count);
      for (std::int64_t begin = 0; begin < count; begin += 128) {
        const std::int64_t end = std::min(begin + 128, count);
        float amax = 0x1p-100f;
        for (std::int64_t i = begin; i < end; ++i) {
          amax = std::max(amax, std::abs(bf16_to_f32(x[static_cast<std::size_t>(i)])));
        }
        EXPECT_EQ(scales[static_cast<std::size_t>(begin / 128)], amax * (1.0f / 448));
        for (std::int64_t i = begin; i < end; ++i) {
          const auto at = static_cast<std::size_t>(i);
          ASSERT_EQ(codes[at], reference::nearest_f8e4m3(bf16_to_f32(x[at]) * (448 / amax))) << i;
        }
      }
      EXPECT_EQ(codes.back(), 0xaa);
      EXPECT_EQ(scales[static_cast<std::size_t>((count + 127) / 128)], -1);
    }
  }
}

TEST(Kernels, QuantisedGroupsKeepNanAndInfinity) {
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    std::vector<std::uint16_t> x(200, f32_to_bf16(3));
    x[140] = f32_to_bf16(bad);
    std::vector<std::uint8_t> codes(x.size());
    std::vector<float> scales(2), values(x.size());
    kernels().quantize(x.data(), codes.data(), scales.data(), 200);
    kernels().dequantize(codes.data(), scales.data(), 128, values.data(), DType::kF32, 200);
    for (std::size_t i = 0; i < 200; ++i) EXPECT_EQ(std::isnan(values[i]), i >= 128) << i;
    EXPECT_FLOAT_EQ(values[0], 3);
  }
  // All zeros: zeros, of either sign.
  std::vector<std::uint16_t> x = {0, 0x8000, 0};
  std::vector<std::uint8_t> codes(3);
  float scale = 0;
  kernels().quantize(x.data(), codes.data(), &scale, 3);
  EXPECT_EQ(codes, (std::vector<std::uint8_t>{0, 0x80, 0}));
  EXPECT_TRUE(std::isfinite(scale));
}

TEST(Kernels, EverySixteenBitCodeConverts) {
  std::vector<std::uint16_t> codes(65536);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(codes.size());
  std::vector<std::uint16_t> back(codes.size());
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    kernels().convert(codes.data(), dtype, wide.data(), DType::kF32, 65536, 1);
    kernels().convert(wide.data(), DType::kF32, back.data(), dtype, 65536, 1);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float expected = dtype == DType::kF16 ? f16_to_f32(codes[i]) : bf16_to_f32(codes[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
      } else {
        ASSERT_EQ(std::signbit(wide[i]), std::signbit(expected)) << i;
        ASSERT_EQ(wide[i], expected) << i;
        ASSERT_EQ(back[i], codes[i]) << i;
      }
    }
  }
}

TEST(Kernels, NarrowingRoundsToNearestEven) {
  std::mt19937 generator(1);
  std::vector<float> wide(10'001);
  for (float& v : wide) {
    const std::uint32_t random = static_cast<std::uint32_t>(generator());
    std::memcpy(&v, &random, sizeof(v));
  }
  wide[0] = 1.00390625f;  // halfway between two bf16 values
  wide[1] = 1.01171875f;
  std::vector<std::uint16_t> out(wide.size());
  kernels().convert(wide.data(), DType::kF32, out.data(), DType::kBF16, 10'001, 1);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (std::isnan(wide[i])) {
      ASSERT_TRUE(std::isnan(bf16_to_f32(out[i])));
    } else {
      ASSERT_EQ(out[i], f32_to_bf16(wide[i])) << wide[i];
    }
  }
}

double exact_activation(const Activation& a, double v) {
  switch (a.kind) {
    case ActivationKind::kSilu: return v / (1 + std::exp(-static_cast<double>(a.alpha) * v));
    case ActivationKind::kGelu: return 0.5 * v * std::erfc(-v / std::sqrt(2.0));
    case ActivationKind::kGeluTanh:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    case ActivationKind::kRelu: return std::max(v, 0.0);
    case ActivationKind::kRelu2: return v > 0 ? v * v : 0.0;
    case ActivationKind::kIdentity: return v;
    case ActivationKind::kSitu: return a.alpha * std::tanh(v / a.alpha) / (1 + std::exp(-v));
  }
  return NAN;
}

TEST(Kernels, ActivationsTransposeAndAreAccurate) {
  std::mt19937 generator(2);
  std::normal_distribution<float> normal(0, 4);
  for (const bool gated : {true, false}) {
    for (int kind = 0; kind <= static_cast<int>(ActivationKind::kSitu); ++kind) {
      const bool bends = kind == static_cast<int>(ActivationKind::kSitu);
      if (bends && !gated) continue;
      for (const int m : {1, 16, 37, 64}) {
        for (const bool special : {false, true}) {
          const int n = 32, stride = m + 3;
          Activation a{.kind = static_cast<ActivationKind>(kind), .gated = gated};
          if (special) {
            a.alpha = 1.702f;
            a.limit = 3;
            a.up_bias = 1;
          }
          std::vector<float> gate(static_cast<std::size_t>(m * n)), up(gate.size());
          std::vector<float> gate_bias(static_cast<std::size_t>(m)), up_bias(gate_bias.size());
          for (auto* values : {&gate, &up, &gate_bias, &up_bias}) {
            for (float& v : *values) v = normal(generator);
          }
          gate[0] = up[0] = -300;  // far into both saturations
          gate.back() = up.back() = 300;
          std::vector<float> out(static_cast<std::size_t>(n * stride), -77.0f);
          kernels().activate(
              a, gated ? gate.data() : nullptr, up.data(), special ? gate_bias.data() : nullptr,
              special ? up_bias.data() : nullptr, m, n, out.data(), DType::kF32, stride);
          for (int j = 0; j < n; ++j) {
            for (int i = 0; i < m; ++i) {
              const auto at = static_cast<std::size_t>(i * n + j);
              const auto row = static_cast<std::size_t>(i);
              double u = up[at] + (special ? up_bias[row] : 0.0f);
              double expected = 0;
              if (gated) {
                double g = gate[at] + (special ? gate_bias[row] : 0.0f);
                if (special && bends) {
                  u = 3 * std::tanh(u / 3);
                } else if (special) {
                  g = std::min(g, 3.0);
                  u = std::clamp(u, -3.0, 3.0);
                }
                expected = exact_activation(a, g) * (u + a.up_bias);
              } else {
                expected = exact_activation(a, u);
              }
              ASSERT_NEAR(out[static_cast<std::size_t>(j * stride + i)], expected,
                          1e-6 * (1 + std::abs(expected) + std::abs(u)))
                  << "kind " << kind << " gated " << gated;
            }
            for (int i = m; i < stride; ++i) {
              ASSERT_EQ(out[static_cast<std::size_t>(j * stride + i)], -77.0f)
                  << "wrote past a row";
            }
          }
        }
      }
    }
  }
}

TEST(Kernels, ScatterWritesExactlyItsRows) {
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  for (const int m : {5, 16, 50}) {
    for (const int rows : {1, 16, 31}) {
      const int n = 32;
      std::vector<float> in(static_cast<std::size_t>(m * n)), bias(static_cast<std::size_t>(m));
      for (float& v : in) v = normal(generator);
      for (float& v : bias) v = normal(generator);
      std::vector<std::vector<float>> out(
          static_cast<std::size_t>(n), std::vector<float>(static_cast<std::size_t>(m + 2), 9.0f));
      std::vector<void*> addresses;
      for (auto& row : out) addresses.push_back(row.data());
      kernels().scatter(in.data(), bias.data(), m, n, rows, addresses.data(), DType::kF32);
      for (int j = 0; j < n; ++j) {
        for (int i = 0; i < m + 2; ++i) {
          const bool written = j < rows && i < m;
          const float expected =
              written ? in[static_cast<std::size_t>(i * n + j)] + bias[static_cast<std::size_t>(i)]
                      : 9.0f;
          ASSERT_EQ(out[static_cast<std::size_t>(j)][static_cast<std::size_t>(i)], expected);
        }
      }
    }
  }
}

TEST(Kernels, CombineSumsInOrder) {
  std::mt19937 generator(4);
  std::normal_distribution<float> normal;
  for (const int size : {1, 16, 100}) {
    std::vector<std::vector<float>> cells(5, std::vector<float>(static_cast<std::size_t>(size)));
    std::vector<float> weights(5);
    std::vector<const void*> addresses;
    for (std::size_t k = 0; k < 5; ++k) {
      for (float& v : cells[k]) v = normal(generator);
      weights[k] = normal(generator);
      addresses.push_back(cells[k].data());
    }
    std::vector<float> out(static_cast<std::size_t>(size));
    kernels().combine(addresses.data(), weights.data(), 5, DType::kF32, out.data(), DType::kF32,
                      size, 1, false);
    for (std::size_t i = 0; i < out.size(); ++i) {
      double expected = 0;
      for (std::size_t k = 0; k < 5; ++k) expected += double{weights[k]} * cells[k][i];
      ASSERT_NEAR(out[i], expected, 1e-5);
    }
    const std::vector<float> once = out;
    kernels().combine(addresses.data(), weights.data(), 5, DType::kF32, out.data(), DType::kF32,
                      size, 3, true);
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], 4 * once[i], 1e-4);
    kernels().combine(addresses.data(), weights.data(), 0, DType::kF32, out.data(), DType::kF32,
                      size, 1, false);
    for (const float v : out) ASSERT_EQ(v, 0.0f);
  }
}

#if defined(__x86_64__)
// Whatever instructions look codes up, with any scales, NaN included.
TEST(FourBitKernels, EveryInstructionSetHasTheSameBits) {
  std::vector<const cpu::Kernels*> sets{&cpu::baseline::table};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back(&cpu::avx2::table);
  }
  sets.push_back(&cpu::kernels());
  std::mt19937 random(1);
  const auto bytes = [&](std::size_t count) {
    std::vector<std::uint8_t> values(count);
    for (std::uint8_t& value : values) value = static_cast<std::uint8_t>(random());
    return values;
  };
  struct Form {
    DType type, scales;
    std::int64_t group;
    bool zeros;
  };
  for (const Form& form : {Form{DType::kF4E2M1, DType::kF8E8M0, 32, false},
                           {DType::kU4, DType::kBF16, 32, false},
                           {DType::kU4, DType::kF16, 128, true},
                           {DType::kU4, DType::kF32, 32, true}}) {
    MatrixView m;
    m.dtype = form.type;
    m.cols = 384;
    m.scale_dtype = form.scales;
    m.scale_cols = form.group;
    const std::vector<std::uint8_t> codes = bytes(192), scales = bytes(48);
    std::vector<std::uint8_t> zeros = bytes(12);
    for (std::uint8_t& zero : zeros) zero &= 15;
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      std::vector<std::vector<std::byte>> results;
      for (const cpu::Kernels* const set : sets) {
        results.emplace_back(384 * size_of(out));
        set->dequantize_four_bit(m, codes.data(), scales.data(),
                                 form.zeros ? zeros.data() : nullptr, m.cols / form.group,
                                 results.back().data(), out);
        EXPECT_EQ(results.back(), results.front())
            << set->name << " " << to_string(form.type) << " to " << to_string(out);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace switchyard::cpu
