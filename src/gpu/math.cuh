// The math warpgroups: they drain the ring, finish tiles and combine.
#pragma once

#include "gpu/combine.cuh"
#include "gpu/finish.cuh"
#include "gpu/tall.cuh"

namespace switchyard::gpu {

// --- Math: two warpgroups, each with its share of every tile (see Share).

// Multiplies and finishes a tile, with kBoxes of the task's boxes of weights to a warpgroup and
// tokens on the instruction's rows, or, of 0, with N tokens at most on its columns.
template <int kBoxes, int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void gemm_task(const Pass<P>& pass, const TaskDescriptor& task,
                                          std::uint32_t k_blocks, bool first, RingPlace& place,
                                          const TaskReader<P>& reader,
                                          StoredPart<kGated, P>& stored) {
  const bool needs_entries = !first || pass.layer.weight_on_input;
  // Not before the tile's tokens have come: entries from other ranks come with them.
  const auto started = [&] {
    trace_math(pass, kFirstTaskRecord + reader.index(), &TraceRecord::begin);
    if (needs_entries) fetch_entries(pass, task, math_group());
    stored.finish();
  };
  if constexpr (kBoxes != 0) {
    TallSums<kBoxes> acc;
    multiply_tall<kBoxes>(pass, k_blocks, place, math_group(), kGated && first, started, acc);
    trace_math(pass, kFirstTaskRecord + reader.index(), &TraceRecord::products);
    if (needs_entries) await_entries();
    if (first) {
      finish_tall_gemm1<kBoxes, kKind, kGated>(pass, task, math_group(), acc);
    } else {
      place_cells(pass, task, math_group());
      finish_tall_gemm2<kBoxes>(pass, task, math_group(), acc);
    }
  } else {
    float acc[N / 2];
    multiply_tile<N>(pass, k_blocks, place, math_group(), task.block % 2, started, acc);
    trace_math(pass, kFirstTaskRecord + reader.index(), &TraceRecord::products);
    if (needs_entries) await_entries();
    if (first) {
      finish_gemm1<N, kKind, kGated>(pass, task, math_group(), acc);
    } else {
      place_cells(pass, task, math_group());
      finish_gemm2<N>(pass, task, math_group(), acc);
    }
  }
  // Now all of the warpgroup has stored. What the tile had of the block's memory the next may have.
  named_barrier<kWarpgroup>(1 + math_group());
  if (pass.quantizes_together() && first) {
    stored.put_off(task);
  } else if (P::kAlone && fresh_thread_index<kWarpgroup>() == 0) {
    tell_stored(pass, task);
  }
  // In large passes the scheduler tells of the tile, when all math warps have released its task.
  if (fresh_thread_index<32>() == 0) reader.release();
}

// A GEMM on a tile of so many units of rows.
template <ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void gemm_task_of(std::uint32_t units, const Pass<P>& pass,
                                             const TaskDescriptor& task, std::uint32_t k_blocks,
                                             bool first, RingPlace& place,
                                             const TaskReader<P>& reader,
                                             StoredPart<kGated, P>& stored) {
  if constexpr (P::kHalves == 2) {
    if (units > kInstructionRows / kUnitRows) {
      gemm_task<2, 0, kKind, kGated>(pass, task, k_blocks, first, place, reader, stored);
    } else {
      gemm_task<1, 0, kKind, kGated>(pass, task, k_blocks, first, place, reader, stored);
    }
  } else {
    switch (units) {
#define SWITCHYARD_HEIGHT(height)                                                              \
  case (height) / kUnitRows:                                                                   \
    if constexpr ((height) <= P::kTileShape.max_height) {                                      \
      gemm_task<0, height, kKind, kGated>(pass, task, k_blocks, first, place, reader, stored); \
    }                                                                                          \
    break;
      SWITCHYARD_HEIGHT(16)
      SWITCHYARD_HEIGHT(32)
      case 3:
        SWITCHYARD_HEIGHT(64)
      case 5:
        SWITCHYARD_HEIGHT(96)
      case 7:
        SWITCHYARD_HEIGHT(128)
      case 9:
        SWITCHYARD_HEIGHT(160)
      case 11:
        SWITCHYARD_HEIGHT(192)
      case 13:
        SWITCHYARD_HEIGHT(224)
      case 15:
        SWITCHYARD_HEIGHT(256)
#undef SWITCHYARD_HEIGHT
      default:
        break;
    }
  }
}

template <typename P>
__device__ __forceinline__ void combine_task(const Pass<P>& pass, std::uint32_t chunk,
                                             std::uint32_t index) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kThreads>();
  const std::uint32_t warp = thread / 32 - kWarpgroup / 32, lane = thread % 32;
  const std::uint32_t log2_chunk = pass.state().log2_combine_chunk;
  // A warp to a token, or, where there are few tokens, all warps to one.
  const std::uint32_t warps_per_token = kMathWarps >> log2_chunk;
  const std::uint32_t token = (chunk << log2_chunk) + (warp << log2_chunk) / kMathWarps;
  const auto demand_next = [&] {
    if (thread != kWarpgroup) return;
    for (int i = 0; i < kDemandArrivals; ++i) demand(pass);
  };
  const auto began = [&] { trace_math(pass, kFirstTaskRecord + index, &TraceRecord::begin); };
  if (token >= pass.call.tokens) {
    began();
    return demand_next();
  }
  const RoutingTables& tables = pass.state().tables;
  const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
  const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
  bool exists = false;
  std::uint32_t tile = 0;
  const std::uint32_t* finished = nullptr;  // the flag of another rank's tile
  float weight = 0;
  std::int32_t id = -1;
  if (lane < tables.top_k) {
    id = tables.ids[slot];
    std::uint32_t position =
        P::kAlone ? pass.block.own.positions[slot] : __ldcg(layer.positions + slot);
    exists = id >= 0;
    if (exists) {
      weight = layer.weight_on_input ? 1.0f : tables.weights[cell];
      const protocol::TokenTiles cut(pass.block.expert_rows[id], P::kTileShape);
      const bool elsewhere =
          pass.distributed() && static_cast<std::uint32_t>(id - layer.first_expert) >=
                                    static_cast<std::uint32_t>(layer.local_experts);
      if (elsewhere) position += pass.block.row_begin[id];
      tile = pass.block.tile_begin[id] + position / cut.height;
      if (elsewhere) {
        finished = layer.heap.finished(layer.mine, tile + pass.state().tile_offset);
      }
    }
  } else if (lane < tables.cells_per_token) {
    exists = true;
    weight = tables.weights[cell];
    tile = token / pass.state().shared_tiles.height;
  }
  const std::uint32_t present = __ballot_sync(~0u, exists);
  // Looked at again only while it is missing: own tiles and others' are two trips to memory.
  bool missing = exists;
  const auto all_done = [&] {
    if (missing) {
      missing = finished != nullptr ? protocol::load_acquire(finished) != pass.flag()
                                    : !pass.gemm2_complete(tile);
    }
    return !__any_sync(~0u, missing);
  };
  // Who has to wait rehearses meanwhile: the instructions come one cache line after another.
#pragma unroll 1
  for (bool rehearsal = !all_done();; rehearsal = false) {
    if (!rehearsal) {
      pass.waiter().wait_for(all_done, [&] {
        // The first that has not come from another rank, if that is what is missing.
        const std::uint32_t absent = __ballot_sync(~0u, finished != nullptr && missing);
        const std::int32_t of = __shfl_sync(~0u, id, absent == 0 ? 0 : __ffs(absent) - 1);
        const int peer = absent == 0 ? layer.heaps.rank : layer.heaps.experts.owner(of);
        return protocol::Missing{protocol::Phase::kCombine, peer, token, pass.flag(), 0};
      });
      __syncwarp();  // what one lane has acquired is there for all
      demand_next();
      began();
    }
    for (std::uint32_t column = (warp & (warps_per_token - 1)) * kCombinedColumns;
         column < static_cast<std::uint32_t>(layer.hidden);
         column += warps_per_token * kCombinedColumns) {
      combine_columns(layer, pass.call, token, column + 8 * lane, weight, present,
                      pass.state().log2_splits, rehearsal);
      if (rehearsal) break;
    }
    if (!rehearsal) return;
  }
}

