// Numbers from text: the whole text or nothing. No blanks, no sign but '-', no other base, no
// trailing characters.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace switchyard {

std::optional<std::int64_t> parse_whole(std::string_view text);
// A finite decimal number.
std::optional<double> parse_real(std::string_view text);
// A whole number of bytes, with an optional kB, MB, GB, TB (1000) or KiB, MiB, GiB, TiB (1024).
std::optional<std::uint64_t> parse_bytes(std::string_view text);

}  // namespace switchyard
