// FNV-1a, a hash for names that every build computes alike.
#pragma once

#include <cstdint>
#include <string_view>

namespace switchyard {

inline constexpr std::uint64_t kFnvBasis = 0xcbf2'9ce4'8422'2325;

inline std::uint64_t fnv1a(std::uint64_t hash, std::string_view text) {
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x0000'0100'0000'01b3;
  }
  return hash;
}

}  // namespace switchyard
