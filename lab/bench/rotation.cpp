#include "bench/rotation.h"

#include <algorithm>

#include "gpu/device.h"

namespace switchyard::bench {

Rotation choose_rotation(std::uint64_t touched_bytes) {
  constexpr std::uint64_t kTimesCache = 8, kMostCopies = 16, kLeastPasses = 8;
  const std::uint64_t cache = gpu::device_info(gpu::current_device()).l2_bytes;
  const std::uint64_t touched = std::max<std::uint64_t>(touched_bytes, 1);
  const std::uint64_t copies =
      std::clamp<std::uint64_t>((kTimesCache * cache + touched - 1) / touched, 2, kMostCopies);
  const std::uint64_t passes = (kLeastPasses + copies - 1) / copies * copies;
  return {static_cast<int>(copies), static_cast<int>(passes)};
}

}  // namespace switchyard::bench
