// Packing: token rows are copied into the tiles' slots, in the order of tiles; the first ones by
// the math warps, which have nothing else to do then, the others by a warp of each block's.
#pragma once

#include "gpu/loading.cuh"

namespace switchyard::gpu {

// Of a packed row, the scale of the first group; that of the next is kMaxHeight behind it.
template <typename P>
__device__ __forceinline__ float* scales_of_row(const Pass<P>& pass, std::uint32_t row) {
  return pass.layer.packed_scales +
         std::size_t{row / kMaxHeight<P>} * pass.layer.x_groups * kMaxHeight<P> +
         row % kMaxHeight<P>;
}

// A row, in a lane; or none.
struct RowCopy {
  const std::byte* values = nullptr;
  const float* scales = nullptr;
  std::uint32_t to = 0;  // the packed row

  __device__ RowCopy of_lane(int lane) const {
    return {reinterpret_cast<const std::byte*>(
                __shfl_sync(~0u, reinterpret_cast<std::uint64_t>(values), lane)),
            reinterpret_cast<const float*>(
                __shfl_sync(~0u, reinterpret_cast<std::uint64_t>(scales), lane)),
            __shfl_sync(~0u, to, lane)};
  }
};

// A row, or this warp's part of it, which is the same in all lanes.
template <typename P>
__device__ __forceinline__ void copy_by_warp(const Pass<P>& pass, const RowCopy& row,
                                             const RowPart& part) {
  if (row.values == nullptr) return;
  const auto bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kNumerics.token_bytes());
  const auto copy_values = [&] {
    copy_row<P::kCopyVectors>(pass.layer.packed + std::size_t{row.to} * bytes, row.values, bytes,
                              part);
  };
  if constexpr (kScaled<P>) {
    // The first scales are under way together with the values, not after them.
    const std::uint32_t lane = fresh_thread_index<32>();
    const std::uint32_t groups = part.index == 0 ? pass.layer.x_groups : 0;
    const float first = lane < groups ? __ldcg(row.scales + lane) : 0;
    copy_values();
    float* const to = scales_of_row(pass, row.to);
    if (lane < groups) to[lane * kMaxHeight<P>] = first;
    for (std::uint32_t group = lane + 32; group < groups; group += 32) {
      to[group * kMaxHeight<P>] = __ldcg(row.scales + group);
    }
  } else {
    copy_values();
  }
}

// The lanes' rows: those of kPackPieces lanes at a time, in `turns` turns. Pieces of them go
// through shared memory, in buffers in turn, so that what is under way takes no registers. False if
// the pass was given up, and then it must not be called again: who has not seen a barrier's phase
// end may arrive at it no more.
template <typename P>
__device__ __forceinline__ bool copy_by_engine(const Pass<P>& pass, const RowCopy& row,
                                               std::uint32_t turns) {
  const auto bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kNumerics.token_bytes());
  const std::uint32_t lane = fresh_thread_index<32>();
  const std::uint32_t full = shared_address(pass.block.packing.full);
  const std::uint32_t buffers = shared_address(pass.block.packing.pieces);
  struct Step {
    std::uint32_t number = 0, turn = 0, byte = 0;
    __device__ std::uint32_t buffer() const { return number % kPackBuffers; }
  };
  const auto has_piece = [&](const Step& step) {
    return row.values != nullptr && lane / kPackPieces == step.turn;
  };
  const auto piece_bytes = [&](const Step& step) {
    return min(kPackPieceBytes, bytes - step.byte);
  };
  const auto place = [&](const Step& step) {
    return buffers + (step.buffer() * kPackPieces + lane % kPackPieces) * kPackPieceBytes;
  };
  const auto advance = [&](Step& step) {
    ++step.number;
    if ((step.byte += kPackPieceBytes) < bytes) return;
    step.byte = 0;
    ++step.turn;
  };
  Step loads, stores;
  const auto load_next = [&] {
    if (loads.turn == turns) return;
    const bool mine = has_piece(loads);
    const std::uint32_t pieces = __popc(__ballot_sync(~0u, mine));
    const std::uint32_t barrier = full + 8 * loads.buffer();
    if (lane == 0) arrive_expect_bytes(barrier, pieces * piece_bytes(loads));
    if (mine) load_bytes(place(loads), row.values + loads.byte, piece_bytes(loads), barrier);
    advance(loads);
  };
  // What was written by others' stores the copy engine must see.
  fence_async_proxy();
