// The table of compiled kernels.
#include <fmt/format.h>

#include <string>

#include "gpu/layer/params.h"
#include "switchyard/error.h"

namespace switchyard::gpu {

KernelEntry find_kernel(const Activation& activation, DType weights, DType compute, bool traced) {
  const bool is_silu = activation.kind == ActivationKind::kSilu;
  // Kernels for SiLU only come first.
#define SWITCHYARD_KERNEL(policy, silu, is_gated)                                                  \
  if (weights == policy::kNumerics.weight.storage && compute == policy::kNumerics.token.compute && \
      traced == policy::kTraced && (is_silu || !(silu)) && activation.gated == (is_gated)) {       \
    return kernel_entry<policy, silu, is_gated>();                                                 \
  }
#include "gpu/kernel_list.inc"
#undef SWITCHYARD_KERNEL
  const char* const form = activation.gated ? "gated" : "plain";
  // The kernel for any activation serves SiLU, too, and exists in all types.
  const std::string remedy =
      traced ? fmt::format("build with 'any_{}' in SWITCHYARD_GPU_TRACED_ACTIVATIONS", form)
             : "see SWITCHYARD_GPU_POLICIES in src/gpu/CMakeLists.txt";
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("no {}kernel was compiled for a {} FFN of {} weights and {} tokens with '{}'; {}",
                  traced ? "traced " : "", form, to_string(weights), to_string(compute),
                  name_of(activation), remedy));
}

}  // namespace switchyard::gpu
