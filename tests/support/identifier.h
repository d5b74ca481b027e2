// Names that gtest takes for a test's parameters.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

namespace switchyard::testing {

inline std::string identifier(std::string name) {
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

}  // namespace switchyard::testing
