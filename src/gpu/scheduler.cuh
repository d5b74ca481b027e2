// The scheduler, and the queue through which it hands the tasks of the block to its other roles, in
// the order in which each of them walks them.
#pragma once

#include "gpu/plan.cuh"
#include "gpu/trace.cuh"

namespace switchyard::gpu {

// The queue of tasks as one of its readers sees it.
template <typename P>
class TaskReader {
 public:
  __device__ TaskReader(const Pass<P>& pass) : pass_(pass) {}

  // Waits for the next task; null if the pass was given up. It is there until one lane of the warp
  // has called release(), when all have read it; or, of the math warps, have stored their tile.
  // For these: they all find the same, for in a task they meet at barriers without deadlines.
  __device__ const TileTask* await() {
    const TileTask* task = await_alone(count_++);
    if (task == nullptr && (atomicOr(&pass_.block.handed_out, kNoMore) & ~kNoMore) >= count_) {
      do {
        task = await_alone(count_ - 1);
      } while (task == nullptr);  // the scheduler is about to arrive
    }
    return task;
  }
  // The task's copy, for the others: a thread or, kWarp, a whole warp, all of which finds the same.
  template <bool kWarp>
  __device__ TileTask next() {
    TileTask task;
    task.work = Work::kStop;
    const TileTask* const next = await_alone(count_++);
    if (kWarp ? !__all_sync(~0u, next != nullptr) : next == nullptr) return task;
    task = *next;
    if (kWarp) __syncwarp();
    if (!kWarp || threadIdx.x % 32 == 0) release();
    return task;
  }
  // The next that is a GEMM; false when there are no more.
  template <TraceRole kRole, bool kWarp>
  __device__ bool next_gemm(TileTask& task) {
    const bool speaks = !kWarp || threadIdx.x % 32 == 0;
    do {
      if (speaks) trace_stamp(pass_, kRole, count_, &TraceRecord::ready);
      task = next<kWarp>();
    } while (task.work == Work::kCombine);
    if (task.work == Work::kStop) return false;
    if (speaks) trace_task(pass_, kRole, index(), task);
    return true;
  }
  // Of tasks read, the last one's number.
  __device__ std::uint32_t index() const { return count_ - 1; }
  __device__ void release() const {
    arrive(shared_address(&pass_.block.task_empty[(count_ - 1) % kTaskSlots]));
  }

 private:
  __device__ const TileTask* await_alone(std::uint32_t index) const {
    const std::uint32_t slot = index % kTaskSlots, parity = index / kTaskSlots % 2;
    return wait_ring(pass_.waiter(), shared_address(&pass_.block.task_full[slot]), parity)
               ? &pass_.block.tasks[slot]
               : nullptr;
  }

