// The layer kernel, compiled for one activation at a time: SWITCHYARD_KIND is an ActivationKind
// and SWITCHYARD_GATED true or false.
#include "gpu/layer_kernel.cuh"

namespace switchyard::gpu {

template <>
KernelEntry kernel_entry<ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED>() {
  return {layer_kernel<ActivationKind::SWITCHYARD_KIND, SWITCHYARD_GATED>,
          {kThreads, static_cast<std::uint32_t>(sizeof(BlockStorage) + 1024)}};
}

}  // namespace switchyard::gpu
