// Sizes that the hardware fixes.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

inline constexpr int kWarpgroup = 128;  // threads that issue one matrix instruction together
// Weight or token rows of one warpgroup matrix instruction.
inline constexpr int kInstructionRows = 64;
// Operands lie in rows of so many bytes. Eight rows make one atom of the swizzle.
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes;
// Blocks of a cluster, where blocks come in clusters.
inline constexpr std::uint32_t kPair = 2;

}  // namespace switchyard::gpu
