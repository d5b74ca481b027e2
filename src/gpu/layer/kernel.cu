// The layer kernel, compiled once per policy, for SiLU and for any activation, gated and plain. The
// build sets SWITCHYARD_POLICY, SWITCHYARD_SILU and SWITCHYARD_GATED (true or false).
#include "gpu/layer/kernel.cuh"

namespace switchyard::gpu {

template <>
KernelEntry kernel_entry<SWITCHYARD_POLICY, SWITCHYARD_SILU, SWITCHYARD_GATED>() {
  using Large = SWITCHYARD_POLICY;
  using Small = SmallPass<Large>;
  return {
      layer_kernel<Small, SWITCHYARD_SILU, SWITCHYARD_GATED>,
      layer_kernel<Large, SWITCHYARD_SILU, SWITCHYARD_GATED>,
      {kThreads, static_cast<std::uint32_t>(std::max(kSharedBytes<Small>, kSharedBytes<Large>))},
      facts_of<Large>(),
      usual_storage<Large>(),
      storage_of_many<Large>(),
      low_entry<Large, SWITCHYARD_SILU, SWITCHYARD_GATED>()};
}

}  // namespace switchyard::gpu
