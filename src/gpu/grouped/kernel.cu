// The kernel of GroupedGemm, compiled once per epilogue. The build sets SWITCHYARD_KIND (an
// ActivationKind), SWITCHYARD_GATED and SWITCHYARD_ACTIVATES (true or false).
#include "gpu/grouped/kernel.cuh"

namespace switchyard::gpu {

template <>
GroupedEntry
grouped_entry<ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED, SWITCHYARD_ACTIVATES>() {
  return {grouped_kernel<ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED, SWITCHYARD_ACTIVATES>,
          sizeof(GroupedStorage)};
}

}  // namespace switchyard::gpu
