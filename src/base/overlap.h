// Checks whether the arrays of a call share memory. A call that writes over what it still has to
// read, or over what it has written, would silently give wrong numbers.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "switchyard/tensor.h"

namespace switchyard {

// True if rows that stand `stride` elements apart, in either direction, share some of their
// columns.
constexpr bool is_short(std::int64_t stride, std::int64_t columns) {
  return -columns < stride && stride < columns;
}

// An array of a call: rows of contiguous bytes. `name` is the argument's. An absent array has no
// rows.
class CallArray {
 public:
  CallArray(const char* name, const void* data, std::int64_t rows, std::int64_t row_bytes,
            std::int64_t stride_bytes)
      : name_(name), rows_(rows), row_bytes_(row_bytes), stride_(stride_bytes) {
    if (data == nullptr || rows <= 0 || row_bytes <= 0) {
      rows_ = 0;
      return;
    }
    begin_ = reinterpret_cast<std::uintptr_t>(data);
    // The arithmetic is unsigned: a stride that makes no sense must not be undefined behaviour.
    const auto last = static_cast<std::int64_t>(static_cast<std::uint64_t>(rows - 1) *
                                                static_cast<std::uint64_t>(stride_bytes));
    // Rows in reverse are the same rows from the last one on.
    if (stride_bytes < 0) {
      begin_ += static_cast<std::uintptr_t>(last);
      stride_ = -stride_bytes;
      end_ = begin_ + static_cast<std::uintptr_t>(-last + row_bytes);
    } else {
      end_ = begin_ + static_cast<std::uintptr_t>(last + row_bytes);
    }
  }
  // Rows of a matrix whose columns are contiguous.
  CallArray(const char* name, const MatrixView& m)
      : CallArray(name, m.data, m.rows, m.cols * bytes(m.dtype), m.row_stride * bytes(m.dtype)) {}
  CallArray(const char* name, const SlotView& slots)
      : CallArray(name, slots.data(), 1,
                  static_cast<std::int64_t>(slots.size()) * bytes(slots.dtype()), 0) {}
  template <typename T>
  CallArray(const char* name, std::span<T> values)
      : CallArray(name, values.data(), 1, static_cast<std::int64_t>(values.size_bytes()), 0) {}

  // Contiguous values.
  template <typename T>
  static CallArray of(const char* name, const T* data, std::int64_t count) {
    return {name, data, 1, count * static_cast<std::int64_t>(sizeof(T)), 0};
  }
  // The scales of a matrix with one for every `group` columns.
  static CallArray scales(const char* name, const MatrixView& m, std::int64_t group) {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(float));
    return {name, m.scale, m.rows, (m.cols + group - 1) / group * kBytes, m.scale_stride * kBytes};
  }

 private:
  friend void require_apart(std::initializer_list<CallArray> outputs,
                            std::initializer_list<CallArray> inputs);
  static std::int64_t bytes(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }
  bool meets(const CallArray& other) const { return begin_ < other.end_ && other.begin_ < end_; }
  bool overlaps_itself() const { return rows_ > 1 && stride_ < row_bytes_; }
  // Returns false if rows lie between the other's, for arrays whose addresses meet.
  bool shares_bytes(const CallArray& other) const;
  bool has_gaps() const { return rows_ > 1 && stride_ > row_bytes_; }
  bool piece_shares_bytes(const CallArray& piece) const;

  const char* name_;
  std::uintptr_t begin_ = 0, end_ = 0;  // of the bytes, gaps between rows included
  std::int64_t rows_, row_bytes_, stride_;
};

// Throws Error{kInvalidArgument} naming an output that shares bytes with an input, with another
// output, or with itself. Arrays with gaps of different lengths between their rows count as
// sharing bytes if their addresses meet.
void require_apart(std::initializer_list<CallArray> outputs,
                   std::initializer_list<CallArray> inputs);

}  // namespace switchyard
