// The queue through which a block's scheduler hands tasks to its other roles, in the order in which
// each of them walks them.
#pragma once

#include "gpu/pipeline/trace.cuh"
#include "gpu/ptx/cluster.cuh"
#include "gpu/schedule/progress.cuh"

namespace switchyard::gpu {

// Slots for the task in work, which the math warps read again, and for the tasks after it.
inline constexpr std::uint32_t kTaskSlots = 4;
inline constexpr std::uint32_t kNoMore = 1u << 31;  // a bit of QueueStorage::handed_out

struct QueueStorage {
  alignas(16) TileTask tasks[kTaskSlots];
  alignas(8) std::uint64_t task_full[kTaskSlots], task_empty[kTaskSlots], demand, ticket_full;
  std::uint32_t ticket;  // from the scheduler of the pair's first block to that of the second
  // The number of tasks handed out; with kNoMore set once a math warp has given up waiting for
  // another.
  std::uint32_t handed_out;
};

template <typename P>
struct Queue {
  Lifetime life;
  QueueStorage& block;
  const std::uint32_t& paired;
  TileTable<P> table;
  const WorkState& work;
  Tracer<P::kTraced> trace;

  __device__ __forceinline__ void trace_task(TraceRole role, std::uint32_t index,
                                             const TileTask& task) const {
    if constexpr (P::kTraced) {
      const TraceKind kind = task.kind == TaskKind::kGemm1   ? TraceKind::kGemm1
                             : task.kind == TaskKind::kGemm2 ? TraceKind::kGemm2
                                                             : TraceKind::kCombine;
      const std::uint32_t log2_splits = task.kind == TaskKind::kGemm2 ? work.log2_splits : 0;
      const bool routed = task.kind != TaskKind::kCombine && task.shared == 0;
      trace.subject(role, index,
                    {kind, static_cast<std::int32_t>(task.tile),
                     static_cast<std::int32_t>((task.block << log2_splits) + task.split),
                     routed ? static_cast<std::int32_t>(table.first_expert() + task.expert) : -1,
                     static_cast<std::int32_t>(task.rows)});
      trace.stamp(role, index, &TraceRecord::given);
    }
  }
};

// The queue of tasks as one reader sees it.
template <typename P>
class TaskReader {
 public:
  __device__ explicit TaskReader(const Queue<P>& queue) : queue_(queue) {}

  // Waits for the next task; returns null if the pass was given up. The task stays until one lane
  // of the warp has called release(). Math warps use it, and release the task when they have stored
  // their tile. All of them get the same answer, because in a task they meet at barriers without
  // deadlines.
  __device__ const TileTask* await() {
    const TileTask* task = await_alone(count_++);
    if (task == nullptr && (atomicOr(&queue_.block.handed_out, kNoMore) & ~kNoMore) >= count_) {
      do {
        task = await_alone(count_ - 1);
      } while (task == nullptr);  // the scheduler is about to arrive
    }
    return task;
  }
  // Returns a copy of the next task, for the other roles. The caller is a thread or, with kWarp, a
  // whole warp, whose lanes all get the same.
  template <bool kWarp>
  __device__ TileTask next() {
    TileTask task;
    task.kind = TaskKind::kNone;
    const TileTask* const next = await_alone(count_++);
    if (kWarp ? !__all_sync(~0u, next != nullptr) : next == nullptr) return task;
    task = *next;
    if (kWarp) __syncwarp();
    if (!kWarp || threadIdx.x % 32 == 0) release();
    return task;
  }
  // Finds the next task that is a GEMM; returns false when there are no more.
  template <TraceRole kRole, bool kWarp>
  __device__ bool next_gemm(TileTask& task) {
    const bool speaks = !kWarp || threadIdx.x % 32 == 0;
    do {
      if (speaks) queue_.trace.stamp(kRole, count_, &TraceRecord::ready);
      task = next<kWarp>();
    } while (task.kind == TaskKind::kCombine);
    if (task.kind == TaskKind::kNone) return false;
    if (speaks) queue_.trace_task(kRole, index(), task);
    return true;
  }
  // The task that was read last, found anew: the compiler would keep its address in a register.
  __device__ const TileTask& again() const {
    return queue_.block.tasks[opaque_value(count_ - 1) % kTaskSlots];
  }
  // The number of the last task read.
  __device__ std::uint32_t index() const { return count_ - 1; }
  __device__ void release() const {
    arrive(shared_address(&queue_.block.task_empty[(count_ - 1) % kTaskSlots]));
  }

 private:
  __device__ const TileTask* await_alone(std::uint32_t index) const {
    const std::uint32_t slot = index % kTaskSlots, parity = index / kTaskSlots % 2;
    return wait_ring(queue_.life.waiter(), shared_address(&queue_.block.task_full[slot]), parity)
               ? &queue_.block.tasks[slot]
               : nullptr;
  }

  const Queue<P> queue_;
  // The number of tasks read. Slot and parity follow from this one word: the math warps have no
  // registers to spare.
  std::uint32_t count_ = 0;
};

// Sends a ticket to the pair's second block. The slot is free: that block read the previous ticket
// before it demanded this one.
__device__ __forceinline__ void send_ticket(QueueStorage& block, std::uint32_t ticket) {
  store_in_pair(address_in_pair(shared_address(&block.ticket), 1), ticket);
  fence_pair();
  arrive_in_pair(address_in_pair(shared_address(&block.ticket_full), 1));
}
__device__ __forceinline__ std::uint32_t load_ticket(const QueueStorage& block) {
  fence_pair();
  return *static_cast<const volatile std::uint32_t*>(&block.ticket);
}

// Tells the other block of the pair, which may be further on, that this block's plan found the pass
// given up, so that its roles stop waiting. Called by one thread.
__device__ __forceinline__ void give_up_pair(const Lifetime& life) {
  const std::uint32_t going = shared_address(&life.state.going);
  store_in_pair(address_in_pair(going, rank_in_pair() ^ 1),
                static_cast<std::uint32_t>(Going::kGivenUp));
}

// Makes one of the arrivals at `demand`, after which the block, or the pair, gets another task.
// Called by one thread.
template <typename P>
__device__ __forceinline__ void demand(const Queue<P>& queue) {
  const std::uint32_t barrier = shared_address(&queue.block.demand);
  arrive_in_pair(queue.paired == 0 ? barrier : address_in_pair(barrier, 0));
}

}  // namespace switchyard::gpu