#pragma unroll 1
  for (std::uint32_t i = 1; i < kPackBuffers; ++i) load_next();
  // A lane copies its row's scales itself, a few in each step, of which there are more than it
  // takes.
  std::uint32_t group = 0;
  static_assert(kScalesAtOnce * kQuantGroup * kPackedTogether / kPackPieces >= kPackPieceBytes);
#pragma unroll 1
  while (stores.turn < turns) {
    float scales[kScalesAtOnce] = {};
    const std::uint32_t groups = kScaled<P> && row.values != nullptr ? pass.layer.x_groups : 0;
    if constexpr (kScaled<P>) {
#pragma unroll
      for (std::uint32_t i = 0; i < kScalesAtOnce; ++i) {
        if (group + i < groups) scales[i] = row.scales[group + i];
      }
    }
    if (!wait_ring<true>(pass.waiter(), full + 8 * stores.buffer(),
                         stores.number / kPackBuffers % 2)) {
      return false;
    }
    if (has_piece(stores)) {
      store_bytes(pass.layer.packed + std::size_t{row.to} * bytes + stores.byte, place(stores),
                  piece_bytes(stores));
    }
    commit_stores();
    if constexpr (kScaled<P>) {
      float* const to = scales_of_row(pass, row.to) + group * kMaxHeight<P>;
#pragma unroll
      for (std::uint32_t i = 0; i < kScalesAtOnce; ++i) {
        if (group + i < groups) to[i * kMaxHeight<P>] = scales[i];
      }
      group += kScalesAtOnce;
    }
    advance(stores);
    // The next load's buffer is that of the stores before these.
    await_all_stores_but<1>();
    __syncwarp();
    load_next();
  }
  await_all_stores_but<0>();
  return true;
}

