// The memory through which a rank and the other hosts exchange chunks, and where everything is in
// it: a window for each sender and lane, and the same for what this rank sends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mapping.h"
#include "network/hosts.h"
#include "network/network.h"

namespace switchyard::network {

// Counts and tokens have a window of their own, and results another. So results never stand behind
// tokens that are not yet wanted.
enum class Lane : std::uint8_t { kDispatch, kCombine };
inline constexpr int kNumLanes = 2;

// Zero-filled memory, committed as it is touched.
class Arena {
 public:
  // Throws Error{kCapacityExceeded}.
  Arena(const Hosts& hosts, int rank, const WindowOptions& options);

  std::span<std::byte> memory() const { return {memory_.data(), memory_.bytes()}; }
  std::span<std::byte> chunk(std::uint64_t offset) const {
    return {memory_.data() + offset, chunk_bytes_};
  }

  // Where the windows of `rank` begin, by sender: every rank can tell where another's are.
  static std::uint64_t window_at(const Hosts& hosts, const WindowOptions& options, int receiver,
                                 int sender, Lane lane);
  // Where this rank's chunks for `host` are until they are sent.
  std::uint64_t outgoing_at(int host, Lane lane) const {
    return outgoing_[static_cast<std::size_t>(host)] +
           static_cast<std::uint64_t>(lane) * window_bytes_;
  }

 private:
  std::uint64_t chunk_bytes_, window_bytes_;
  std::vector<std::uint64_t> outgoing_;  // by host
  Mapping memory_;
};

}  // namespace switchyard::network
