// The roles of the loading warps: weights, tokens or gather, and pack. The scheduler's role is in
// schedule/scheduler.cuh.
#pragma once

#include "gpu/exchange/finished.cuh"
#include "gpu/layer/storage.cuh"
#include "gpu/tile/load.cuh"

namespace switchyard::gpu {

// Streams the tasks' weight rows, which wait for nothing but a free stage. Called by one thread.
template <bool kGated, typename P>
__device__ __forceinline__ void weights_role(const Pass<P>& pass) {
  TaskReader<P> reader(pass.queue());
  RingPlace place;
  // The first iteration is a rehearsal while the scheduler finds the first task.
  for (std::uint32_t rehearsal = opaque<1>();; rehearsal = 0) {
    TileTask task = rehearsed_task();
    if (rehearsal == 0) {
      if (!reader.template next_gemm<TraceRole::kWeights, false>(task)) return;
    }
    const Ring<StageLayout<P>> ring = pass.pipeline().ring();
    const bool first = task.kind == TaskKind::kGemm1;
    const FfnParams& ffn = pass.layer.ffn(task.shared != 0);
    const bool halves = first && kGated && kBoxes<P> != 1;
    const WeightMaps& maps = first ? ffn.gemm1_maps : ffn.gemm2_maps;
    const CUtensorMap& map = P::kSize == PassSize::kSmall && first ? ffn.small_gemm1_map
                             : P::kSize == PassSize::kSmall || task.one_tile != 0 ? maps.once
                                                                                  : maps.again;
    // In a gated first GEMM half of a box's rows are gate's and half up's.
    const int groups = kTileRows / kRowGroup / (first && kGated ? 2 : 1);
    const std::uint64_t policy = task.one_tile != 0 ? kEvictFirst : kEvictLast;
    const std::uint32_t last_but_few =
        task.k_blocks > P::kStagesAhead ? task.k_blocks - P::kStagesAhead : 0;
    const float* scales = nullptr;
    if constexpr (kScaled<P> && !kJoinedScales<P> && !kFourBit<P>) {
      scales = weight_scales<P>(pass.layer, pass.layer.hidden, task);
    }
    WeightSource source{map, halves, groups, policy, scales};
    if constexpr (kFourBit<P>) source.boxes = weight_boxes<P>(pass.layer, pass.layer.hidden, task);
    if (!load_weights(
            pass.pipeline(), ring, source, task, place, rehearsal != 0, [&](std::uint32_t kb) {
              if (kb == 0) {
                pass.trace().stamp(TraceRole::kWeights, reader.index(), &TraceRecord::begin);
              }
              if (kb == last_but_few) demand(pass.queue());
            })) {
      return;
    }
    if (rehearsal == 0) pass.trace().stamp(TraceRole::kWeights, reader.index(), &TraceRecord::end);
  }
}

// The place of a task's tokens: packed rows for GEMM1, h for GEMM2.
template <typename P>
__device__ __forceinline__ SlottedTokens slotted_tokens(const Pass<P>& pass, const TileTask& task) {
  const LayerParams& layer = pass.layer;
  const bool first = task.kind == TaskKind::kGemm1;
  return {first ? layer.x_maps : layer.ffn(task.shared != 0).h_maps,
          task.tile % (first ? layer.packed_slots : layer.h_slots),
          first ? layer.packed_scales : layer.h_scales, first ? layer.x_groups : layer.h_groups,
          first ? 1 : kHiddenStretch<P>};
}

// Loads the tasks' packed tokens. Called by a warp, one of whose threads loads.
template <typename P>
__device__ __forceinline__ void tokens_role(const Pass<P>& pass) {
  if (!kJoinedScales<P> && !elect()) return;
  TaskReader<P> reader(pass.queue());
  RingPlace place;
  const auto stamp = [&](TraceStamp which) {
    if (!kJoinedScales<P> || threadIdx.x % 32 == 0) {
      pass.trace().stamp(TraceRole::kTokens, reader.index(), which);
    }
  };
  // The first iteration is a rehearsal on an empty tile of the first expert, if this rank has an
  // expert.
  for (std::uint32_t rehearsal = pass.table().local_experts() != 0 ? opaque<1>() : 0;;
       rehearsal = 0) {
    TileTask task = rehearsed_task();
    if (rehearsal == 0) {
      if (!reader.template next_gemm<TraceRole::kTokens, kJoinedScales<P>>(task)) return;
      const bool first = task.kind == TaskKind::kGemm1;
      const bool there = pass.waiter().wait(
          first ? protocol::Phase::kDispatch : protocol::Phase::kExperts, task.tile, [&] {
            return first ? load_acquire_gpu(pass.progress().packed(task.tile)) >=
                                   RowPart::kUnits * task.rows &&
                               pass.progress().h_slot_free(task.tile)
                         : pass.progress().gemm1_complete(task.tile);
          });
      // Leave without loading: in a pair, invalid rows would also go to the other block's ring.
      if (kJoinedScales<P> ? !__all_sync(~0u, there) : !there) return;
      if (!kJoinedScales<P> || elect()) demand(pass.queue());
      fence_async_proxy();
      stamp(&TraceRecord::begin);
    }
    if constexpr (kJoinedScales<P>) {
      const float* const of_weights = weight_scales<P>(pass.layer, pass.layer.hidden, task);
      if (!load_scaled_tile(pass.pipeline(), slotted_tokens(pass, task), of_weights, task, place,
                            rehearsal != 0))
        return;
    } else if (rehearsal == 0) {
      if (!load_tile(pass.pipeline(), slotted_tokens(pass, task), task, place, 0)) return;
    }
    if (rehearsal == 0) stamp(&TraceRecord::end);
  }
}

// Gathers the tasks' tokens. Called by two warps.
template <typename P>
__device__ __forceinline__ void gather_role(const Pass<P>& pass) {
  const std::uint32_t thread = threadIdx.x - 32 * kTokensWarp;
  TaskReader<P> reader(pass.queue());
  RingPlace place;
  const auto stamp = [&](std::uint32_t index, TraceStamp which) {
    if (thread == 0) pass.trace().stamp(TraceRole::kTokens, index, which);
  };
  // The first iteration is a rehearsal on an empty tile, while the first task is described. Code
  // that is fetched after weights have begun to stream queues behind them and arrives microseconds
  // later.
  for (std::uint32_t rehearsal = opaque<1>();; rehearsal = 0) {
    TileTask task = rehearsed_task();
    if (rehearsal == 0) {
      if (P::kTraced && reader.index() != ~0u) stamp(reader.index(), &TraceRecord::end);
      stamp(reader.index() + 1, &TraceRecord::ready);
      task = reader.template next<true>();
      if (task.kind == TaskKind::kNone) return;
      if (task.kind == TaskKind::kCombine) continue;
      if (thread == 0) pass.queue().trace_task(TraceRole::kTokens, reader.index(), task);
    }
    // Continue even if the pass was given up: the block's other roles wait for these stages.
    pass.waiter().wait(protocol::Phase::kExperts, task.tile, [&] {
      return task.kind == TaskKind::kGemm1 ? pass.progress().h_slot_free(task.tile)
                                           : pass.progress().gemm1_complete(task.tile);
    });
    if (thread == 0 && rehearsal == 0) {
      demand(pass.queue());
      stamp(reader.index(), &TraceRecord::begin);
    }
    if (task.kind == TaskKind::kGemm2) {
      if constexpr (kScaled<P>) {
        if (pass.progress().quantizes_late()) {
          if (!quantize_tile(pass.pipeline(), pass.hidden(), pass.layer, task, place, thread))
            return;
          continue;
        }
      }
      fence_async_proxy();
      if (!load_tile(pass.pipeline(), slotted_tokens(pass, task), task, place, thread)) return;
      continue;
    }
    if (!gather_tile<P>(pass.pipeline(), pass.state().rows, pass.layer.hidden, task, place, thread,
                        rehearsal != 0, shared_address(&pass.block.queue.ticket_full))) {
      return;
    }
    if (rehearsal != 0) place = {};
  }
}

// Sends and packs in order of levels: the n-th expert of every rank is level n. Rows of a level are
// packed when those of the next levels have been sent. So a rank never waits for rows whose sender
// waits for rows that this rank sends later. (Places are kept in memory, and bounds are looked up
// again each time, because registers are few.) Once in each round. Returns false if the pass was
// given up.
template <typename P>
__device__ __forceinline__ bool pack_role(const Pass<P>& pass) {
  constexpr std::uint32_t kRows = kPackedTogether, kSlots = 8;
  const LayerParams& layer = pass.layer;
  volatile std::uint32_t &slot = pass.block.packing.pack_slot, &row = pass.block.packing.pack_row,
                         &slots_end = pass.block.packing.pack_slots_end;
  // Called by all lanes: no lane may read the old value while another writes the new one.
  const auto set = [](volatile std::uint32_t& word, std::uint32_t value) {
    __syncwarp();
    word = value;
    __syncwarp();
  };
  // The end of the slots to send before the group of rows at `row` is packed. The level of the
  // group's last row decides, because its rows are sent last.
  const auto slots_before_row = [&] {
    if (row >= pass.table().num_rows()) return pass.exchange().num_sends();
    const std::uint32_t level =
        find_expert(pass.tiles().row_begin + pass.table().first_expert(),
                    pass.table().local_experts(), min(row + kRows, pass.table().num_rows()) - 1);
    return pass.ranks().send_begin[min(level + 1 + pass.state().send.send_lead, layer.levels) *
                                   static_cast<std::uint32_t>(layer.heaps.size() - 1)];
  };
  // (In a second round math warps pack nothing.)
  set(pass.block.pass.send.first_rows,
      pass.table().round() == 0 ? first_rows(pass.packing()) : pass.table().first_row());
  if (pass.table().round() == 0) {  // the first round sends all
    set(slot, first_group<kSlots>(pass.state().send.first_sends / kSlots * kSlots));
  }
  set(row, first_group<kRows>(pass.state().send.first_rows / kRows * kRows));
  const auto sends = [&] {
    return pass.exchange().distributed() && slot < pass.exchange().num_sends();
  };
#pragma unroll 1
  while (sends() || row < pass.table().num_rows()) {
    if (sends()) {
      set(slots_end, slots_before_row());
#pragma unroll 1
      while (slot < slots_end) {
        send_slots<kSlots>(pass.exchange(), slot, pass.state().send.first_sends,
                           pass.exchange().num_sends());
        set(slot, slot + kSlots * gridDim.x);
      }
    }
    if (row < pass.table().num_rows()) {
      if (!pack_rows<kRows>(pass.packing(), row, pass.state().send.first_rows,
                            pass.table().num_rows()))
        return false;
      set(row, row + kRows * gridDim.x);
    }
  }
  return !pass.exchange().distributed() || raise_finished(pass.exchange());
}

}  // namespace switchyard::gpu
