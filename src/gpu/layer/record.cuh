// Records the rows of each expert in a ring in device memory, where the layer records at all.
#pragma once

#include "gpu/layer/storage.cuh"
#include "protocol/recorder.h"

namespace switchyard::gpu {

// Called by one warp of one block, once the block has the rows. Passes of a layer follow one
// another, so nobody else counts steps meanwhile, and the next pass finds what this one stored.
template <typename P, typename Word>
__device__ __forceinline__ void record_routing(const Pass<P>& pass, const Word* expert_rows) {
  const protocol::RoutingRing& ring = pass.layer.ring;
  if (ring.words == nullptr) return;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t step = *ring.words;
  std::uint64_t* const slot = ring.slot(step);
  std::uint32_t* const rows = protocol::RoutingRing::rows(slot);
#pragma unroll 1
  for (std::uint32_t e = lane; e < ring.experts; e += 32) {
    rows[e] = expert_rows[e];
  }
  __syncwarp();  // all lanes have read the step
  if (lane == 0) {
    slot[0] = pass.state().life.epoch + 1;  // callers number passes from 1
    slot[1] = pass.call.tokens;
    *ring.words = step + 1;
  }
}

}  // namespace switchyard::gpu
