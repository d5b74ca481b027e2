// What is written as JSON, as another library reads it.
#pragma once

#include <nlohmann/json.hpp>

#include "base/json.h"

namespace switchyard::test {

inline nlohmann::ordered_json parsed(const Json& json) {
  return nlohmann::ordered_json::parse(json.dump());
}

}  // namespace switchyard::test
