// Limits of the kernels of GroupedGemm that the host has to know.
#pragma once

namespace switchyard::gpu {

inline constexpr int kMostSplitRows = 64;  // of a weight-major tile whose K is split

}  // namespace switchyard::gpu
