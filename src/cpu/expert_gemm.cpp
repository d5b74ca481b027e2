#include "cpu/expert_gemm.h"

#include <cstring>

namespace switchyard::cpu {

const float* floats_of(const VectorView& v, int first, int count, int step,
                       std::vector<float>& scratch) {
  if (v.empty()) return nullptr;
  const auto element = static_cast<std::int64_t>(size_of(v.dtype));
  const std::byte* from = static_cast<const std::byte*>(v.data) + first * v.stride * element;
  const std::int64_t stride = v.stride * step;
  const bool contiguous = stride == 1 || count <= 1;
  if (contiguous && v.dtype == DType::kF32) return reinterpret_cast<const float*>(from);
  scratch.resize(std::max(scratch.size(), static_cast<std::size_t>(count)));
  if (contiguous) {
    kernels().convert(from, v.dtype, scratch.data(), DType::kF32, count, 1);
    return scratch.data();
  }
  for (int i = 0; i < count; ++i, from += stride * element) {
    kernels().convert(from, v.dtype, &scratch[static_cast<std::size_t>(i)], DType::kF32, 1, 1);
  }
  return scratch.data();
}

std::size_t ExpertGemm::scratch_bytes() const {
  return converted_.capacity() + column_.capacity() + codes_.capacity() +
         scales_.capacity() * sizeof(float);
}

void ExpertGemm::unpack(const std::uint8_t* codes, const float* scales, std::int64_t cols,
                        float factor, void* to) {
  kernels_.dequantize(codes, scales, kQuantGroup, to, dtype(), cols);
  if (factor != 1) kernels_.convert(to, dtype(), to, dtype(), cols, factor);
}

void ExpertGemm::requantize(const std::uint16_t* row, std::int64_t cols, void* to) {
  const auto groups = static_cast<std::size_t>(protocol::ceil_div(cols, std::int64_t{kQuantGroup}));
  codes_.resize(std::max(codes_.size(), static_cast<std::size_t>(cols)));
  scales_.resize(std::max(scales_.size(), groups));
  kernels_.quantize(row, codes_.data(), scales_.data(), cols);
  kernels_.dequantize(codes_.data(), scales_.data(), kQuantGroup, to, dtype(), cols);
}

ExpertGemm::WeightRows ExpertGemm::weight_rows(const MatrixView& weight, const WeightBlock& block) {
  if (is_direct(weight, block.step)) {
    return {weight.row(block.first), weight.row_stride * block.step, weight.col_stride};
  }

  const std::int64_t cols = weight.cols;
  converted_.resize(
      std::max(converted_.size(), static_cast<std::size_t>(block.rows) * row_bytes(cols)));
  for (int i = 0; i < block.rows; ++i) {
    const std::int64_t row = block.first + std::int64_t{i} * block.step;
    const void* in = weight.row(row);
    std::byte* out = converted_.data() + static_cast<std::size_t>(i) * row_bytes(cols);
    if (weight.col_stride != 1) {
      const std::size_t size = size_of(weight.dtype);
      column_.resize(static_cast<std::size_t>(cols) * size);
      for (std::int64_t c = 0; c < cols; ++c) {
        std::memcpy(column_.data() + static_cast<std::size_t>(c) * size,
                    static_cast<const std::byte*>(in) +
                        c * weight.col_stride * static_cast<std::int64_t>(size),
                    size);
      }
      in = column_.data();
    }
    if (is_four_bit(weight.dtype)) {
      kernels_.dequantize_four_bit(
          weight, in, weight.row_scale(row),
          weight.zero == nullptr ? nullptr : weight.zero + row * weight.scale_stride,
          cols / weight.scale_cols, out, dtype());
    } else if (weight.dtype == DType::kF8E4M3) {
      static constexpr float kUnscaled = 1;
      const bool scaled = weight.scale != nullptr;
      kernels_.dequantize(static_cast<const std::uint8_t*>(in),
                          scaled ? static_cast<const float*>(weight.row_scale(row)) : &kUnscaled,
                          scaled ? weight.scale_cols : cols, out, dtype(), cols);
    } else {
      kernels_.convert(in, weight.dtype, out, dtype(), cols, 1);
    }
  }
  return {converted_.data(), cols, 1};
}

void ExpertGemm::multiply(const MatrixView& weight, const WeightBlock& block, int n, const void* x,
                          std::int64_t x_stride, float* result) {
  const WeightRows rows = weight_rows(weight, block);
  gemm_.multiply(block.rows, n, static_cast<int>(weight.cols), rows.data, rows.row_stride,
                 rows.col_stride, x, x_stride, result);
}

}  // namespace switchyard::cpu
