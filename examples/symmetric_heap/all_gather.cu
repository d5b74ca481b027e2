// A one-sided all-gather as a kernel: every rank puts its block into all ranks' memory, raises a
// flag there, and waits for everybody's flag. main.cpp is the same on CPU ranks.
//
//   symmetric_heap_cuda [RANKS]                    threads of this process, 2 if not said
//   switchyard launch -n 2 -- symmetric_heap_cuda  processes
//
// Rank r is on GPU r, modulo the GPUs that there are. Exit code 77: there is none.
#include <cuda_runtime_api.h>
#include <switchyard/error.h>
#include <switchyard/symmetric_heap.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <switchyard/device/peer.cuh>

#include "on_ranks.h"

using namespace switchyard;

namespace {

constexpr std::size_t kWords = 100'000;  // of each rank
constexpr std::uint32_t kBlocks = 4, kThreads = 512;
constexpr std::uint64_t kRounds = 100;

__host__ __device__ std::uint32_t word(int rank, std::size_t i, std::uint64_t round) {
  return static_cast<std::uint32_t>(rank) << 24 | static_cast<std::uint32_t>(i * 31 + round);
}

// windows: [2, ranks, kWords], used in turn; flags: [ranks]. All rounds are one launch: no host and
// no barrier stands between them. A rank that has everybody's flag of a round may put the next
// round while others still read this one, into the other window.
__global__ void all_gather(const __grid_constant__ PeerMap map, std::uint32_t* windows,
                           std::uint64_t* flags, std::uint32_t* mine, std::uint32_t* wrong) {
  // A block's part of each rank's words.
  const std::size_t part = (kWords + gridDim.x - 1) / gridDim.x;
  const std::size_t begin = min(blockIdx.x * part, kWords), end = min(begin + part, kWords);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    std::uint32_t* const window = windows + round % 2 * map.size * kWords;
    for (std::size_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      mine[i] = word(map.rank, i, round);
    }
    __syncthreads();
    for (int n = 0; n < map.size; ++n) {
      const int peer = (map.rank + n) % map.size;
      device::put_block(translate(map, window + map.rank * kWords + begin, peer), mine + begin,
                        (end - begin) * sizeof(*mine));
      // Flag r of a rank counts the blocks of rank r that have put their parts.
      device::signal_add_block(translate(map, flags + map.rank, peer), 1);
    }
    for (int peer = 0; peer < map.size; ++peer) {
      const PeerWait wait = device::wait_until_block(map, flags + peer, gridDim.x * round, peer);
      if (!wait) {
        device::give_up_block(map, wait);  // heap.check() throws on all ranks, naming the peer
        return;
      }
      for (std::size_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        if (window[peer * kWords + i] != word(peer, i, round)) atomicAdd(wrong, 1u);
      }
    }
    __syncthreads();  // all threads have read `mine`
  }
}

void require(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

// Runs one rank.
void run_rank(const World& world, int num_devices) {
  require(cudaSetDevice(world.rank() % num_devices));
  SymmetricHeap heap(world, 64 << 20, {.backend = Backend::kCuda});  // collective; all 0
  const auto ranks = static_cast<std::size_t>(world.size());
  auto* const windows = heap.allocate<std::uint32_t>(2 * ranks * kWords);
  auto* const flags = heap.allocate<std::uint64_t>(ranks);
  auto* const mine = heap.allocate<std::uint32_t>(kWords);
  auto* const wrong = heap.allocate<std::uint32_t>();
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  // Ranks may share a GPU. The first launch of a kernel loads it, which waits for what the GPU
  // does, and that may be another rank's kernel that waits for this one: so it is loaded
  // beforehand.
  cudaFuncAttributes attributes;
  require(cudaFuncGetAttributes(&attributes, all_gather));
  heap.barrier();  // all ranks have allocated, and the same

  all_gather<<<kBlocks, kThreads, 0, stream>>>(heap.peer_map(), windows, flags, mine, wrong);
  require(cudaGetLastError());
  require(cudaStreamSynchronize(stream));
  heap.check();    // throws TimeoutError, naming the rank that did not come
  heap.barrier();  // no rank's kernel runs any more: what follows may wait for the device
  std::uint32_t num_wrong = 0;
  require(cudaMemcpy(&num_wrong, wrong, sizeof num_wrong, cudaMemcpyDeviceToHost));
  require(cudaStreamDestroy(stream));
  if (num_wrong != 0) {
    throw std::runtime_error(std::to_string(num_wrong) + " words came wrong");
  }
}

}  // namespace

int main(int argc, char** argv) {
  // The streams of ranks that share a GPU need queues of their own. Before the first call of CUDA.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    std::fprintf(stderr, "there is no GPU here\n");
    return 77;
  }
  return run_on_ranks(argc, argv, 2, " on " + std::to_string(num_devices) + " GPUs",
                      static_cast<int>(kRounds),
                      [&](const World& world) { run_rank(world, num_devices); });
}
