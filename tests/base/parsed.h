// Parses text that was written as JSON, with another library.
#pragma once

#include <nlohmann/json.hpp>

#include "base/json.h"

namespace switchyard::test {

inline nlohmann::ordered_json parsed(const Json& json) {
  return nlohmann::ordered_json::parse(json.dump());
}

}  // namespace switchyard::test
