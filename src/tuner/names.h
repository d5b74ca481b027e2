// A value of an enum by the name that to_string() gives it.
#pragma once

#include <fmt/core.h>

#include <span>
#include <string>
#include <string_view>

#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::tuner {

// Throws Error{kInvalidArgument}: "`what` is 'x'; use a, b, c".
template <typename Enum>
Enum named(const char* what, std::string_view name, std::span<const Enum> all) {
  std::string names;
  for (const Enum value : all) {
    if (name == to_string(value)) return value;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", to_string(value));
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is '{}'; use one of {}", what, printable(name), names));
}

}  // namespace switchyard::tuner
