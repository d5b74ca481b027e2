#include "bench/grouped_operands.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/convert.h"
#include "base/mix64.h"
#include "base/quantize.h"
#include "base/threads.h"
#include "models/random_tensor.h"
#include "reference/decode.h"
#include "reference/multiply.h"
#include "reference/reference.h"

namespace switchyard::bench {
namespace {

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

// Calls body(i) for i from 0 to count - 1, on all processors.
void for_all(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&](int) {
    try {
      for (std::int64_t i = next++; i < count; i = next++) body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  const auto most = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  Threads threads(0, static_cast<int>(std::min(most, count)), kThreadRemedy, work);
  threads.join();
  if (failure) std::rethrow_exception(failure);
}

RandomTensor random_tensor(TensorRole role, std::uint64_t seed, std::int64_t number, DType dtype,
                           std::int64_t rows, std::int64_t cols, float deviation) {
  return {.role = role,
          .dtype = dtype,
          .rows = rows,
          .cols = cols,
          .deviation = deviation,
          .key = mix64(mix64(seed ^ (static_cast<std::uint64_t>(role) << 32)) +
                       static_cast<std::uint64_t>(number))};
}

void quantise_row(std::span<const float> values, std::byte* codes, float* scales) {
  for (std::size_t first = 0; first < values.size(); first += kQuantGroup) {
    const auto group =
        values.subspan(first, std::min<std::size_t>(kQuantGroup, values.size() - first));
    float amax = 0;
    for (const float value : group) amax = std::max(amax, std::abs(value));
    const GroupScale scale = group_scale(amax);
    *scales++ = scale.scale;
    for (const float value : group) *codes++ = std::byte{f32_to_f8e4m3(value * scale.inverse)};
  }
}

double silu(double value) { return value / (1 + std::exp(-value)); }
float silu(float value) { return value / (1 + std::exp(-value)); }

float rounded_to(DType dtype, float value) {
  if (dtype == DType::kBF16) return reference::round_to_bf16(value);
  return dtype == DType::kF16 ? f16_to_f32(f32_to_f16(value)) : value;
}

float read(DType dtype, const std::byte* output, std::size_t i) {
  const void* const at = output + i * size_of(dtype);
  if (dtype == DType::kF32) return *static_cast<const float*>(at);
  const auto code = *static_cast<const std::uint16_t*>(at);
  return dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
}

// `most` numbers from 0 to count - 1, evenly spread, the first and the last among them.
std::vector<std::int64_t> spread(std::int64_t count, std::int64_t most) {
  const std::int64_t chosen = std::min(count, most);
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < chosen; ++i) {
    numbers.push_back(chosen == 1 ? 0 : i * (count - 1) / (chosen - 1));
  }
  return numbers;
}

// Rows of one expert, and their products with all of its matrix.
struct Sample {
  std::int64_t expert = 0;
  std::vector<std::int64_t> rows;  // of x, and of the packed output
  std::vector<double> x;           // [rows, k]
  std::vector<float> x32;
  std::vector<double> exact;  // [rows, n]
  std::vector<float> straightforward;
};

std::vector<Sample> choose_samples(std::span<const std::int32_t> ends) {
  constexpr std::int64_t kMostExperts = 4, kMostRows = 4;
  const auto first_row = [&](std::size_t e) { return std::int64_t{e == 0 ? 0 : ends[e - 1]}; };
  std::vector<std::size_t> hit;
  for (std::size_t e = 0; e < ends.size(); ++e) {
    if (ends[e] > first_row(e)) hit.push_back(e);
  }
  std::vector<Sample> samples;
  for (const std::int64_t i : spread(static_cast<std::int64_t>(hit.size()), kMostExperts)) {
    const std::size_t e = hit[static_cast<std::size_t>(i)];
    Sample& sample = samples.emplace_back();
    sample.expert = static_cast<std::int64_t>(e);
    for (const std::int64_t row : spread(ends[e] - first_row(e), kMostRows)) {
      sample.rows.push_back(first_row(e) + row);
    }
  }
  return samples;
}

// One value of the output: the product, or SwiGLU of two.
template <typename T>
T output_value(std::span<const T> products, std::int64_t n, bool swiglu, std::int64_t row,
               std::int64_t column) {
  const T first = products[static_cast<std::size_t>(row * n + column)];
  return swiglu ? silu(first) * products[static_cast<std::size_t>(row * n + n / 2 + column)]
                : first;
}

}  // namespace

GroupedOperands::GroupedOperands(int num_experts, int its_n, int its_k, std::int64_t num_rows,
                                 DType type, std::uint64_t seed)
    : experts(num_experts), n(its_n), k(its_k), rows(num_rows), dtype(type) {
  const auto at = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };
  const bool fp8 = dtype == DType::kF8E4M3;
  const std::int64_t groups = fp8 ? blocks_of(k, kQuantGroup) : 0;
  const float deviation = 1 / std::sqrt(static_cast<float>(k));
  const auto expert_matrix = [&](std::int64_t e) {
    return random_tensor(TensorRole::kUp, seed, e, dtype, n, k, deviation);
  };
  const RandomTensor any = expert_matrix(0);
  const auto matrix = static_cast<std::int64_t>(any.data_bytes());
  const auto scales = static_cast<std::int64_t>(any.scale_bytes());
  weights.resize(at(experts, matrix));
  weight_scales.resize(at(experts, scales));
  x.resize(at(rows, k) * size_of(rows_dtype()));
  x_scales.resize(at(rows, groups));

