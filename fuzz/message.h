// A check of the message of every error, whatever bytes were read.
#pragma once

#include <cstdlib>
#include <string_view>

#include "base/shown.h"
#include "switchyard/error.h"

namespace switchyard {

// One line of a length that fits on a screen, and nothing that a terminal obeys.
inline void require_harmless(const Error& error) {
  const std::string_view message = error.what();
  if (!test::is_shown_safely(message) || message.size() > 4096) std::abort();
}

}  // namespace switchyard
