// Numbers that fix how far routing and the gate reach. Plain, for the host and its tests, too.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kMaxDeviceExperts = 512;
inline constexpr int kMaxGateSlices = 16;
inline constexpr int kGateBoxRows = 64;
// What the gate is cut up for, whatever the number of blocks: its bits must not depend on that.
inline constexpr std::uint32_t kNominalBlocks = 128;
inline constexpr std::uint32_t kMaxOwnSlots = 512;  // of passes that every block routes

}  // namespace switchyard::gpu