// The words of the pass after this one, which were those of the pass before. Done while the first
// weights are on their way.
template <typename P>
__device__ __forceinline__ void clear_next_words(const Pass<P>& pass) {
  constexpr std::uint32_t kMathThreads = kMathGroups * kWarpgroup;
  const PassWords next = pass.layer.pass_words[~pass.waiter().epoch & 1];
  const std::uint32_t count =
      PassWords::count(pass.layer.num_experts, pass.layer.max_tiles, pass.layer.group_words);
  for (std::uint32_t i = blockIdx.x * kMathThreads + threadIdx.x - kWarpgroup; i < count;
       i += gridDim.x * kMathThreads) {
    next.words[i] = 0;
  }
  // All blocks know this pass's epoch: the next may have another.
  if (threadIdx.x == kWarpgroup && atomicInc(pass.layer.readers, gridDim.x - 1) == gridDim.x - 1) {
    *pass.layer.epoch = pass.waiter().epoch + 1;
  }
}

template <typename P>
__device__ __forceinline__ void report_stuck_ring(const Pass<P>& pass) {
  if (threadIdx.x != kWarpgroup || *pass.waiter().going != Going::kRingStuck) return;
  const int rank = pass.layer.heaps.rank;
  protocol::abort_world(pass.layer.heaps,
                        {rank, rank, protocol::Phase::kExperts, pass.waiter().epoch,
                         fresh_block_index(), 0, 0, 2 * pass.waiter().deadline_ns, rank});
  pass.layer.failures->given_up = 1;
}