// Rows counted over the shared expert's and then all experts' rows: kRows from row0 on, those up to
// `begin` and from `end` on left out. False if the pass was given up; the pack warp is then done.
// Called by one warp.
template <std::uint32_t kRows, typename P>
__device__ __forceinline__ bool pack_rows(const Pass<P>& pass, std::uint32_t row0,
                                          std::uint32_t begin, std::uint32_t end,
                                          const RowPart& part = {}) {
  const LayerParams& layer = pass.layer;
  const BlockStorage<P>& block = pass.block;
  const PassState<P>& state = pass.state();
  // Asked anew where it is needed, as is `mine`: there are few registers.
  const auto lane = [] { return fresh_thread_index<32>(); };
  const auto of_warp = [&] {  // of the pack warp's groups
    return *static_cast<const volatile std::uint32_t*>(&block.pack_row) / (kRows * gridDim.x);
  };
  if (kRows > 1 && lane() == 0) trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::ready);
  // Lane i < kRows finds row i's place.
  const std::uint32_t row = row0 + lane();
  // Tile and row of it, in one word, for there are few registers; likewise the expert and the
  // distance of the source.
  constexpr std::uint32_t kNone = ~0u;
  std::uint32_t place = kNone, list = 0;
  const auto told_anew = [](std::uint32_t& word) {
    asm volatile("" : "+r"(word));
    return word;
  };
  const auto mine = [&] { return told_anew(place) != kNone; };
  const auto tile_of = [&] { return place / kMaxHeight<P>; };
  const auto expert = [&] { return RowEntry::token(told_anew(list)); };
  const auto distance = [&] { return RowEntry::k(told_anew(list)); };
  // In the source's list; of own rows, as soon as it is known, the token.
  std::uint32_t position = row;
  const auto entry = [&] { return __ldcg(entry_of(pass, expert(), {distance(), position})); };
  if (row < row0 + kRows && row >= begin && row < end) {
    protocol::TokenTiles cut = state.shared_tiles;
    std::uint32_t of_expert = row, first_tile = 0;
    if (row >= cut.rows) {
      const std::uint32_t* const row_begin = block.row_begin + pass.first_expert();
      const std::uint32_t e = find_expert(row_begin, pass.local_experts(), row);
      of_expert = row - row_begin[e];
      first_tile = block.tile_begin[pass.first_expert() + e];
      cut = protocol::TokenTiles(block.expert_rows[pass.first_expert() + e], P::kTile.token_rows);
      const SourceRow source = find_source(pass, e, of_expert);
      list = RowEntry::pack(e, source.distance);
      position = source.position;
      if (source.distance == 0) position = RowEntry::token(entry());
    }
    place = pass.place_of(cut, first_tile, of_expert);
  }
  // The tile that had the slot before is no longer needed once its GEMM1 is complete. What others
  // send must have come.
  const auto is_there = [&] { return !mine() || has_arrived(pass, expert(), distance()); };
  const bool free = pass.waiter().wait_for(
      [&] {
        return __all_sync(~0u,
                          is_there() && (!mine() || tile_of() < layer.packed_slots ||
                                         pass.gemm1_complete(tile_of() - layer.packed_slots))) != 0;
      },
      [&] {
        // The first row that has not come, if that is what is missing.
        const std::uint32_t absent = __ballot_sync(~0u, !is_there());
        const int which = absent == 0 ? 0 : __ffs(absent) - 1;
        const std::uint32_t from = __shfl_sync(~0u, distance(), which);
        return protocol::Missing{protocol::Phase::kDispatch, pass.rank_at(absent == 0 ? 0 : from),
                                 tile_of(), pass.flag(), 0};
      });
  if (!__all_sync(~0u, free)) return false;
  if constexpr (P::kTraced && kRows > 1) {
    const std::uint32_t rows = __ballot_sync(~0u, mine());
    if (rows != 0 && lane() == __ffs(static_cast<int>(rows)) - 1u) {
      const int first_expert = static_cast<int>(pass.first_expert());
      trace_subject(pass, TraceRole::kPack, of_warp(),
                    {TraceKind::kPack, static_cast<std::int32_t>(tile_of()), -1,
                     pass.is_shared(tile_of()) ? -1 : first_expert + static_cast<int>(expert()),
                     __popc(rows), distance() == 0 ? -1 : pass.rank_at(distance())});
      trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::begin);
    }
  }
  if (distance() != 0) position = RowEntry::token(RowEntry::sent(entry(), layer));
  // Row i's, in lane i.
  RowCopy copy;
  if (mine()) {
    copy.to = pass.packed_row(place);
    if (distance() == 0) {
      copy.values = state.rows + position * state.row_bytes;
      copy.scales = state.row_scales + position * state.row_scale_stride;
    } else {
      copy.values = layer.heap.pool(layer.mine, distance(), position);
      copy.scales = reinterpret_cast<const float*>(copy.values + layer.heap.scale_offset());
    }
  }
  if constexpr (kRows == 1) {
    copy_by_warp(pass, copy.of_lane(0), part);
  } else if (!copy_by_engine(pass, copy, kRows / kPackPieces)) {
    return false;
  }
  fence_async_proxy();
  __syncwarp();
  if (mine() && pass.goes_on()) add_release_gpu(pass.packed(tile_of()), part.units());
  if (kRows > 1 && lane() == 0) trace_stamp(pass, TraceRole::kPack, of_warp(), &TraceRecord::end);
  return true;
}

// The first row of a tile of this rank's, or the number of rows if there are fewer tiles.
template <typename P>
__device__ __forceinline__ std::uint32_t first_row_of(const Pass<P>& pass, std::uint32_t tile) {
  if (tile >= pass.num_tiles()) return pass.num_rows();
  if (pass.is_shared(tile)) return pass.state().shared_tiles.begin(tile);
  const std::uint32_t e =
      pass.first_expert() +
      find_expert(pass.block.tile_begin + pass.first_expert(), pass.local_experts(), tile);
  const protocol::TokenTiles cut(pass.block.expert_rows[e], P::kTile.token_rows);
  return pass.block.row_begin[e] + cut.begin(tile - pass.block.tile_begin[e]);
}

