// The stages as kernels. A worker is a warp; a warp moves a row at a time.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "all_to_all/kernels.h"
#include "all_to_all/stages.h"
#include "switchyard/device/peer.cuh"
#include "switchyard/error.h"

namespace switchyard::all_to_all {
namespace {

constexpr int kThreads = 32 * kWarpsOfBlock;
constexpr unsigned kAllLanes = ~0u;
constexpr int kColumnsOfVector = 8;  // halves in 16 bytes

void require(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw Error(ErrorCode::kSystem, std::string(call) + ": " + cudaGetErrorName(result) + ", " +
                                      cudaGetErrorString(result));
}

// Eight halves as eight floats.
struct Floats {
  float of[kColumnsOfVector];
};
__device__ __forceinline__ Floats floats_of(const uint4& halves) {
  const unsigned words[4] = {halves.x, halves.y, halves.z, halves.w};
  Floats f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    f.of[2 * i] = pair.x;
    f.of[2 * i + 1] = pair.y;
  }
  return f;
}
__device__ __forceinline__ uint4 halves_of(const Floats& f) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(f.of[2 * i], f.of[2 * i + 1]);
    words[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

class Worker {
 public:
  __device__ explicit Worker(const PeerMap& map)
      : block(static_cast<int>(blockIdx.x)),
        blocks(static_cast<int>(gridDim.x)),
        warp(static_cast<int>(threadIdx.x / 32)),
        map_(map) {}

  const int block, blocks, warp;
  static constexpr int warps = kWarpsOfBlock;
  std::uint32_t rows = 0;
  std::uint32_t waited_ns = 0;  // by this lane; four seconds are a failure in any case

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ static constexpr int lanes() { return 32; }
  __device__ __forceinline__ static std::uint32_t sum(std::uint32_t value) {
    return __reduce_add_sync(kAllLanes, value);
  }

  // Counts one more, and returns to all lanes how many there were.
  __device__ __forceinline__ static std::uint32_t next_of(std::uint32_t* counter) {
    std::uint32_t before = 0;
    if (lane() == 0) before = atomicAdd(counter, 1u);
    return __shfl_sync(kAllLanes, before, 0);
  }
  // Past the L1 cache, which may have an old value of a word that other SMs or ranks write.
  template <typename W>
  __device__ __forceinline__ static W load(const W* word) {
    return *const_cast<const volatile W*>(word);
  }
  template <typename W>
  __device__ __forceinline__ void clear(W* words, int count) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) words[i] = 0;
  }
  // For all threads of a block. True for the block that is the last to come here. The fences
  // order what every block put before its count, and all counts before the flags that the last
  // block raises.
  __device__ __forceinline__ bool last_of_grid(std::uint32_t* ticket) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;  // which puts it back to 0
      __threadfence_system();
    }
    __syncthreads();
    return last;
  }

  __device__ __forceinline__ static void put(std::uint16_t* to, const std::uint16_t* from,
                                             std::size_t bytes) {
    each_vector(to, from, static_cast<int>(bytes / sizeof(uint4)),
                [](const uint4& vector) { return vector; });
  }
  __device__ __forceinline__ static void multiply(std::uint16_t* to, const std::uint16_t* from,
                                                  int count, float factor) {
    each_vector(to, from, count / kColumnsOfVector, [&](const uint4& vector) {
      Floats f = floats_of(vector);
#pragma unroll
      for (float& value : f.of) value *= factor;
      return halves_of(f);
    });
  }
  template <typename RowOf>
  __device__ __forceinline__ static void weighted_sum(std::uint16_t* out, int columns,
                                                      int rows_to_sum, const float* weights,
                                                      const RowOf& row_of) {
    for (int v = lane(); v < columns / kColumnsOfVector; v += 32) {
      Floats sum{};
#pragma unroll 4
      for (int k = 0; k < rows_to_sum; ++k) {
        const Floats f = floats_of(reinterpret_cast<const uint4*>(row_of(k))[v]);
        const float weight = weights[k];
#pragma unroll
        for (int i = 0; i < kColumnsOfVector; ++i) sum.of[i] += weight * f.of[i];
      }
      reinterpret_cast<uint4*>(out)[v] = halves_of(sum);
    }
  }

  // For a whole warp: what its lanes put comes before the flag.
  template <typename W>
  __device__ __forceinline__ static void signal(W* flag, W value) {
    device::signal_warp(flag, value);
  }
  // Waits for flag_of(0) ... flag_of(count - 1), which peer_of(i) raises: a lane for each. False
  // to all lanes, and the heap is dead, if one does not come.
  template <typename W, typename FlagOf, typename PeerOf>
  __device__ __forceinline__ bool wait(int count, const FlagOf& flag_of, W value,
                                       const PeerOf& peer_of) {
    bool came = true;
    for (int i = lane(); i < count; i += 32) {
      const PeerWait wait = device::wait_until(map_, flag_of(i), value, peer_of(i));
      waited_ns += static_cast<std::uint32_t>(wait.waited_ns);
      if (wait) continue;
      device::give_up(map_, wait);
      came = false;
      break;
    }
    // All lanes see what those that waited saw.
    __syncwarp();
    return __all_sync(kAllLanes, came);
  }

  // The counts in flags that have come: a lane has two of them.
  struct Gathered {
    std::uint32_t low, high;
    __device__ __forceinline__ std::uint32_t of(int rank) const {
      return __shfl_sync(kAllLanes, rank < 32 ? low : high, rank % 32);
    }
  };
  __device__ __forceinline__ static Gathered gather(const std::uint64_t* flags, int count) {
    static_assert(kMaxPeers == 64);
    const auto count_in = [&](int i) {
      return i < count ? static_cast<std::uint32_t>(load(flags + i)) : 0;
    };
    return {count_in(lane()), count_in(lane() + 32)};
  }

 private:
  // Rows are whole vectors of 16 bytes at such addresses. Of a lane kAtOnce are on their way at a
  // time; the compiler would not load one behind the store of another, which it might overlap.
  template <typename Change>
  __device__ __forceinline__ static void each_vector(std::uint16_t* to, const std::uint16_t* from,
                                                     int count, const Change& change) {
    constexpr int kAtOnce = 4;
    auto* const target = reinterpret_cast<uint4*>(to);
    const auto* const source = reinterpret_cast<const uint4*>(from);
    int v = lane();
    for (; v + (kAtOnce - 1) * 32 < count; v += kAtOnce * 32) {
      uint4 vectors[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) vectors[i] = source[v + i * 32];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) target[v + i * 32] = change(vectors[i]);
    }
    for (; v < count; v += 32) target[v] = change(source[v]);
  }

  const PeerMap& map_;
};