  const std::int64_t parts = blocks_of(any.size(), kFillBlock);
  for_all(experts * parts, [&](std::int64_t i) {
    const std::int64_t e = i / parts, part = i % parts;
    fill_block(expert_matrix(e), part,
               weights.data() + at(e, matrix) + bytes_of(dtype, part * kFillBlock));
  });
  for (std::int64_t e = 0; e < experts && scales > 0; ++e) {
    fill_scales(expert_matrix(e), weight_scales.data() + at(e, scales));
  }
  for_all(rows, [&](std::int64_t row) {
    std::byte* const out = x.data() + at(row, k) * size_of(rows_dtype());
    const DType drawn = fp8 ? DType::kF32 : rows_dtype();
    // A role that the matrices do not have, so that the values are others.
    const RandomTensor tensor = random_tensor(TensorRole::kRouter, seed, row, drawn, 1, k, 1);
    if (!fp8) return fill(tensor, out);
    std::vector<float> values(static_cast<std::size_t>(k));
    fill(tensor, reinterpret_cast<std::byte*>(values.data()));
    quantise_row(values, out, x_scales.data() + at(row, groups));
  });
}

GroupedOperands::Addresses GroupedOperands::here() const {
  return {weights.data(), x.data(), weight_scales.data(), x_scales.data()};
}

std::vector<MatrixView> GroupedOperands::matrices(const Addresses& at) const {
  std::vector<MatrixView> views;
  const RandomTensor any{.dtype = dtype, .rows = n, .cols = k};
  for (int e = 0; e < experts; ++e) {
    const auto number = static_cast<std::uint64_t>(e);
    MatrixView view{at.weights + number * any.data_bytes(), dtype, n, k, k};
    if (any.is_scaled()) {
      view.scale = at.weight_scales + number * any.scale_bytes();
      view.scale_dtype = any.scale_dtype();
      view.scale_rows = any.block_rows();
      view.scale_cols = any.block_cols();
      view.scale_stride = any.scale_cols();
    }
    views.push_back(view);
  }
  return views;
}

MatrixView GroupedOperands::first_rows(const Addresses& at, std::int64_t count) const {
  MatrixView view{at.x, rows_dtype(), count, k, k};
  if (dtype == DType::kF8E4M3) {
    view.scale = at.x_scales;
    view.scale_rows = 1;
    view.scale_cols = kQuantGroup;
    view.scale_stride = blocks_of(k, kQuantGroup);
  }
  return view;
}

std::uint64_t GroupedOperands::matrix_bytes() const {
  const auto count = static_cast<std::uint64_t>(experts);
  return (weights.size() + weight_scales.size()) / count;
}

GroupedAccuracy check_rows(const GroupedOperands& operands, std::span<const std::int32_t> ends,
                           bool swiglu, const std::byte* output) {
  const std::int64_t n = operands.n, k = operands.k;
  const MatrixView x = operands.first_rows(operands.here(), operands.rows);
  const std::vector<MatrixView> matrices = operands.matrices(operands.here());
  std::vector<Sample> samples = choose_samples(ends);
  for (Sample& sample : samples) {
    const std::size_t count = sample.rows.size();
    sample.x.resize(count * static_cast<std::size_t>(k));
    for (std::size_t i = 0; i < count; ++i) {
      reference::decode_row(x, sample.rows[i], &sample.x[i * static_cast<std::size_t>(k)]);
    }
    sample.x32.assign(sample.x.begin(), sample.x.end());
    sample.exact.resize(count * static_cast<std::size_t>(n));
    sample.straightforward.resize(sample.exact.size());
  }

  constexpr std::int64_t kRows = 64;  // of a matrix, in fp64 at a time
  const std::int64_t parts = blocks_of(n, kRows);
  for_all(static_cast<std::int64_t>(samples.size()) * parts, [&](std::int64_t i) {
    Sample& sample = samples[static_cast<std::size_t>(i / parts)];
    const std::int64_t first = i % parts * kRows, count = std::min(kRows, n - first);
    std::vector<double> w(static_cast<std::size_t>(count * k));
    for (std::int64_t r = 0; r < count; ++r) {
      reference::decode_row(matrices[static_cast<std::size_t>(sample.expert)], first + r,
                            &w[static_cast<std::size_t>(r * k)]);
    }
    std::vector<float> w32(w.begin(), w.end());
    // Weights of four bits are multiplied in bf16, to which those of INT4 are rounded.
    if (is_four_bit(operands.dtype)) {
      for (float& weight : w32) weight = bf16_to_f32(f32_to_bf16(weight));
    }
    const auto tokens = static_cast<std::int64_t>(sample.rows.size());
    reference::multiply(sample.x.data(), tokens, w.data(), count, k,
                        &sample.exact[static_cast<std::size_t>(first)], n);
    reference::multiply(sample.x32.data(), tokens, w32.data(), count, k,
                        &sample.straightforward[static_cast<std::size_t>(first)], n);
  });

  const DType type = operands.output_dtype();
  const std::int64_t columns = swiglu ? n / 2 : n;
  std::vector<double> exact;
  std::vector<float> straightforward, actual;
  for (const Sample& sample : samples) {
    for (std::size_t i = 0; i < sample.rows.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i);
      for (std::int64_t c = 0; c < columns; ++c) {
        exact.push_back(output_value<double>(sample.exact, n, swiglu, row, c));
        straightforward.push_back(
            rounded_to(type, output_value<float>(sample.straightforward, n, swiglu, row, c)));
        actual.push_back(
            read(type, output, static_cast<std::size_t>(sample.rows[i] * columns + c)));
      }
    }
  }
  // In fp32 the order of the sum counts, which is the implementation's own: a fixed bound, as of
  // run::verify().
  constexpr double kF32Bound = 1e-5;
  const double yardstick = reference::relative_error(straightforward, exact);
  return {reference::relative_error(actual, exact),
          type == DType::kF32 ? kF32Bound : 2 * yardstick};
}

}  // namespace switchyard::bench
