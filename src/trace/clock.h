// The clock that the traces of all ranks of a host use.
#pragma once

#include <chrono>
#include <cstdint>

namespace switchyard::trace {

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace switchyard::trace