  const Pass<P>& pass_;
  // Of tasks read. One word tells slot and parity: the math warps have no registers to spare.
  std::uint32_t count_ = 0;
};

// --- Scheduler: one warp. Takes tickets from the counter all blocks share and hands out tasks.

// Everything this rank has to do.
template <typename P>
__device__ __forceinline__ protocol::Workload workload_of(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  const PassState<P>& state = pass.state();
  protocol::Workload work;
  work.num_shared_tiles = state.shared_tiles.count;
  work.num_routed_tiles = pass.num_tiles() - state.shared_tiles.count;
  work.shared_gemm1_blocks = pass.tasks(layer.shared.gemm1_rows);
  work.shared_gemm2_blocks = pass.tasks(layer.shared.gemm2_rows) << state.log2_splits;
  work.routed_gemm1_blocks = pass.tasks(layer.routed.gemm1_rows);
  work.routed_gemm2_blocks = pass.tasks(layer.routed.gemm2_rows) << state.log2_splits;
  const std::uint32_t log2_chunk = state.log2_combine_chunk + pass.call.paired;
  work.num_combine_chunks = (pass.call.tokens + (1u << log2_chunk) - 1) >> log2_chunk;
  work.log2_band = P::kSize == PassSize::kSmall ? 0 : state.log2_band;  // as place_tiles() finds it
  work.lag = work.log2_band == 0 ? layer.lag : layer.banded_lag;
  return work;
}

// The task of a pair, or of a block by itself, as this block has to do it: the first block of a
// pair has share 0, the other 1. kStop past the last.
template <typename P>
__device__ __forceinline__ TileTask describe(const Pass<P>& pass, const protocol::Workload& work,
                                             std::uint32_t ticket, std::uint32_t share) {
  const LayerParams& layer = pass.layer;
  TileTask d{};
  d.work = Work::kStop;
  if (ticket >= work.num_gemm_tasks() + work.num_combine_chunks) return d;
  const protocol::Task task = protocol::tile_task_at(work, ticket);
  d.tile = task.index;
  d.block = (task.block << pass.call.paired) + share;
  if (task.kind == protocol::TaskKind::kCombine) {
    d.work = Work::kCombine;
    d.tile = (task.index << pass.call.paired) + share;
    return d;
  }
  d.shared = pass.is_shared(task.index) ? 1 : 0;
  protocol::TokenTiles tiles = pass.state().shared_tiles;
  std::uint32_t tile_of_expert = task.index;
  if (d.shared == 0) {
    const std::uint32_t* const tile_begin = pass.block.tile_begin + pass.first_expert();
    d.expert = find_expert_together(tile_begin, pass.local_experts(), task.index);
    tiles = protocol::TokenTiles(pass.block.expert_rows[pass.first_expert() + d.expert],
                                 P::kTile.token_rows);
    tile_of_expert -= tile_begin[d.expert];
  }
  if constexpr (kPairsTiles<P>) {
    const std::uint32_t band = 1u << pass.state().log2_band;
    const std::uint32_t of_kind =
        task.index - (d.shared != 0 ? 0 : pass.state().shared_tiles.count);
    const protocol::TilePair pair(tiles, tile_of_expert, of_kind & (band - 1), band,
                                  kInstructionRows + 1);
    // 64 KB a stage for the pair, in place of 80 KB for one tile and twice the weight rows.
    if (pass.call.paired != 0 && pair.two) {
      // The two tiles' tasks of this block of weight rows become both tiles' for half of them.
      d.two_tiles = 1;
      d.block = (task.block << 1) + tile_of_expert - pair.first;
      d.tile += pair.first + share - tile_of_expert;
      tile_of_expert = pair.first + share;
    }
  }
  d.first_row = tiles.begin(tile_of_expert);
  d.rows = tiles.end(tile_of_expert) - d.first_row;
  d.units = protocol::ceil_div(d.rows, kUnitRows);
  d.one_tile = tiles.count == 1 ? 1 : 0;
  if (d.shared == 0) {
    d.list = (kOwnStart<P> ? pass.block.own.lists + pass.block.row_begin[d.expert] -
                                 pass.state().shared_tiles.rows
                           : own_list(layer, d.expert)) +
             d.first_row;
  }
  const bool first = task.kind == protocol::TaskKind::kGemm1;
  d.work = first ? Work::kGemm1 : Work::kGemm2;
  const int depth = first ? layer.hidden : pass.ffn(d.shared != 0).intermediate;
  d.k_blocks = static_cast<std::uint32_t>(
      protocol::ceil_div(depth * P::kNumerics.token_bytes(), kStageRowBytes));
  if (const std::uint32_t log2 = first ? 0 : pass.state().log2_splits; log2 != 0) {
    d.split = d.block & ((1u << log2) - 1);
    d.block >>= log2;
    d.first_k_block = d.k_blocks * d.split >> log2;
    d.k_blocks = (d.k_blocks * (d.split + 1) >> log2) - d.first_k_block;
  }
  return d;
}

// The second block has read the ticket before: only then did it demand this one.
template <typename P>
__device__ __forceinline__ void send_ticket(BlockStorage<P>& block, std::uint32_t ticket) {
  store_in_pair(address_in_pair(shared_address(&block.ticket), 1), ticket);
  fence_pair();
  arrive_in_pair(address_in_pair(shared_address(&block.ticket_full), 1));
}
template <typename P>
__device__ __forceinline__ std::uint32_t load_ticket(const BlockStorage<P>& block) {
  fence_pair();
  return *static_cast<const volatile std::uint32_t*>(&block.ticket);
}

// Tells the other block of the pair, which may be further, what this one's plan found: the pass was
// given up. Its roles wait no longer. By one thread.
template <typename P>
__device__ __forceinline__ void give_up_pair(const Pass<P>& pass) {
  const std::uint32_t going = shared_address(&pass.block.pass.going);
  store_in_pair(address_in_pair(going, rank_in_pair() ^ 1),
                static_cast<std::uint32_t>(Going::kGivenUp));
}

// The first task of this block, into its slot, and handed out unless it is a rehearsal. By the
// scheduler's warp, when tiles are placed: the pass knows it earlier, and in code that it has
// rehearsed.
template <typename P>
__device__ __forceinline__ void describe_first(const Pass<P>& pass, bool rehearsal) {
  const std::uint32_t paired = pass.call.paired;
  const TileTask task =
      describe(pass, workload_of(pass), blockIdx.x >> paired, paired == 0 ? 0 : rank_in_pair());
  // What the other lanes have written for it comes before it, too.
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  pass.block.tasks[0] = task;
  if (!rehearsal) arrive(shared_address(&pass.block.task_full[0]));
}

// Tells other blocks that this one, or one of its math warpgroups, has stored its part of a tile:
// see kTellers. By a thread that all the stores happened before.
template <typename P>
__device__ __forceinline__ void tell_stored(const Pass<P>& pass, const TileTask& task) {
  add_release_gpu(
      task.work == Work::kGemm1 ? pass.gemm1_done(task.tile) : pass.gemm2_done(task.tile), 1);
}

template <typename P>
__device__ __forceinline__ void scheduler_role(const Pass<P>& pass) {
  // The two blocks of a pair do each task together, the first taking the tickets; in small passes
  // every block is for itself.
  const std::uint32_t paired = pass.call.paired, share = paired == 0 ? 0 : rank_in_pair();
  const bool speaks = threadIdx.x % 32 == 0;
  // Demand or, of a pair's second block, a ticket from the first; and the parity of the next.
  const std::uint32_t asked =
      shared_address(share == 0 ? &pass.block.demand : &pass.block.ticket_full);
  std::uint32_t heard = 0;
  std::uint32_t index = 0;  // of tasks handed out
  std::uint32_t told = 0;   // of those finished, and told of
  const auto stamp = [&](TraceStamp which) {
    if (speaks) trace_stamp(pass, TraceRole::kScheduler, index, which);
  };
  stamp(&TraceRecord::ready);
  stamp(&TraceRecord::begin);
  // Of the task that is in the slot, and handed out: false if it is the last.
  const auto goes_on = [&] {
    const TileTask& task = pass.block.tasks[index % kTaskSlots];
    if (speaks && task.work != Work::kStop) trace_task(pass, TraceRole::kScheduler, index, task);
    stamp(&TraceRecord::end);
    if (task.work == Work::kStop) return false;
    ++index;
    stamp(&TraceRecord::ready);
    return true;
  };
  // Waits, and meanwhile tells of what is finished: what is waited for may depend on it.
  const auto await = [&](auto&& ready) {
    return wait_in_block(pass.waiter(), [&] {
      const std::uint32_t slot = told % kTaskSlots;
      if (__all_sync(~0u, test_wait(shared_address(&pass.block.task_empty[slot]),
                                    told / kTaskSlots % 2))) {
        const TileTask& task = pass.block.tasks[slot];
        // Of a block that has given up, who knows what it has stored.
        if (P::kTeller == Teller::kScheduler && speaks && task.work != Work::kCombine &&
            pass.goes_on()) {
          tell_stored(pass, task);
        }
        __syncwarp();
        ++told;
      }
      if (__all_sync(~0u, ready())) return true;
      if (P::kSchedulerRestNs != 0) __nanosleep(P::kSchedulerRestNs);
      return false;
    });
  };
  if (!goes_on()) return;
  const protocol::Workload work = workload_of(pass);
  std::uint32_t ticket = blockIdx.x >> paired;
  // The first time around is a rehearsal, as in plan_pass(), while nobody asks for a task.
  for (std::uint32_t rehearsal = untold<1>();; rehearsal = 0) {
    if (rehearsal == 0) {
      // No sooner than need be: a ticket taken is a task that no other block can do.
      if (!await([&] { return test_wait(asked, heard); })) return;
      if (share != 0) {
        ticket = load_ticket(pass.block);
      } else if (speaks) {
        ticket = (gridDim.x >> paired) + atomicAdd(pass.state().words.next_task(), 1u);
        if (paired != 0) send_ticket(pass.block, ticket);
      }
      ticket = __shfl_sync(~0u, ticket, 0);
      heard ^= 1;
      stamp(&TraceRecord::begin);
    }
    const TileTask task = describe(pass, work, ticket, share);
    if (!await([&] { return index - told < kTaskSlots; })) return;
    if (speaks) pass.block.tasks[index % kTaskSlots] = task;
    __syncwarp();
    if (rehearsal != 0) continue;
    if (speaks && atomicCAS(&pass.block.handed_out, index, index + 1) == index) {
      arrive(shared_address(&pass.block.task_full[index % kTaskSlots]));
    }
    if (!goes_on()) break;
  }
  await([&] { return told == index; });
}

// One of the arrivals at `demand` after which the block, or the pair, gets another task. By one
// thread.
template <typename P>
__device__ __forceinline__ void demand(const Pass<P>& pass) {
  const std::uint32_t barrier = shared_address(&pass.block.demand);
  arrive_in_pair(pass.call.paired == 0 ? barrier : address_in_pair(barrier, 0));
}

}  // namespace switchyard::gpu
