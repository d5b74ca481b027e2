// The limits of routing and of the gate. A plain header, for the host and its tests, too.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kMaxDeviceExperts = 512;
inline constexpr int kMaxGateSlices = 16;
inline constexpr int kGateBoxRows = 64;
// The number of blocks that the gate is split for, whatever the launch has: the logits' bits must
// not depend on the launch.
inline constexpr std::uint32_t kNominalBlocks = 128;
inline constexpr std::uint32_t kMaxOwnSlots =
    512;  // in passes in which every block routes all tokens

}  // namespace switchyard::gpu
