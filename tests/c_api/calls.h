// Arguments of tests for the C interface, and what it says.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <source_location>
#include <string_view>
#include <vector>

#include "switchyard/c.h"

namespace switchyard::testing {

inline sy_error last_error() {
  sy_error error = SY_ERROR_INIT;
  EXPECT_EQ(sy_last_error(&error), SY_OK);
  return error;
}

// A call that returned `status` was to fail with `expected`, and its message has `text`.
inline void expect_failed(sy_status status, sy_status expected, const char* text,
                          std::source_location where = std::source_location::current()) {
  const ::testing::ScopedTrace trace(where.file_name(), static_cast<int>(where.line()), text);
  EXPECT_EQ(status, expected) << last_error().message;
  EXPECT_NE(std::string_view(last_error().message).find(text), std::string_view::npos)
      << last_error().message;
}

template <typename T>
sy_tensor tensor(std::vector<T>& values, sy_dtype dtype, std::vector<std::int64_t> shape) {
  sy_tensor t{};
  t.data = values.data();
  t.dtype = dtype;
  t.ndim = static_cast<std::int32_t>(shape.size());
  t.device_type = SY_CPU;
  std::int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.shape[d] = shape[static_cast<std::size_t>(d)];
    t.strides[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

}  // namespace switchyard::testing
