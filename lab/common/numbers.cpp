#include "common/numbers.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

namespace switchyard {

std::optional<std::int64_t> parse_whole(std::string_view text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [parsed_to, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || parsed_to != end) return std::nullopt;
  return value;
}

std::optional<double> parse_real(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [parsed_to, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || parsed_to != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  struct Unit {
    std::string_view name;
    std::uint64_t factor;
  };
  constexpr Unit kUnits[] = {
      {"TiB", std::uint64_t{1} << 40},
      {"GiB", std::uint64_t{1} << 30},
      {"MiB", std::uint64_t{1} << 20},
      {"KiB", std::uint64_t{1} << 10},
      {"TB", 1'000'000'000'000},
      {"GB", 1'000'000'000},
      {"MB", 1'000'000},
      {"kB", 1'000},
      {"B", 1},
  };
  std::uint64_t factor = 1;
  for (const Unit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    text.remove_suffix(unit.name.size());
    factor = unit.factor;
    break;
  }
  const std::optional<std::int64_t> number = parse_whole(text);
  std::uint64_t bytes = 0;
  if (!number || *number < 0 ||
      __builtin_mul_overflow(static_cast<std::uint64_t>(*number), factor, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

}  // namespace switchyard
