// The layer kernel, compiled once per policy and activation. The build sets SWITCHYARD_POLICY,
// SWITCHYARD_KIND (an ActivationKind) and SWITCHYARD_GATED (true or false).
#include "gpu/layer/kernel.cuh"

namespace switchyard::gpu {

template <>
KernelEntry kernel_entry<SWITCHYARD_POLICY, ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED>() {
  using Large = SWITCHYARD_POLICY;
  using Small = SmallPass<Large>;
  return {
      layer_kernel<Small, ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED>,
      layer_kernel<Large, ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED>,
      {kThreads, static_cast<std::uint32_t>(std::max(kSharedBytes<Small>, kSharedBytes<Large>))},
      facts_of<Large>(),
      usual_storage<Large>(),
      storage_of_many<Large>()};
}

}  // namespace switchyard::gpu
