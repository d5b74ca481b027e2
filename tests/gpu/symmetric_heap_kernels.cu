#include <cuda_runtime_api.h>

#include "gpu/symmetric_heap_kernels.h"
#include "switchyard/device/peer.cuh"

namespace switchyard::testing {
namespace {

constexpr unsigned kThreads = 256;

__device__ std::uint8_t byte_of(int rank, std::uint64_t i, std::uint32_t round) {
  return static_cast<std::uint8_t>(i * 31 + i / 251 + static_cast<std::uint64_t>(rank) * 101 +
                                   round * 7);
}

__global__ void gather(const __grid_constant__ GatherCall call) {
  const PeerMap& map = call.map;
  const auto ranks = static_cast<std::uint64_t>(map.size);
  // A block's part of the bytes.
  const std::uint64_t part = (call.bytes + gridDim.x - 1) / gridDim.x;
  const std::uint64_t begin = min(blockIdx.x * part, call.bytes);
  const std::uint64_t end = min(begin + part, call.bytes);
  for (std::uint32_t i = 0; i < call.rounds; ++i) {
    const std::uint32_t round = call.first_round + i;
    std::uint8_t* const window = call.windows + round % 2 * ranks * call.room;
    std::uint8_t* const mine = call.source + blockIdx.x * call.room + call.shift;
    for (std::uint64_t at = begin + threadIdx.x; at < end; at += blockDim.x) {
      mine[at] = byte_of(map.rank, at, round);
    }
    __syncthreads();
    for (int n = 0; n < map.size; ++n) {
      const int peer = (map.rank + n) % map.size;
      std::uint8_t* const to = translate(
          map, window + static_cast<std::uint64_t>(map.rank) * call.room + call.shift, peer);
      if (call.by_warps) {
        const std::uint64_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
        const std::uint64_t share = (end - begin + warps - 1) / warps;
        const std::uint64_t from = min(begin + warp * share, end);
        const std::uint64_t until = min(from + share, end);
        device::put_warp(to + from, mine + from, until - from);
      } else {
        device::put_block(to + begin, mine + begin, end - begin);
      }
      device::signal_add_block(translate(map, call.flags + map.rank, peer), 1);
    }
    for (int peer = 0; peer < map.size; ++peer) {
      const PeerWait wait = device::wait_until_block(map, call.flags + peer,
                                                     std::uint64_t{call.blocks} * round, peer);
      if (!wait) {
        device::give_up_block(map, wait);
        if (threadIdx.x == 0 && blockIdx.x == 0) *call.failed = wait;
        return;
      }
      const std::uint8_t* const from =
          window + static_cast<std::uint64_t>(peer) * call.room + call.shift;
      std::uint32_t wrong = 0;
      for (std::uint64_t at = threadIdx.x + blockIdx.x * blockDim.x; at < call.bytes;
           at += blockDim.x * gridDim.x) {
        wrong += from[at] != byte_of(peer, at, round);
      }
      if (wrong != 0) atomicAdd(call.wrong, wrong);
    }
    // Its own source is written again in the next round: all puts have read it.
    __syncthreads();
  }
}

__global__ void ring(const __grid_constant__ RingCall call) {
  const PeerMap& map = call.map;
  const int next = (map.rank + 1) % map.size, before = (map.rank + map.size - 1) % map.size;
  const auto value_of = [](int rank, std::uint32_t round) {
    return std::uint64_t{round} << 32 | static_cast<std::uint32_t>(rank * 77 + 5);
  };
  for (std::uint32_t i = 0; i < call.rounds; ++i) {
    const std::uint32_t round = call.first_round + i;
    PeerWait wait = device::wait_until(map, call.taken, round - 1, next);
    if (wait) {
      device::put_value(translate(map, call.value, next), value_of(map.rank, round));
      device::signal(translate(map, call.flag, next), round);
      wait = device::wait_until(map, call.flag, round, before, Until::kEqual);
    }
    if (!wait) {
      device::give_up(map, wait);
      *call.failed = wait;
      return;
    }
    if (*call.value != value_of(before, round)) ++*call.wrong;
    device::signal(translate(map, call.taken, before), round);
  }
}

__global__ void stall(const __grid_constant__ StallCall call) {
  const PeerWait wait = device::wait_until_block(call.map, call.flag, 1, call.peer, Until::kAtLeast,
                                                 call.deadline_ns);
  if (call.gives_up) device::give_up_block(call.map, wait);
  if (threadIdx.x == 0) *call.outcome = wait;
}

int load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace

int load_heap_kernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(gather), reinterpret_cast<const void*>(ring),
        reinterpret_cast<const void*>(stall)}) {
    if (const int error = load(kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int launch_gather(const GatherCall& call, void* stream) {
  gather<<<call.blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}
int launch_ring(const RingCall& call, void* stream) {
  ring<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}
int launch_stall(const StallCall& call, void* stream) {
  stall<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}

}  // namespace switchyard::testing
