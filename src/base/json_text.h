// The one way untrusted JSON text enters the library.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "switchyard/error.h"

namespace switchyard {

// Throws Error{code} naming `source` and the byte at which the text stops being JSON, or if it
// nests deeper than 64 levels (real files: 5).
nlohmann::json parse_json(std::string_view text, ErrorCode code, const std::string& source);

// The byte at which text nests deeper than 64 levels, if it does. Looked for before parsing, so
// that a megabyte of '[' costs no allocation per level, nor a stack frame afterwards.
std::optional<std::size_t> too_deep_at(std::string_view text);

// At most 60 characters of a value, for messages.
std::string excerpt(const nlohmann::json& value);

}  // namespace switchyard
