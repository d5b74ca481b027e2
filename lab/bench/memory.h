// Arrays of calls in the memory of the engine that makes them, and tokens to fill them with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/convert.h"
#include "gpu/device.h"
#include "switchyard/routing.h"
#include "switchyard/world.h"

namespace switchyard::bench {

class Memory {
 public:
  Memory(Backend backend, std::size_t bytes)
      : host_(backend == Backend::kCpu ? bytes : 0),
        device_(backend == Backend::kCuda ? gpu::DeviceBuffer(bytes) : gpu::DeviceBuffer()) {}
  template <typename T>
  Memory(Backend backend, const std::vector<T>& from) : Memory(backend, from.size() * sizeof(T)) {
    if (device_.data() != nullptr) {
      device_.upload(from.data(), device_.bytes());
    } else if (!host_.empty()) {
      std::memcpy(host_.data(), from.data(), host_.size());
    }
  }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(device_.data() != nullptr ? device_.data() : host_.data());
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> values(std::max(host_.size(), device_.bytes()) / sizeof(T));
    if (device_.data() != nullptr) {
      device_.download(values.data(), device_.bytes());
    } else if (!host_.empty()) {
      std::memcpy(values.data(), host_.data(), host_.size());
    }
    return values;
  }

 private:
  std::vector<std::byte> host_;
  gpu::DeviceBuffer device_;
};

// One rank's tokens in bf16 and their routing, of which every expert gets as much.
struct RankTokens {
  RankTokens(std::int64_t tokens, int columns, int experts, int top_k, std::uint64_t seed)
      : hidden(static_cast<std::size_t>(columns)),
        x(static_cast<std::size_t>(tokens) * hidden),
        routing(synthetic_routing(static_cast<int>(tokens), experts, top_k, 1.0, seed)) {
    std::uint64_t state = seed * 2 + 1;
    for (std::uint16_t& value : x) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = f32_to_bf16(static_cast<float>(static_cast<std::int32_t>(state >> 33) - (1 << 30)) *
                          0x1p-30f);
    }
  }

  std::size_t hidden;
  std::vector<std::uint16_t> x;
  SyntheticRouting routing;

  // The elements of combined results `y` that are wrong, where experts return the tokens that they
  // get, or rows of ones: a token's sum is the token times the sum of its weights.
  struct Wrong {
    std::size_t token, column;
    double found, expected;
  };
  std::vector<Wrong> wrong_sums(const std::vector<std::uint16_t>& y, bool of_ones = false) const {
    // Weights multiply and sums are rounded on the way, once each.
    constexpr double kRoundings = 3 * 0x1p-8;
    const std::size_t tokens = x.size() / hidden, top_k = routing.weights.size() / tokens;
    std::vector<Wrong> wrong;
    for (std::size_t t = 0; t < tokens; ++t) {
      double sum = 0;
      for (std::size_t k = 0; k < top_k; ++k) {
        sum += static_cast<double>(routing.weights[t * top_k + k]);
      }
      for (std::size_t c = 0; c < hidden; ++c) {
        const double token = of_ones ? 1 : static_cast<double>(bf16_to_f32(x[t * hidden + c]));
        const double expected = sum * token;
        const double found = static_cast<double>(bf16_to_f32(y[t * hidden + c]));
        if (std::abs(found - expected) <= kRoundings * std::abs(expected)) continue;
        wrong.push_back({t, c, found, expected});
      }
    }
    return wrong;
  }
};

}  // namespace switchyard::bench
