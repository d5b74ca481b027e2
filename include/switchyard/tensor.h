// Element types and non-owning views. Views never own: a function that hands one out says how long
// it lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ranges>
#include <type_traits>

namespace switchyard {

enum class DType : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kI32,
  kI64,
  kU8,
  // Types of four bits, for weights only. Two share a byte: the even column has the low half.
  kF4E2M1,  // 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: MXFP4
  kU4,      // 0 to 15: INT4, whose 0 is 8 unless the matrix has zero points
  // 2^(code - 127), and NaN for 255. Scales of four-bit matrices only.
  kF8E8M0,
};

constexpr bool is_four_bit(DType dtype) { return dtype == DType::kF4E2M1 || dtype == DType::kU4; }

// Bytes of one element; 0 for types of four bits, of which bytes_of() counts.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kI64: return 8;
    case DType::kF8E4M3:
    case DType::kU8:
    case DType::kF8E8M0: return 1;
    case DType::kF4E2M1:
    case DType::kU4: return 0;
  }
  return 0;
}

// Bytes of `count` elements that begin at a whole byte; `count` may be negative, as strides are.
constexpr std::int64_t bytes_of(DType dtype, std::int64_t count) {
  return is_four_bit(dtype) ? count / 2 + count % 2
                            : count * static_cast<std::int64_t>(size_of(dtype));
}

// "f32", "f16", "bf16", "f8_e4m3", "i32", "i64", "u8", "f4_e2m1", "u4", "f8_e8m0".
const char* to_string(DType dtype);

// Columns that share a scale in MXFP4.
inline constexpr std::int64_t kMxGroup = 32;

// A matrix of `rows` x `cols` elements; element (r, c) is at index r * row_stride + c * col_stride.
// Strides are in elements, so that transposed and row-interleaved checkpoints need no repacking. A
// row_stride of 0 makes all rows the same one, as of an expanded tensor.
//
// Quantised matrices carry scales, numbers of `scale_dtype`: scale(i, j) is at index i *
// scale_stride + j, and belongs to the elements (r, c) with r / scale_rows = i and c / scale_cols =
// j. The value of an element is, with the scale s of its block,
//   f8_e4m3  code * s; scales are f32, and blocks of any size. (DeepSeek-V3's weight_scale_inv has
//            scale_rows = scale_cols = 128; per-channel is scale_rows = 1, scale_cols = cols;
//            per-tensor is scale_rows = rows, scale_cols = cols.)
//   f4_e2m1  code * s: MXFP4; scales are f8_e8m0, one for 32 columns of a row
//   u4       (code - z) * s: INT4; scales are f32, bf16 or f16, one for 32 or 128 columns of a row.
//            z is 8, or the element of `zero` with the index of the scale.
// Four-bit matrices have contiguous columns (col_stride 1), a whole number of groups of them, and
// an even row_stride.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  const void* scale = nullptr;
  std::int64_t scale_rows = 0;
  std::int64_t scale_cols = 0;
  std::int64_t scale_stride = 0;
  DType scale_dtype = DType::kF32;
  const std::uint8_t* zero = nullptr;  // u4 only: a byte for each scale, 0 to 15

  bool empty() const { return data == nullptr; }
  const void* row(std::int64_t r) const {
    return static_cast<const std::byte*>(data) + bytes_of(dtype, r * row_stride);
  }
  const float* f32_scale() const { return static_cast<const float*>(scale); }
  // The first scale of row r.
  const void* row_scale(std::int64_t r) const {
    return static_cast<const std::byte*>(scale) +
           bytes_of(scale_dtype, r / scale_rows * scale_stride);
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