// Of the rows that the math warps pack, which have nothing else to do at first: the tiles whose
// first tasks all blocks take up at once.
template <typename P>
__device__ __forceinline__ std::uint32_t first_tiles(const Pass<P>& pass) {
  const LayerParams& layer = pass.layer;
  std::uint32_t rows = layer.routed.gemm1_rows;
  if (pass.state().shared_tiles.count != 0) rows = min(rows, layer.shared.gemm1_rows);
  return max(1u << pass.state().log2_band,
             protocol::ceil_div(gridDim.x, pass.tasks(rows) << pass.call.paired) + 1);
}
// And, of one rank, a few for each warp.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows_at_least(const Pass<P>& pass) {
  constexpr std::uint32_t kBytesOfWarp = 8192;
  const auto row_bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kNumerics.token_bytes());
  return pass.distributed() ? 0 : kBytesOfWarp / row_bytes * gridDim.x * kMathWarps;
}
// Of the tiles whose slots nobody had before: nobody may wait for one who is to make it free.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows(const Pass<P>& pass) {
  return min(max(first_row_of(pass, first_tiles(pass)), first_rows_at_least(pass)),
             first_row_of(pass, pass.layer.packed_slots));
}

// A slot of this block's tokens. Of an expert, or of none; -1 is the shared expert.
struct OwnSlot {
  static constexpr std::int32_t kShared = -1, kNone = -2;
  std::uint32_t token = 0, position = 0;  // in the expert's list
  std::int32_t expert = kNone;
};
template <typename P>
__device__ __forceinline__ OwnSlot own_slot(const Pass<P>& pass, std::uint32_t token,
                                            std::uint32_t k) {
  const LayerParams& layer = pass.layer;
  if (k == static_cast<std::uint32_t>(layer.top_k)) return {token, token, OwnSlot::kShared};
  const std::size_t at = std::size_t{token} * layer.top_k + k;
  const std::int32_t expert = layer.ids[at];
  return {token, layer.positions[at], expert < 0 ? OwnSlot::kNone : expert};
}

