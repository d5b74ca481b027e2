#include "cpu/split.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "base/convert.h"
#include "base/origin.h"
#include "cpu/expert_gemm.h"

namespace switchyard::cpu {

namespace {

// Everything by which the library may choose instructions, but for the number of tokens.
using Shape = std::array<std::int64_t, 5>;  // element type, m, k, strides of the weight

// Numbers in [-1, 1) with no pattern that rounding could hide.
std::vector<std::byte> random_elements(DType dtype, std::size_t count, std::uint32_t state) {
  std::vector<std::byte> elements(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
    if (dtype == DType::kF32) {
      std::memcpy(&elements[i * 4], &value, 4);
    } else {
      const std::uint16_t code = f32_to_bf16(value);
      std::memcpy(&elements[i * 2], &code, 2);
    }
  }
  return elements;
}

// Multiplies tiles of all heights, each the first and the last rows of the highest, and compares.
bool product_ignores_height(DType dtype, const Shape& shape, const protocol::TileShape& tile) {
  const int m = static_cast<int>(shape[1]), k = static_cast<int>(shape[2]);
  const std::int64_t row_stride = shape[3], col_stride = shape[4];
  const auto u = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  const std::vector<std::byte> a =
      random_elements(dtype, u((m - 1) * row_stride + (k - 1) * col_stride + 1), 1);
  const std::vector<std::byte> x = random_elements(dtype, u(std::int64_t{tile.max_height} * k), 2);
  const SingleThreadedLibrary confined;
  TileGemm gemm(dtype);
  const auto multiply = [&](int first, int n) {
    std::vector<float> c(u(std::int64_t{m} * n));
    gemm.multiply(m, n, k, a.data(), row_stride, col_stride,
                  x.data() + u(std::int64_t{first} * k) * size_of(dtype), k, c.data());
    return c;
  };
  const std::vector<float> all = multiply(0, tile.max_height);
  for (int n = tile.granule; n < tile.max_height; n += tile.granule) {
    for (const int first : {0, tile.max_height - n}) {
      const std::vector<float> some = multiply(first, n);
      for (int i = 0; i < m; ++i) {
        if (std::memcmp(&some[u(std::int64_t{i} * n)],
                        &all[u(std::int64_t{i} * tile.max_height + first)],
                        u(n) * sizeof(float)) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

bool bits_ignore_height(const LayerState& layer) {
  const ExpertGemm gemm(layer.gemm);
  std::set<Shape> shapes;
  const auto add = [&](const MatrixView& weight, int rows_per_task) {
    const ExpertGemm::Strides strides = gemm.strides_of(weight);
    const auto rows = static_cast<int>(weight.rows);
    for (const int m : {std::min(rows, rows_per_task), rows % rows_per_task}) {
      if (m == 0) continue;
      shapes.insert(
          {static_cast<std::int64_t>(layer.gemm), m, weight.cols, strides.row, strides.col});
    }
  };
  for (const Ffn& expert : layer.experts) {
    if (layer.spec.activation.gated) add(expert.weights->gate, expert.gemm1_rows);
    add(expert.weights->up, expert.gemm1_rows);
    add(expert.weights->down, expert.gemm2_rows);
  }
  struct Known {
    std::mutex mutex;
    std::map<Shape, bool> shapes;
  };
  static constinit PerProcess<Known> of_process;
  Known& known = of_process.get();
  const std::lock_guard lock(known.mutex);
  return std::all_of(shapes.begin(), shapes.end(), [&](const Shape& shape) {
    const auto [at, unknown] = known.shapes.try_emplace(shape, false);
    if (unknown) at->second = product_ignores_height(layer.gemm, shape, layer.tile);
    return at->second;
  });
}

std::chrono::nanoseconds patience_for(const LayerState& layer) {
  // Bytes of host memory that one thread reads in a nanosecond, about. Half or twice as many made
  // no measurable difference (docs/lab/ranks-and-arrivals.md).
  constexpr double kBytesPerNanosecond = 10;
  // Counts of ranks that start together come within this time, and so does a thread's wake-up.
  constexpr std::chrono::nanoseconds kLeast = std::chrono::microseconds(100);
  double bytes = 0;
  if (!layer.experts.empty()) {
    const FfnWeights& w = *layer.experts[0].weights;
    for (const MatrixView* matrix : {&w.gate, &w.up, &w.down}) {
      if (matrix->empty()) continue;
      bytes += static_cast<double>(bytes_of(matrix->dtype, matrix->rows * matrix->cols));
    }
  }
  const std::chrono::nanoseconds reading(static_cast<std::int64_t>(bytes / kBytesPerNanosecond));
  return std::max(kLeast, reading);
}

}  // namespace switchyard::cpu
