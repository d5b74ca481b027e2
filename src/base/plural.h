// Counts with their nouns, as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace switchyard {

// 12345 -> "12,345".
std::string format_count(std::int64_t value);
// "1 rank", "12,345 tokens". `many` is for nouns whose plural is more than an s.
std::string plural(std::int64_t count, const char* noun, const char* many = nullptr);
// Takes containers' sizes, too, which have no sign.
template <typename Count>
std::string plural(Count count, const char* noun, const char* many = nullptr) {
  return plural(static_cast<std::int64_t>(count), noun, many);
}

}  // namespace switchyard