// Those of the tokens that this block has routed, which nobody need look for: rows are read once
// for all their places. Of one rank, by the math warps, from before tiles are placed: until then
// they rehearse, on rows of no bytes, for what is fetched when weights have begun to stream comes
// behind them. Returns how many rows this warp has packed.
template <typename P>
__device__ __forceinline__ std::uint32_t pack_own_tokens(const Pass<P>& pass) {
  constexpr std::uint32_t kVectors = 8, kStep = 16 * 32;
  const LayerParams& layer = pass.layer;
  const BlockStorage<P>& block = pass.block;
  const PassState<P>& state = pass.state();
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kWarpgroup / 32;
  const auto row_bytes = static_cast<std::uint32_t>(layer.hidden * P::kNumerics.token_bytes());
  const auto cells = static_cast<std::uint32_t>(layer.cells_per_token);
  const std::uint32_t token0 = pass.first_token(blockIdx.x);
  const std::uint32_t slots = (pass.first_token(blockIdx.x + 1) - token0) * cells;
  const std::uint32_t at_once = min(protocol::ceil_div(slots, std::uint32_t{kMathWarps}), 32u);
  std::uint32_t slot0 = warp * at_once, packed = 0;
  // Lane i < at_once has slot i.
  const auto find_slot = [&]() -> OwnSlot {
    const std::uint32_t slot = slot0 + lane;
    if (lane >= at_once || slot >= slots) return {};
    return own_slot(pass, token0 + slot / cells, slot % cells);
  };
  OwnSlot own = find_slot();
#pragma unroll 1
  for (std::uint32_t rehearsal = untold<1>();;) {
    // As first_rows() says, which these warps do not wait for.
    const std::uint32_t tiles = first_tiles(pass), rows = first_rows_at_least(pass);
    const std::uint32_t bytes = rehearsal != 0 ? 0 : row_bytes;
    const std::uint32_t groups = rehearsal != 0 ? 0 : layer.x_groups;
    std::uint32_t place = 0;
    bool mine = own.expert != OwnSlot::kNone;
    if (mine) {
      protocol::TokenTiles cut = state.shared_tiles;
      std::uint32_t first_row = 0, first_tile = 0;
      if (own.expert != OwnSlot::kShared) {
        cut = protocol::TokenTiles(block.expert_rows[own.expert], P::kTile.token_rows);
        first_tile = block.tile_begin[own.expert];
        first_row = block.row_begin[own.expert];
      }
      place = pass.place_of(cut, first_tile, own.position);
      const std::uint32_t tile = place / kMaxHeight<P>;
      mine = rehearsal == 0 && tile < layer.packed_slots &&
             (tile < tiles || first_row + own.position < rows);
    }
    const std::uint32_t my_row = pass.packed_row(place);
    std::uint32_t left = __ballot_sync(~0u, mine);
    packed += __popc(left);
    left |= rehearsal;
#pragma unroll 1
    while (left != 0) {
      const std::uint32_t token = __shfl_sync(~0u, own.token, __ffs(static_cast<int>(left)) - 1);
      const std::uint32_t places = __ballot_sync(~0u, mine && own.token == token) | rehearsal;
      left &= ~places;
      const std::byte* const from = state.rows + token * state.row_bytes;
      const float* const scales = state.row_scales + token * state.row_scale_stride;
      const float first_scale = kScaled<P> && lane < groups ? scales[lane] : 0;
      std::uint32_t chunk = 0;
#pragma unroll 1
      do {
        const std::uint32_t byte0 = chunk + 16 * lane;
        uint4 values[kVectors];
#pragma unroll
        for (std::uint32_t v = 0; v < kVectors; ++v) {
          const std::uint32_t byte = byte0 + v * kStep;
          if (byte < bytes) values[v] = *reinterpret_cast<const uint4*>(from + byte);
        }
#pragma unroll 1
        for (std::uint32_t rest = places; rest != 0; rest &= rest - 1) {
          const std::uint32_t to = __shfl_sync(~0u, my_row, __ffs(static_cast<int>(rest)) - 1);
          std::byte* const to_row = layer.packed + std::size_t{to} * row_bytes;
#pragma unroll
          for (std::uint32_t v = 0; v < kVectors; ++v) {
            const std::uint32_t byte = byte0 + v * kStep;
            if (byte < bytes) store_vector(to_row + byte, values[v]);
          }
        }
      } while ((chunk += kVectors * kStep) < bytes);
      if constexpr (kScaled<P>) {
#pragma unroll 1
        for (std::uint32_t rest = places; rest != 0; rest &= rest - 1) {
          const std::uint32_t to = __shfl_sync(~0u, my_row, __ffs(static_cast<int>(rest)) - 1);
          float* const to_scales = scales_of_row(pass, to);
          if (lane < groups) to_scales[lane * kMaxHeight<P>] = first_scale;
          for (std::uint32_t group = lane + 32; group < groups; group += 32) {
            to_scales[group * kMaxHeight<P>] = scales[group];
          }
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (mine) add_release_gpu(pass.packed(place / kMaxHeight<P>), RowPart::kUnits);
    if (rehearsal == 0) {
      slot0 += kMathWarps * at_once;
      if (slot0 >= slots) return packed;
      own = find_slot();
    } else {
      rehearsal = 0;
      named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
      if (state.plan_failed) return packed;
    }
  }
}

// do_part(row, part) for this math warp's parts of `rows` rows: a row to a warp, or to several as
// far as they go, and neighbours to different blocks.
template <typename P, typename DoPart>
__device__ __forceinline__ void share_out(const Pass<P>& pass, std::uint32_t rows,
                                          DoPart&& do_part) {
  const std::uint32_t warps = gridDim.x * kMathWarps;
  const auto row_bytes = static_cast<std::uint32_t>(pass.layer.hidden * P::kNumerics.token_bytes());
  const std::uint32_t log2 = RowPart::log2_of(rows, warps, row_bytes);
#pragma unroll 1
  for (std::uint32_t i = (threadIdx.x / 32 - 4) * gridDim.x + blockIdx.x; i >> log2 < rows;
       i += warps) {
    do_part(i >> log2, RowPart{i & ((1u << log2) - 1), log2});
  }
}

// The math warps' part of sending, while others wait for all ranks' counts.
template <typename P>
__device__ __forceinline__ void send_first_slots(const Pass<P>& pass) {
  if (!place_sends(pass)) {
    pass.block.pass.plan_failed = true;
    if (pass.call.paired != 0 && threadIdx.x == kWarpgroup) give_up_pair(pass);
  }
  named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
  const std::uint32_t slots = pass.state().first_sends;  // none if the pass was given up
  trace_math(pass, kFirstSendsRecord, &TraceRecord::begin);
  share_out(pass, slots, [&](std::uint32_t slot, const RowPart& part) {
    send_slots<1>(pass, slot, 0, slots, part);
  });
  trace_math_end(pass, kFirstSendsRecord,
                 {TraceKind::kSend, -1, -1, -1, static_cast<std::int32_t>(slots / gridDim.x)});
}

// And of packing.
template <typename P>
__device__ __forceinline__ void pack_first_rows(const Pass<P>& pass) {
  std::uint32_t packed = 0;
  if (pass.distributed()) {
    named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
    if (pass.state().plan_failed) return;
    trace_math(pass, kFirstRowsRecord, &TraceRecord::begin);
    const std::uint32_t rows = first_rows(pass);
    share_out(pass, rows, [&](std::uint32_t row, const RowPart& part) {
      pack_rows<1>(pass, row, 0, rows, part);
    });
    packed = rows / gridDim.x;
  } else {
    trace_math(pass, kFirstRowsRecord, &TraceRecord::begin);
    named_barrier_arrive<kMathSchedulerAndPack>(kAllPlaced);
    packed = pack_own_tokens(pass);
  }
  trace_math_end(pass, kFirstRowsRecord,
                 {TraceKind::kPack, -1, -1, -1, static_cast<std::int32_t>(packed)});
}

// In order of levels, of which the n-th is the n-th expert of every rank. Rows of a level are
// packed when those of the next levels have been sent: no rank waits for what another sends later
// than what that one waits for. (Places are kept in memory, and bounds are looked up again and
// again, for there are few registers.)
template <typename P>
__device__ __forceinline__ void pack_role(const Pass<P>& pass) {
  constexpr std::uint32_t kRows = kPackedTogether, kSlots = 8;
  const LayerParams& layer = pass.layer;
  volatile std::uint32_t &slot = pass.block.pack_slot, &row = pass.block.pack_row,
                         &slots_end = pass.block.pack_slots_end;
  // By all lanes, none of which may read the one value while another writes the other.
  const auto set = [](volatile std::uint32_t& word, std::uint32_t value) {
    __syncwarp();
    word = value;
    __syncwarp();
  };
  // Where the slots end that are sent before the group of rows at `row` is packed. Rows that wait
  // together are of the level of the last of them, which waits for what is sent last.
  const auto slots_before_row = [&] {
    if (row >= pass.num_rows()) return pass.num_sends();
    const std::uint32_t level =
        find_expert(pass.block.row_begin + pass.first_expert(), pass.local_experts(),
                    min(row + kRows, pass.num_rows()) - 1);
    return pass.block.ranks.send_begin[min(level + 1 + pass.state().send_lead, layer.levels) *
                                       static_cast<std::uint32_t>(layer.heaps.size() - 1)];
  };
  set(pass.block.pass.first_rows, first_rows(pass));
  set(slot, first_group<kSlots>(pass.state().first_sends / kSlots * kSlots));
  set(row, first_group<kRows>(pass.state().first_rows / kRows * kRows));
  const auto sends = [&] { return pass.distributed() && slot < pass.num_sends(); };
#pragma unroll 1
  while (sends() || row < pass.num_rows()) {
    if (sends()) {
      set(slots_end, slots_before_row());
#pragma unroll 1
      while (slot < slots_end) {
        send_slots<kSlots>(pass, slot, pass.state().first_sends, pass.num_sends());
        set(slot, slot + kSlots * gridDim.x);
      }
    }
    if (row < pass.num_rows()) {
      if (!pack_rows<kRows>(pass, row, pass.state().first_rows, pass.num_rows())) return;
      set(row, row + kRows * gridDim.x);
    }
  }
  if (pass.distributed()) raise_finished(pass);
}

}  // namespace switchyard::gpu
