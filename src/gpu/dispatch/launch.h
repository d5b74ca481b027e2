// Enqueues the kernels of Exchange on the current device. `blocks` is the most blocks of a kernel
// that moves rows. Only await_* wait for other ranks as long as it takes, with one block each: the
// others end by themselves, so several ranks may share a GPU whatever part of it each uses. The
// blocks of a send that place rows wait too, for a time that is bounded and short: what they do not
// get done is left to the receive.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/dispatch/params.h"

namespace switchyard::gpu {

// Load all kernels. The first launch of one would otherwise load it, and that may wait for the
// device: for a kernel that waits for this rank, if ranks share the device.
cudaError_t load_dispatch_kernels();
cudaError_t load_combine_kernels();

// The blocks that a kernel may have; not one more if `strict`, though it has parts that end soon.
struct MoverBlocks {
  unsigned most;
  bool strict;
};
// Sets how call's blocks share the work. `receive`, if not null: the call's receive follows at
// once, so blocks may place rows already; for a rank alone on its device, with kMostEarlyExperts or
// fewer. Returns in `placers` how many do, at most blocks.most.
inline constexpr std::uint32_t kMostEarlyExperts = 512;
cudaError_t launch_dispatch_send(const ExchangeSite& site, const HandleSite& handle,
                                 DispatchSend call, const DispatchReceive* receive, Wire wire,
                                 const MoverBlocks& blocks, unsigned* placers, cudaStream_t stream);
// Waits for all tokens, and plans where they go.
cudaError_t launch_await_dispatch(const ExchangeSite& site, const HandleSite& handle,
                                  const DispatchReceive& call, cudaStream_t stream);
cudaError_t launch_place_rows(const ExchangeSite& site, const HandleSite& handle,
                              const DispatchReceive& call, unsigned blocks, cudaStream_t stream);
cudaError_t launch_combine_send(const ExchangeSite& site, const HandleSite& handle,
                                const CombineSend& call, DType dtype, unsigned blocks,
                                cudaStream_t stream);
cudaError_t launch_await_combine(const ExchangeSite& site, cudaStream_t stream);
// At least one token.
cudaError_t launch_sum_tokens(const ExchangeSite& site, const HandleSite& handle,
                              const CombineReceive& call, DType dtype, unsigned blocks,
                              cudaStream_t stream);

}  // namespace switchyard::gpu
