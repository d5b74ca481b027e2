// Random numbers for trials that a seed repeats, and what a test's environment says.
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/mix64.h"

namespace switchyard::test {

class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : generator_(seed) {}
  // Both ends included.
  int between(int first, int last) {
    return std::uniform_int_distribution<int>(first, last)(generator_);
  }

 private:
  std::mt19937_64 generator_;
};

// A hook of a layer or an exchange that delays some steps of the protocol.
inline auto random_delays(std::uint64_t seed) {
  return [seed](const auto& step) {
    thread_local std::uint64_t state = static_cast<std::uint64_t>(step.rank) * 7919 + seed;
    state = mix64(state);
    if (state % 64 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(state / 64 % 100));
    } else if (state % 16 == 0) {
      std::this_thread::yield();
    }
  };
}

// The environment variable's value, or `otherwise` where it is not set. Anything but a number ends
// the test: a soak with a mistyped length must not pass as a short one.
inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  const std::string value = text;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || value.empty()) {
    throw std::invalid_argument(std::string(variable) + " is '" + value + "', not a number");
  }
  return number;
}

// The seed of a soak's random inputs: SWITCHYARD_SOAK_SEED, or 1 if that is not set. It is printed,
// so that a failure found with another seed can be repeated.
inline std::uint64_t soak_seed() {
  const std::uint64_t seed = number_from("SWITCHYARD_SOAK_SEED", 1);
  std::printf("SWITCHYARD_SOAK_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace switchyard::test
