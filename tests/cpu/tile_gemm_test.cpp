// Tile products of every shape and order that the engine asks the library for, beside fp64.
#include "cpu/tile_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "base/convert.h"

namespace switchyard {
namespace {

struct Order {
  std::int64_t row_stride, col_stride;
};

class TileProducts : public ::testing::TestWithParam<DType> {};

TEST_P(TileProducts, OfEveryShapeAndOrder) {
  const DType dtype = GetParam();
  if (dtype == DType::kBF16 && !cpu::has_native_bf16()) GTEST_SKIP() << "bf16 tiles become fp32";
  const cpu::SingleThreadedLibrary confined;
  cpu::TileGemm gemm(dtype);
  std::mt19937 random(7);
  // Small integers: sums are exact in fp32, in whatever order.
  std::uniform_int_distribution<int> digit(-8, 8);
  for (const int m : {1, 2, 3, 16, 17, 64, 128}) {
    for (const int n : {1, 2, 7, 16, 24, 48}) {
      for (const int k : {1, 2, 3, 8, 31, 64, 300}) {
        const Order orders[] = {{k, 1}, {k + 8, 1}, {1, m}, {1, m + 8}, {1, 4 * m + 1}};
        for (const auto [row_stride, col_stride] : orders) {
          for (const std::int64_t x_stride : {k, k + 16}) {
            std::vector<float> a(
                static_cast<std::size_t>((m - 1) * row_stride + (k - 1) * col_stride + 1));
            std::vector<float> x(static_cast<std::size_t>((n - 1) * x_stride + k));
            for (float& value : a) value = static_cast<float>(digit(random));
            for (float& value : x) value = static_cast<float>(digit(random));
            std::vector<std::uint16_t> a16(a.size()), x16(x.size());
            f32_to_bf16(a.data(), a16.data(), a.size());
            f32_to_bf16(x.data(), x16.data(), x.size());
            const bool is_bf16 = dtype == DType::kBF16;
            std::vector<float> c(static_cast<std::size_t>(m * n), std::nanf(""));
            gemm.multiply(m, n, k, is_bf16 ? static_cast<const void*>(a16.data()) : a.data(),
                          row_stride, col_stride,
                          is_bf16 ? static_cast<const void*>(x16.data()) : x.data(), x_stride,
                          c.data());
            for (int i = 0; i < m; ++i) {
              for (int j = 0; j < n; ++j) {
                double sum = 0;
                for (int p = 0; p < k; ++p) {
                  sum += double{a[static_cast<std::size_t>(i * row_stride + p * col_stride)]} *
                         x[static_cast<std::size_t>(j * x_stride + p)];
                }
                ASSERT_EQ(c[static_cast<std::size_t>(i * n + j)], sum)
                    << m << " x " << n << " x " << k << ", strides of a " << row_stride << ", "
                    << col_stride << ", of x " << x_stride << ", element " << i << ", " << j;
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, TileProducts, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& test) {
                           return test.param == DType::kF32 ? "f32" : "bf16";
                         });

}  // namespace
}  // namespace switchyard
