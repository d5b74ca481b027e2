// How timed passes take turns on copies of their weights.
#pragma once

#include <cstdint>

namespace switchyard::bench {

// {1, 1}: one copy, and each pass is timed by itself.
struct Rotation {
  int copies = 1;  // of the weights
  int passes = 1;  // timed together
};

// Chooses so many copies that a pass's weights are read again only after eight times what the
// current device's L2 cache holds, but at least 2 and at most 16.
Rotation choose_rotation(std::uint64_t touched_bytes);

}  // namespace switchyard::bench
