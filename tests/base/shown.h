// An oracle of its own for what printable() promises, for tests and fuzzers.
#pragma once

#include <cstddef>
#include <string_view>

namespace switchyard::test {

// No byte below a blank, no delete, and UTF-8 throughout without the C1 control characters and the
// overrides of direction.
inline bool is_shown_safely(std::string_view text) {
  std::size_t more = 0;  // continuation bytes that are due
  char32_t value = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (more > 0) {
      if (byte >> 6 != 2) return false;
      value = value << 6 | (byte & 63u);
      if (--more == 0 && (value <= 0x9f || (value >= 0x202a && value <= 0x202e))) return false;
    } else if (byte < 0x80) {
      if (byte < 0x20 || byte == 0x7f) return false;
    } else {
      more = byte >> 5 == 6 ? 1 : byte >> 4 == 14 ? 2 : byte >> 3 == 30 ? 3 : 0;
      if (more == 0) return false;
      value = byte & (63u >> more);
    }
  }
  return more == 0;
}

}  // namespace switchyard::test
