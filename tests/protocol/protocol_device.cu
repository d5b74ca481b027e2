// Compiled, not run: the protocol and the arithmetic of routing as device code, so that a change
// for one engine cannot make them unusable for the other.
#include "gpu/pipeline/pace.cuh"
#include "protocol/atomics.h"
#include "protocol/heap.h"
#include "protocol/partition.h"
#include "protocol/task.h"
#include "protocol/wait.h"
#include "routing/score.h"

namespace switchyard::protocol {

__global__ void walk_protocol(Heaps heaps, Heap heap, std::uint64_t epoch, Workload work,
                              std::uint32_t* tasks) {
  std::uint32_t count = 0;
  for_each_task(work, [&](const Task& task) { count += task.index + 1; });
  gpu::ThreadPace pace;
  const std::uint32_t* word = heap.arrived(0, 1).in(heaps.mine());
  const WaitResult result = wait_until(
      heaps, epoch, 1'000'000'000, pace, [&] { return load_acquire(word) == flag_of(epoch); },
      [&] {
        return Missing{Phase::kDispatch, 0, 0, epoch, load_acquire(word)};
      });
  *tasks = result == WaitResult::kReady ? count : 0;
}

__global__ void score_one(const float* logits, float* scores) {
  scores[threadIdx.x] =
      routing::sigmoid(logits[threadIdx.x]) + routing::sqrt_softplus(logits[threadIdx.x]);
}

}  // namespace switchyard::protocol
