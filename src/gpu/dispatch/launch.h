// Enqueues the kernels of Exchange on the current device. `blocks` is the most blocks of a kernel
// that moves rows. Only await_* wait for other ranks as long as it takes, with one block each. The
// others end by themselves, so several ranks may share a GPU whatever part of it each uses. The
// blocks of a send that place rows wait too, but only briefly, and leave the rest to the receive.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/dispatch/params.h"

namespace switchyard::gpu {

// Load all kernels. A first launch would otherwise load its kernel, and loading may wait for the
// device. If ranks share the device, it may run a kernel that waits for this rank.
cudaError_t load_dispatch_kernels();
cudaError_t load_combine_kernels();

// The most blocks of a kernel. `strict`: parts of the kernel that end soon count, too.
struct MoverBlocks {
  unsigned most;
  bool strict;
};
// Sends tokens, and chooses how the blocks share the work. If `receive` is not null, that receive
// follows at once, so blocks may place rows already. Such a rank must have its device to itself,
// and have kMostEarlyExperts or fewer. Returns in `placing_blocks` how many place, at most
// blocks.most.
inline constexpr std::uint32_t kMostEarlyExperts = 512;
cudaError_t launch_dispatch_send(const ExchangeSite& site, const HandleSite& handle,
                                 DispatchSend call, const DispatchReceive* receive, Wire wire,
                                 const MoverBlocks& blocks, unsigned* placing_blocks,
                                 cudaStream_t stream);
// Waits for all tokens, and plans where they go.
cudaError_t launch_await_dispatch(const ExchangeSite& site, const HandleSite& handle,
                                  const DispatchReceive& call, cudaStream_t stream);
cudaError_t launch_place_rows(const ExchangeSite& site, const HandleSite& handle,
                              const DispatchReceive& call, unsigned blocks, cudaStream_t stream);
cudaError_t launch_combine_send(const ExchangeSite& site, const HandleSite& handle,
                                const CombineSend& call, DType dtype, unsigned blocks,
                                cudaStream_t stream);
cudaError_t launch_await_combine(const ExchangeSite& site, cudaStream_t stream);
// Requires at least one token.
cudaError_t launch_sum_tokens(const ExchangeSite& site, const HandleSite& handle,
                              const CombineReceive& call, DType dtype, unsigned blocks,
                              cudaStream_t stream);

}  // namespace switchyard::gpu
