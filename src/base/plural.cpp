#include "base/plural.h"

#include <fmt/core.h>

namespace switchyard {

std::string format_count(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t sign = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > sign + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string plural(std::int64_t count, const char* noun, const char* many) {
  const std::string digits = format_count(count);
  if (count == 1) return fmt::format("{} {}", digits, noun);
  return many != nullptr ? fmt::format("{} {}", digits, many) : fmt::format("{} {}s", digits, noun);
}

}  // namespace switchyard
