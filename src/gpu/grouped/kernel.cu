// The kernel of GroupedGemm, compiled once for each of: no activation, a plain one, a gated one.
// The build sets SWITCHYARD_CONFIG (BF16Grouped, FP8Grouped, and so on), SWITCHYARD_GATED and
// SWITCHYARD_ACTIVATES (true or false).
#include "gpu/grouped/kernel.cuh"

namespace switchyard::gpu {

template <>
GroupedEntry grouped_entry<SWITCHYARD_CONFIG, SWITCHYARD_GATED, SWITCHYARD_ACTIVATES>() {
  return {grouped_kernel<SWITCHYARD_CONFIG, SWITCHYARD_GATED, SWITCHYARD_ACTIVATES>,
          sizeof(GroupedStorage<SWITCHYARD_CONFIG>), SWITCHYARD_CONFIG::kNumerics,
          SWITCHYARD_CONFIG::kTile};
}

}  // namespace switchyard::gpu
