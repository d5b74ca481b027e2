// The scheduler, one warp: it takes tickets from the counter that all blocks share, and hands out
// tasks.
#pragma once

#include "gpu/route/lists.cuh"
#include "gpu/schedule/queue.cuh"
#include "gpu/tile/cut_task.cuh"
#include "protocol/task.h"

namespace switchyard::gpu {

template <typename P>
struct Schedule {
  Lifetime life;
  TileTable<P> table;
  Progress<P> progress;
  Queue<P> queue;
  const std::uint32_t& paired;
  const std::uint32_t* own_lists;  // if this block routes the pass for itself
  const ListParams& lists;

  // This rank's slots with one of its own experts.
  __device__ const std::uint32_t* list_of(std::uint32_t expert) const {
    return kOwnStart<P> ? own_lists + table.block.row_begin[expert] - table.state.shared_tiles.rows
                        : shared_list(lists, table.shape, table.partition.first_expert + expert);
  }
};

// All the work of this rank, or of a round. In the work, tiles are numbered from 0.
template <typename P>
__device__ __forceinline__ protocol::Workload workload_of(const Schedule<P>& schedule) {
  protocol::Workload work;
  const TileTable<P>& table = schedule.table;
  const WorkState& state = schedule.progress.work;
  work.num_shared_tiles = table.shared_of_round();
  work.num_routed_tiles = table.num_tiles() - table.first_tile() - work.num_shared_tiles;
  work.shared_gemm1_blocks = schedule.progress.tasks(schedule.progress.experts.shared.gemm1_rows);
  work.shared_gemm2_blocks = schedule.progress.tasks(schedule.progress.experts.shared.gemm2_rows)
                             << state.log2_splits;
  work.routed_gemm1_blocks = schedule.progress.tasks(schedule.progress.experts.routed.gemm1_rows);
  work.routed_gemm2_blocks = schedule.progress.tasks(schedule.progress.experts.routed.gemm2_rows)
                             << state.log2_splits;
  const std::uint32_t log2_chunk = state.log2_combine_chunk + schedule.paired;
  work.num_combine_chunks =
      table.last_round() ? (schedule.progress.tokens + (1u << log2_chunk) - 1) >> log2_chunk : 0;
  work.log2_band = P::kSize == PassSize::kSmall ? 0 : table.state.log2_band;  // as in place_tiles()
  work.lag = work.log2_band == 0 ? table.layer.order.lag : table.layer.order.banded_lag;
  return work;
}

// Describes the task of a ticket for this block. Without pairs, or in the first block of a pair,
// `share` is 0, in the second it is 1. Past the last task its kind is kNone.
template <typename P>
__device__ __forceinline__ TileTask describe(const Schedule<P>& schedule,
                                             const protocol::Workload& work, std::uint32_t ticket,
                                             std::uint32_t share) {
  TileTask d{};
  d.kind = TaskKind::kNone;
  if (ticket >= work.num_gemm_tasks() + work.num_combine_chunks) return d;
  const protocol::Task task = protocol::tile_task_at(work, ticket);
  d.kind = task.kind;
  if (task.kind == TaskKind::kCombine) {
    d.tile = (task.index << schedule.paired) + share;
    return d;
  }
  const std::uint32_t index = task.index + schedule.table.first_tile();
  d.shared = schedule.table.is_shared(index) ? 1 : 0;
  TileCut cut{};
  cut.tiles = schedule.table.state.shared_tiles;
  cut.first_tile = schedule.table.shared_tile();
  if (d.shared == 0) {
    const auto* const tile_begin = schedule.table.block.tile_begin + schedule.table.first_expert();
    static_assert(kMaxDeviceExperts <= kMostFoundTogether);
    d.expert =
        find_expert_together(tile_begin, schedule.table.local_experts(), index, threadIdx.x % 32);
    cut.tiles = schedule.table.tiles_of(schedule.table.first_expert() + d.expert);
    cut.first_tile = tile_begin[d.expert];
  }
  cut.tile = index - cut.first_tile;
  cut.band = 1u << schedule.table.state.log2_band;
  cut.of_band =
      (task.index - (d.shared != 0 ? 0 : schedule.table.shared_of_round())) & (cut.band - 1);
  cut.part = task.block;
  const bool first = task.kind == TaskKind::kGemm1;
  const int depth = first ? schedule.table.shape.hidden
                          : schedule.progress.experts.ffn(d.shared != 0).intermediate;
  cut.k_blocks = static_cast<std::uint32_t>(protocol::ceil_div(depth, int{kStageColumns<P>}));
  if constexpr (kStageParts<P> != 1) {
    cut.k_parts = static_cast<std::uint32_t>(protocol::ceil_div(depth, int{kPartColumns<P>}));
  }
  cut.log2_splits = first ? 0 : schedule.progress.work.log2_splits;
  cut_task<P>(d, cut, schedule.paired, share);
  if (d.shared == 0) d.list = schedule.list_of(d.expert) + d.first_row;
  return d;
}

// Puts the first task of this block into its slot and, unless it is a rehearsal, hands it out. The
// scheduler's warp calls it as soon as tiles are placed, so the first task comes early and from
// code that was rehearsed.
template <typename P>
__device__ __forceinline__ void describe_first(const Schedule<P>& schedule, bool rehearsal) {
  const std::uint32_t paired = schedule.paired;
  TileTask task = describe(schedule, workload_of(schedule), blockIdx.x >> paired,
                           paired == 0 ? 0 : rank_in_pair());
  if constexpr (!P::kOneRank) {
    if (task.kind == TaskKind::kNone && !schedule.table.last_round()) {
      // A first round may have fewer tasks than there are blocks. This block's first task is then
      // to combine tokens that do not exist.
      task.kind = TaskKind::kCombine;
      task.tile = schedule.progress.tokens;
    }
  }
  // Orders the other lanes' writes for the task before it is handed out.
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  schedule.queue.block.tasks[0] = task;
  if (!rehearsal) arrive(shared_address(&schedule.queue.block.task_full[0]));
}

// Runs the scheduler's role. When the first of two rounds has no more tasks, it calls
// next_round(stored), where `stored` says that all of the block's tasks are. next_round() returns
// false if the pass was given up. It is not called if the role ends before.
template <typename P, typename NextRound>
__device__ __forceinline__ void scheduler_role(const Schedule<P>& schedule,
                                               NextRound&& next_round) {
  // The two blocks of a pair do each task together, and the first takes the tickets. In small
  // passes there are no pairs.
  const std::uint32_t paired = schedule.paired, share = paired == 0 ? 0 : rank_in_pair();
  const bool speaks = threadIdx.x % 32 == 0;
  // The barrier that asks for the next task, and its parity (`heard`): `demand` or, in a pair's
  // second block, the arrival of a ticket from the first.
  const std::uint32_t asked =
      shared_address(share == 0 ? &schedule.queue.block.demand : &schedule.queue.block.ticket_full);
  std::uint32_t heard = 0;
  std::uint32_t index = 0;      // the number of tasks handed out
  std::uint32_t published = 0;  // the number of tasks whose tiles are stored and published
  const auto stamp = [&](TraceStamp which) {
    if (speaks) schedule.queue.trace.stamp(TraceRole::kScheduler, index, which);
  };
  stamp(&TraceRecord::ready);
  stamp(&TraceRecord::begin);
  // Counts the task that was just handed out. Returns false if it was the last.
  const auto goes_on = [&] {
    const TileTask& task = schedule.queue.block.tasks[index % kTaskSlots];
    if (speaks && task.kind != TaskKind::kNone)
      schedule.queue.trace_task(TraceRole::kScheduler, index, task);
    stamp(&TraceRecord::end);
    if (task.kind == TaskKind::kNone) return false;
    ++index;
    stamp(&TraceRecord::ready);
    return true;
  };
  // Waits, and meanwhile publishes finished tiles, because what it waits for may depend on them.
  const auto await = [&](auto&& ready) {
    return wait_in_block<WarpPace>(schedule.life.waiter(), [&] {
      const std::uint32_t slot = published % kTaskSlots;
      if (__all_sync(~0u, test_wait(shared_address(&schedule.queue.block.task_empty[slot]),
                                    published / kTaskSlots % 2))) {
        const TileTask& task = schedule.queue.block.tasks[slot];
        // A block that has given up publishes nothing: it may not have stored its part.
        if (speaks && task.kind != TaskKind::kCombine && !math_publishes<P>(task.kind) &&
            schedule.life.goes_on()) {
          publish_stored(schedule.progress, task);
        }
        __syncwarp();
        ++published;
      }
      if (__all_sync(~0u, ready())) return true;
      if (P::kSchedulerRestNs != 0) __nanosleep(P::kSchedulerRestNs);
      return false;
    });
  };
  if (!goes_on()) return;
  protocol::Workload work = workload_of(schedule);
  std::uint32_t ticket = blockIdx.x >> paired;
  // The first iteration is a rehearsal, while no role asks for a task.
  for (std::uint32_t rehearsal = opaque<1>();; rehearsal = 0) {
    if (rehearsal == 0) {
      // Tickets are taken as late as possible: a ticket taken is a task that no other block can do.
      if (!await([&] { return test_wait(asked, heard); })) return;
      if (share != 0) {
        ticket = load_ticket(schedule.queue.block);
      } else if (speaks) {
        ticket = (gridDim.x >> paired) +
                 atomicAdd(schedule.life.state.words.next_task(schedule.table.round()), 1u);
        if (paired != 0) send_ticket(schedule.queue.block, ticket);
      }
      ticket = __shfl_sync(~0u, ticket, 0);
      heard ^= 1;
      stamp(&TraceRecord::begin);
    }
    TileTask task;
    for (;;) {
      task = describe(schedule, work, ticket, share);
      if (P::kOneRank || rehearsal != 0 || task.kind != TaskKind::kNone ||
          schedule.table.last_round()) {
        break;
      }
      if (!next_round(await([&] { return published == index; }))) return;
      work = workload_of(schedule);
      ticket = blockIdx.x >> paired;
    }
    if (!await([&] { return index - published < kTaskSlots; })) return;
    if (speaks) schedule.queue.block.tasks[index % kTaskSlots] = task;
    __syncwarp();
    if (rehearsal != 0) continue;
    if (speaks && atomicCAS(&schedule.queue.block.handed_out, index, index + 1) == index) {
      arrive(shared_address(&schedule.queue.block.task_full[index % kTaskSlots]));
    }
    if (!goes_on()) break;
  }
  await([&] { return published == index; });
}

}  // namespace switchyard::gpu
