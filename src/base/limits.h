// Bounds of what callers may ask for. They are checked before anything is allocated, started or
// waited for: a number that is wrong by a few zeros must not take the machine's memory first.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <limits>

#include "switchyard/error.h"

namespace switchyard {

// Threads of a rank. The largest hosts have some 2,000.
inline constexpr int kMostThreads = 4096;
// Tokens of a rank in a pass or a dispatch: a token and its slot have a word together.
inline constexpr int kMostTokens = 1 << 26;
// Experts of an operator.
inline constexpr int kMostGroupedExperts = 1024;
// Rows of an operator or an exchange are numbered by an i32.
inline constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();

// Throws Error{kInvalidArgument} for a value outside of [low, high]. `name` is the option's. `note`
// follows its bounds: " (0: chosen automatically)".
inline void require_within(const char* name, std::int64_t value, std::int64_t low,
                           std::int64_t high, const char* note = "") {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is {}; use a value in [{}, {}]{}", name, value, low, high, note));
}

// Checks options that all engines have.
inline void require_threads(std::int64_t num_threads) {
  require_within("num_threads", num_threads, 0, kMostThreads, " (0: chosen automatically)");
}
inline void require_max_tokens(std::int64_t max_tokens) {
  require_within("max_tokens", max_tokens, 1, kMostTokens);
}
// (Whether there is such a device, and whether it has as many SMs, is known when it is asked.)
inline void require_device(std::int64_t device) {
  require_within("device", device, -1, std::numeric_limits<std::int32_t>::max(),
                 " (-1: the current one)");
}
inline void require_sms(const char* name, std::int64_t sms) {
  require_within(name, sms, 0, std::numeric_limits<std::int32_t>::max());
}

}  // namespace switchyard