template <ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void math_role(const Pass<P>& pass) {
  TaskReader reader(pass);
  StoredPart<kGated, P> stored(pass);
  RingPlace place;
  for (;;) {
    trace_math(pass, kFirstTaskRecord + reader.index() + 1, &TraceRecord::ready);
    const TaskDescriptor* const task = reader.await();
    // Told to be the same in all lanes, the compiler keeps the warp together; all of it in one
    // word.
    const std::uint32_t head =
        __shfl_sync(~0u,
                    task == nullptr ? static_cast<std::uint32_t>(Work::kStop)
                                    : task->k_blocks << 8 | task->units << 2 |
                                          static_cast<std::uint32_t>(task->work),
                    0);
    const auto work = static_cast<Work>(head & 3);
    if (work != Work::kGemm1) stored.finish();
    if (work == Work::kStop) {
      report_stuck_ring(pass);
      return;
    }
    if (P::kTraced && threadIdx.x == kWarpgroup) {
      trace_task(pass, TraceRole::kMath, kFirstTaskRecord + reader.index(), *task);
    }
    if (work == Work::kCombine) {
      combine_task(pass, task->tile, reader.index());
      __syncwarp();
      if (threadIdx.x % 32 == 0) reader.release();
    } else {
      const bool first = work == Work::kGemm1;
      // For the slot of a tile that depends, perhaps, on what is put off.
      if (P::kAlone && task->tile >= pass.layer.h_slots) stored.finish();
      gemm_task_of<kKind, kGated>(head >> 2 & 63, pass, *task, head >> 8, first, place, reader,
                                  stored);
    }
    trace_math(pass, kFirstTaskRecord + reader.index(), &TraceRecord::end);
    if (threadIdx.x == kWarpgroup) protocol::note_progress(*pass.waiter().heaps);
  }
}

}  // namespace switchyard::gpu
