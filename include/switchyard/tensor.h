// Element types and non-owning views. Views never own: a function that hands one out says how long
// it lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ranges>
#include <type_traits>

namespace switchyard {

enum class DType : std::uint8_t { kF32, kF16, kBF16, kF8E4M3, kI32, kI64, kU8 };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kF8E4M3:
    case DType::kU8:
      return 1;
  }
  return 0;
}

// "f32", "f16", "bf16", "f8_e4m3", "i32", "i64", "u8".
const char* to_string(DType dtype);

// A matrix of `rows` x `cols` elements; element (r, c) is at index r * row_stride + c * col_stride.
// Strides are in elements, so that transposed and row-interleaved checkpoints need no repacking. A
// row_stride of 0 makes all rows the same one, as of an expanded tensor.
//
// FP8 matrices carry scales: the value of (r, c) is data(r, c) * scale(r / scale_rows, c /
// scale_cols), with scale(i, j) at scale[i * scale_stride + j]. (DeepSeek-V3's weight_scale_inv has
// scale_rows = scale_cols = 128; per-channel is scale_rows = 1, scale_cols = cols; per-tensor is
// scale_rows = rows, scale_cols = cols.)
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  const float* scale = nullptr;
  std::int64_t scale_rows = 0;
  std::int64_t scale_cols = 0;
  std::int64_t scale_stride = 0;

  bool empty() const { return data == nullptr; }
  const void* row(std::int64_t r) const {
    return static_cast<const std::byte*>(data) +
           static_cast<std::size_t>(r * row_stride) * size_of(dtype);
  }
};

// A vector of `size` elements (biases).
struct VectorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t size = 0;
  std::int64_t stride = 1;  // in elements

  bool empty() const { return data == nullptr; }
};

// One number for each slot (token, k) of a batch: [T, K], of a type known at run time, token by
// token. Made of an address and a type, or of a span or vector of i32, i64 or f32:
//   input.topk_ids = ids;                                     // std::vector<std::int64_t>
//   input.topk_weights = {weights, DType::kBF16, tokens * k};
class SlotView {
 public:
  template <typename T>
  static constexpr bool kIsElement = std::is_same_v<T, std::int32_t> ||
                                     std::is_same_v<T, std::int64_t> || std::is_same_v<T, float>;

  SlotView() = default;
  SlotView(const void* data, DType dtype, std::size_t size)
      : data_(data), size_(size), dtype_(dtype) {}
  template <typename T>
  requires kIsElement<T> SlotView(const T* data, std::size_t size)
      : SlotView(data, type_of<T>(), size) {}
  template <std::ranges::contiguous_range Range>
  requires(kIsElement<std::ranges::range_value_t<Range>>&& std::ranges::sized_range<Range>)
      // NOLINTNEXTLINE(google-explicit-constructor): what was a span is assigned everywhere
      SlotView(const Range& range)
      : SlotView(std::ranges::data(range), std::ranges::size(range)) {}

  const void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  std::size_t size() const { return size_; }  // elements
  bool empty() const { return size_ == 0; }
  SlotView first(std::size_t count) const { return {data_, dtype_, count}; }

 private:
  template <typename T>
  static constexpr DType type_of() {
    if constexpr (std::is_same_v<T, float>) return DType::kF32;
    return std::is_same_v<T, std::int64_t> ? DType::kI64 : DType::kI32;
  }

  const void* data_ = nullptr;
  std::size_t size_ = 0;
  DType dtype_ = DType::kF32;
};

}  // namespace switchyard
