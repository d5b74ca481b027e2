// Enqueues the kernels of permute, unpermute and topk, and the one that quantises rows, on the
// current device.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/operators/params.h"

namespace switchyard::gpu {

// Load their kernels, which the first launch would otherwise do.
cudaError_t load_permute_kernels();
cudaError_t load_unpermute_kernels();
cudaError_t load_quantize_kernel();
cudaError_t launch_permute(const PermuteCall& call, cudaStream_t stream);
// Requires at least one token.
cudaError_t launch_unpermute(const UnpermuteCall& call, cudaStream_t stream);
// Requires at least one row.
cudaError_t launch_quantize(const QuantizeCall& call, cudaStream_t stream);
cudaError_t launch_topk(const TopkCall& call, cudaStream_t stream);

}  // namespace switchyard::gpu
