// Lists in messages.
#pragma once

#include <fmt/core.h>

#include <concepts>
#include <string>
#include <string_view>

namespace switchyard {

// Returns "1, 2, 3". It replaces fmt::join(), which costs every file that uses it a second to
// compile.
template <typename Items>
std::string join(const Items& items, std::string_view separator) {
  std::string text;
  bool first = true;
  for (const auto& item : items) {
    if (!first) text += separator;
    first = false;
    if constexpr (std::convertible_to<decltype(item), std::string_view>) {
      text += item;
    } else {
      text += fmt::format("{}", item);
    }
  }
  return text;
}

}  // namespace switchyard
