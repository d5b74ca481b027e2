// The record of what a layer routed: a ring of its last steps, in the engine's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace switchyard::protocol {

// Layout, in words of 64 bits: the number of steps recorded so far, then a slot for each of the
// last `slots` steps: its epoch, this rank's tokens, and the rows of each expert (or place), two to
// a word. Nobody resets the number, so a reader knows how many steps were overwritten.
struct RoutingRing {
  std::uint64_t* words = nullptr;  // null: nothing is recorded
  std::uint32_t slots = 0;
  std::uint32_t experts = 0;

  static constexpr std::uint32_t kRowsAt = 2;  // words of a slot before the experts' rows

  SWITCHYARD_HOST_DEVICE std::size_t slot_words() const {
    return kRowsAt + (std::size_t{experts} + 1) / 2;
  }
  SWITCHYARD_HOST_DEVICE std::size_t num_words() const { return 1 + slots * slot_words(); }
  SWITCHYARD_HOST_DEVICE std::uint64_t* slot(std::uint64_t step) const {
    return words + 1 + step % slots * slot_words();
  }
  SWITCHYARD_HOST_DEVICE static std::uint32_t* rows(std::uint64_t* slot) {
    return reinterpret_cast<std::uint32_t*>(slot + kRowsAt);
  }
};

}  // namespace switchyard::protocol
