// The limits of routing and of the gate. A plain header, for the host and its tests, too.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kMaxDeviceExperts = 1024;
// Tables of up to so many experts have a place of their own in a block's shared memory. Large
// passes of layers with more keep them in the end of the ring.
inline constexpr int kUsualExperts = 512;
inline constexpr int kMaxGateSlices = 16;
inline constexpr int kGateBoxRows = 64;
// The number of blocks that the gate is split for, whatever the launch has: the logits' bits must
// not depend on the launch.
inline constexpr std::uint32_t kNominalBlocks = 128;
// The most slots of passes in which every block routes all tokens.
inline constexpr std::uint32_t kMaxOwnSlots = 512;

}  // namespace switchyard::gpu
