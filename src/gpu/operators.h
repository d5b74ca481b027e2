// The operators permute, unpermute and topk on the GPU. It includes no CUDA header.
//
// Arguments have been checked as far as that is possible without reading device memory. Each call
// enqueues one to three kernels. All throw Error{kUnsupported} for a device that the kernels do not
// run on, and in a build without CUDA.
#pragma once

#include "switchyard/grouped_gemm.h"

namespace switchyard::gpu {

// Bytes of DevicePermutation::workspace, in every build.
std::size_t permute_workspace_bytes(std::int64_t slots, int num_experts);
void permute(SlotView ids, int top_k, int num_experts, const DevicePermutation& out,
             const DeviceStream& where);
// Requires at least one token.
void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out, const DeviceStream& where);
// Requires at least one token. `spec` has passed routing::check_routable(), and is not hash-routed.
void topk(const LayerSpec& spec, const MatrixView& logits, const float* correction_bias,
          std::int32_t* ids, float* weights, const DeviceStream& where);

}  // namespace switchyard::gpu
