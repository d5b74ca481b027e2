// The math warpgroups: they drain the ring, finish tiles and combine.
#pragma once

#include "gpu/exchange/cells.cuh"
#include "gpu/layer/storage.cuh"
#include "gpu/tile/gemm.cuh"
#include "gpu/tokens/hidden.cuh"

namespace switchyard::gpu {

// Stores a tile's products: as h, or as rows in their tokens' cells. See gemm_tile().
template <bool kSilu, bool kGated, typename P>
class LayerSink {
 public:
  __device__ LayerSink(const Pass<P>& pass, const TileTask& task, bool first,
                       const TaskReader<P>& reader, StoredPart<kGated, P>& stored)
      : pass_(pass), task_(task), first_(first), reader_(reader), stored_(stored) {}

  // Fetches entries only now: those of other ranks arrive together with their tokens.
  __device__ __forceinline__ void started() {
    pass_.trace().math(kFirstTaskRecord + reader_.index(), &TraceRecord::begin);
    if (needs_entries()) fetch_entries(pass_.exchange(), pass_.epilogue(), task_, math_group());
    if constexpr (StoredPart<kGated, P>::kPutsOff) stored_.finish();
  }
  __device__ std::uint32_t code_tables() const { return shared_address(pass_.epilogue().tables); }
  __device__ __forceinline__ void multiplied() {
    pass_.trace().math(kFirstTaskRecord + reader_.index(), &TraceRecord::products);
    if (kFewRegisters<P> || needs_entries()) await_copies();
  }
  template <int kVariant, typename Sums>
  __device__ __forceinline__ void finish(Sums& acc) {
    // (With few registers the task is found again: nothing of it, nor whether it has entries, is
    // kept while tiles are multiplied.)
    const TileTask& task = kFewRegisters<P> ? reader_.again() : task_;
    const bool first = kFewRegisters<P> ? task.kind == TaskKind::kGemm1 : first_;
    const Epilogue<P> epilogue = pass_.epilogue();
    if (first) {
      finish_hidden<kVariant, kSilu, kGated>(
          epilogue, task, math_group(), pass_.hidden(),
          [&](std::uint32_t group) {
            fetch_weights(pass_.exchange(), epilogue, pass_.state().route.tables.weights, task,
                          group);
          },
          acc);
    } else {
      place_cells(pass_.exchange(), epilogue, task, math_group());
      const std::uint32_t group = math_group();
      finish_rows<kVariant>(
          epilogue, task, group, [&](std::uint32_t row) { return epilogue.output(group, row); },
          acc);
    }
    // After this barrier all of the warpgroup has stored, so the next tile may reuse this one's
    // places in shared memory.
    named_barrier<kWarpgroup>(group_barrier(math_group()));
    if (pass_.progress().quantizes_together() && first) {
      stored_.put_off(task);
    } else if (math_publishes<P>(first ? TaskKind::kGemm1 : TaskKind::kGemm2) &&
               reread_thread_index<kWarpgroup>() == 0) {
      publish_stored(pass_.progress(), task);
    }
    // In large passes the scheduler publishes the tile when all math warps have released its task.
    if (reread_thread_index<32>() == 0) reader_.release();
  }

 private:
  __device__ bool needs_entries() const { return !first_ || pass_.layer.weight_on_input; }

  const Pass<P>& pass_;
  const TileTask& task_;
  const bool first_;
  const TaskReader<P>& reader_;
  StoredPart<kGated, P>& stored_;
};

// Clears the words for the next pass, which the pass before this one used. Called while the first
// weights are on their way.
template <typename P>
__device__ __forceinline__ void clear_next_words(const Pass<P>& pass) {
  const PassWords next = pass.layer.pass_words[~pass.waiter().epoch & 1];
  const std::uint32_t count = pass.layer.num_pass_words;
  for (std::uint32_t i = blockIdx.x * kMathThreads + threadIdx.x - kWarpgroup; i < count;
       i += gridDim.x * kMathThreads) {
    next.words[i] = 0;
  }
  // Once all blocks have read this pass's epoch, the word may become the next pass's.
  if (threadIdx.x == kWarpgroup && atomicInc(pass.layer.readers, gridDim.x - 1) == gridDim.x - 1) {
    *pass.layer.epoch_word = pass.waiter().epoch + 1;
  }
}

template <typename P>
__device__ __forceinline__ void report_stuck_ring(const Pass<P>& pass) {
  if (threadIdx.x != kWarpgroup || *pass.waiter().going != Going::kRingStuck) return;
  const int rank = pass.layer.heaps.rank;
  protocol::abort_world(pass.layer.heaps,
                        {rank, rank, protocol::Phase::kExperts, pass.waiter().epoch,
                         reread_block_index(), 0, 0, pass.waiter().block_deadline_ns, rank});
  pass.layer.failures->given_up = 1;
}

template <bool kSilu, bool kGated, typename P>
__device__ __forceinline__ void math_role(const Pass<P>& pass) {
  TaskReader<P> reader(pass.queue());
  StoredPart<kGated, P> stored(pass.progress(), pass.hidden());
  RingPlace place;
  OperandRegisters<kHoldsOperands<P>> weights;
  for (;;) {
    pass.trace().math(kFirstTaskRecord + reader.index() + 1, &TraceRecord::ready);
    const TileTask* const task = reader.await();
    // A shuffle tells the compiler that the numbers are the same in all lanes, so it keeps the warp
    // together. One word holds all of them, so one shuffle is enough.
    const std::uint32_t head =
        __shfl_sync(~0u,
                    task == nullptr ? static_cast<std::uint32_t>(TaskKind::kNone)
                                    : task->k_blocks << 9 | height_of<P>(*task) << 3 |
                                          static_cast<std::uint32_t>(task->kind),
                    0);
    const auto kind = static_cast<TaskKind>(head & 7);
    if (kind != TaskKind::kGemm1 || !StoredPart<kGated, P>::kPutsOff) stored.finish();
    if (kind == TaskKind::kNone) {
      report_stuck_ring(pass);
      return;
    }
    if (P::kTraced && threadIdx.x == kWarpgroup) {
      pass.queue().trace_task(TraceRole::kMath, kFirstTaskRecord + reader.index(), *task);
    }
    if (kind == TaskKind::kCombine) {
      combine_task(pass.combine(), task->tile, reader.index());
      __syncwarp();
      if (threadIdx.x % 32 == 0) reader.release();
    } else {
      const bool first = kind == TaskKind::kGemm1;
      // The tile's slot may become free only when the work that was put off is done.
      if (StoredPart<kGated, P>::kExists && task->tile >= pass.layer.h_slots) stored.finish();
      LayerSink<kSilu, kGated, P> sink(pass, *task, first, reader, stored);
      gemm_tile_of(head >> 3 & 63, pass.pipeline(), *task, head >> 9, kGated && first, place,
                   weights, sink);
      // The block may have no more tasks in the first of two rounds. It then waits for the second
      // round, and other blocks must not wait for its h as long.
      if (StoredPart<kGated, P>::kExists && !pass.table().last_round()) stored.finish();
    }
    pass.trace().math(kFirstTaskRecord + reader.index(), &TraceRecord::end);
    if (threadIdx.x == kWarpgroup) protocol::note_progress(*pass.waiter().heaps);
  }
}

}  // namespace switchyard::gpu