// For all threads of a block: true if a wait of an earlier stage failed. What that stage was to
// write may not be there, so a rank must not send it.
__device__ __forceinline__ bool is_dead(const PeerMap& map) {
  const bool dead = threadIdx.x == 0 && Worker::load(&control_of(map, map.rank)->abort) != 0;
  return __syncthreads_or(dead) != 0;
}

template <Stage kStage>
__global__ void __launch_bounds__(kThreads, 2) run_stage(const __grid_constant__ Call call) {
  if (is_dead(call.map)) return;
  Worker w(call.map);
  // Written in two parts, so that no register keeps the time meanwhile.
  const auto record = [&] { return call.records + w.block * Worker::warps + w.warp; };
  if (call.records != nullptr && Worker::lane() == 0) {
    record()->begin_ns = device::detail::now_ns();
  }
  if constexpr (kStage == Stage::kDispatchSend) dispatch_send(w, call);
  if constexpr (kStage == Stage::kDispatchReceive) dispatch_receive(w, call);
  if constexpr (kStage == Stage::kExperts) multiply_by_experts(w, call);
  if constexpr (kStage == Stage::kCombineSend) combine_send(w, call);
  if constexpr (kStage == Stage::kCombineReceive) combine_receive(w, call);
  if (call.records == nullptr) return;
  __syncwarp();
  if (Worker::lane() != 0) return;
  Record& mine = *record();
  mine.end_ns = device::detail::now_ns();
  mine.waited_ns = w.waited_ns;
  mine.rows = w.rows;
  mine.valid = 1;
}

__global__ void __launch_bounds__(kMaxPeers)
    gate(const __grid_constant__ PeerMap map, std::uint64_t* flags, std::uint64_t number) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= map.size) return;
  device::signal(translate(map, flags + map.rank, rank), number);
  const PeerWait wait = device::wait_until(map, flags + rank, number, rank);
  if (!wait) device::give_up(map, wait);
}

using Kernel = void (*)(Call);
Kernel kernel_of(Stage stage) {
  switch (stage) {
    case Stage::kDispatchSend: return run_stage<Stage::kDispatchSend>;
    case Stage::kDispatchReceive: return run_stage<Stage::kDispatchReceive>;
    case Stage::kExperts: return run_stage<Stage::kExperts>;
    case Stage::kCombineSend: return run_stage<Stage::kCombineSend>;
    case Stage::kCombineReceive: break;
  }
  return run_stage<Stage::kCombineReceive>;
}

}  // namespace

int load_kernels() {
  cudaFuncAttributes attributes;
  require(cudaFuncGetAttributes(&attributes, gate), "cudaFuncGetAttributes");
  int device = 0, sms = 0, least = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
  for (const Stage stage : kStages) {
    require(cudaFuncGetAttributes(&attributes, kernel_of(stage)), "cudaFuncGetAttributes");
    int blocks = 0;
    require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_of(stage), kThreads, 0),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    least = least == 0 ? blocks : std::min(least, blocks);
  }
  return least * sms;
}

void launch(Stage stage, const Call& call, int blocks, void* stream) {
  kernel_of(
      stage)<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      call);
  require(cudaGetLastError(), to_string(stage));
}

void launch_gate(const PeerMap& map, std::uint64_t* flags, std::uint64_t number, void* stream) {
  gate<<<1, kMaxPeers, 0, static_cast<cudaStream_t>(stream)>>>(map, flags, number);
  require(cudaGetLastError(), "the launch of the gate");
}

void enqueue_fill(void* memory, int value, std::size_t bytes, void* stream) {
  require(cudaMemsetAsync(memory, value, bytes, static_cast<cudaStream_t>(stream)),
          "cudaMemsetAsync");
}
void enqueue_copy(void* to, const void* from, std::size_t bytes, void* stream) {
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
          "cudaMemcpyAsync");
}

}  // namespace switchyard::all_to_all
