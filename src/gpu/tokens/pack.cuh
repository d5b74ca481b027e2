// Packing: token rows are copied into the tiles' slots, in the order of tiles.
#pragma once

#include "gpu/exchange/receive.cuh"
#include "gpu/exchange/send.cuh"
#include "gpu/ptx/bulk_copy.cuh"
#include "gpu/tokens/params.h"

namespace switchyard::gpu {

// The buffers of the pack warp's copies, in pieces of several rows. Enough pieces are under way
// that it does not wait for each trip to memory. kScalesAtOnce of a row's scales are under way.
inline constexpr std::uint32_t kPackBuffers = 4, kPackPieces = 2, kPackPieceBytes = 1024;
inline constexpr std::uint32_t kScalesAtOnce = 4;
// A group of rows fills each buffer an even number of times, so that its barrier has the same
// parity when the next group begins.
static_assert(kPackedTogether / kPackPieces % (2 * kPackBuffers) == 0);
template <typename P, TokenSource = P::kTokens>
struct PackStorage {};
template <typename P>
struct PackStorage<P, TokenSource::kPacked> {
  alignas(128) std::byte pieces[kPackBuffers][kPackPieces][kPackPieceBytes];
  alignas(8) std::uint64_t full[kPackBuffers];
  std::uint32_t pack_slot, pack_slots_end, pack_row;  // the pack warp's position
};

template <typename P>
struct Packing {
  Lifetime life;
  TileTable<P> table;
  Progress<P> progress;
  Exchange<P> exchange;
  const TokenParams& tokens;
  PackStorage<P>& block;

  // The packed row of a place; see TileTable::place_of().
  __device__ std::uint32_t packed_row(std::uint32_t place) const {
    return place / kMaxHeight<P> % tokens.packed_slots * kMaxHeight<P> + place % kMaxHeight<P>;
  }
  // The first of this rank's tokens that a block routes, in passes whose tokens the blocks share
  // out.
  __device__ std::uint32_t first_token(std::uint32_t of_block) const {
    return first_token_of(progress.tokens, of_block);
  }
};

// The address of a packed row's first scale. The next group's scale is kMaxHeight floats behind it.
template <typename P>
__device__ __forceinline__ float* scales_of_row(const Packing<P>& packing, std::uint32_t row) {
  return packing.tokens.packed_scales +
         std::size_t{row / kMaxHeight<P>} * packing.tokens.x_groups * kMaxHeight<P> +
         row % kMaxHeight<P>;
}

// A row that a lane wants copied, or none.
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

// Copies a row, or this warp's part of it. All lanes pass the same row.
template <typename P>
__device__ __forceinline__ void copy_by_warp(const Packing<P>& packing, const RowCopy& row,
                                             const RowPart& part) {
  if (row.values == nullptr) return;
  const auto bytes =
      static_cast<std::uint32_t>(packing.exchange.shape.hidden * P::kNumerics.token_bytes());
  const auto copy_values = [&] {
    copy_row<P::kCopyVectors>(packing.tokens.packed + std::size_t{row.to} * bytes, row.values,
                              bytes, part);
  };
  if constexpr (kScaled<P>) {
    // Load the first scales together with the values, not after them.
    const std::uint32_t lane = reread_thread_index<32>();
    const std::uint32_t groups = part.index == 0 ? packing.tokens.x_groups : 0;
    const float first = lane < groups ? __ldcg(row.scales + lane) : 0;
    copy_values();
    float* const to = scales_of_row(packing, row.to);
    if (lane < groups) to[lane * kMaxHeight<P>] = first;
    for (std::uint32_t group = lane + 32; group < groups; group += 32) {
      to[group * kMaxHeight<P>] = __ldcg(row.scales + group);
    }
  } else {
    copy_values();
  }
}

// Copies the lanes' rows through the copy engine: those of kPackPieces lanes at a time, in `turns`
// rounds. Pieces of rows go through buffers in shared memory, so that copies under way take no
// registers. Returns false if the pass was given up. Then it must not be called again: a thread
// that has not seen a barrier's phase end must not arrive there again.
template <typename P>
__device__ __forceinline__ bool copy_by_engine(const Packing<P>& packing, const RowCopy& row,
                                               std::uint32_t turns) {
  const auto bytes =
      static_cast<std::uint32_t>(packing.exchange.shape.hidden * P::kNumerics.token_bytes());
  const std::uint32_t lane = reread_thread_index<32>();
  const std::uint32_t full = shared_address(packing.block.full);
  const std::uint32_t buffers = shared_address(packing.block.pieces);
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
  // The copy engine must see what other threads wrote with ordinary stores.
  fence_async_proxy();
#pragma unroll 1
  for (std::uint32_t i = 1; i < kPackBuffers; ++i) load_next();
  // A lane copies its row's scales itself, a few in each step. There are enough steps for all
  // scales.
  std::uint32_t group = 0;
  static_assert(kScalesAtOnce * kQuantGroup * kPackedTogether / kPackPieces >= kPackPieceBytes);
#pragma unroll 1
  while (stores.turn < turns) {
    float scales[kScalesAtOnce] = {};
    const std::uint32_t groups = kScaled<P> && row.values != nullptr ? packing.tokens.x_groups : 0;
    if constexpr (kScaled<P>) {
#pragma unroll
      for (std::uint32_t i = 0; i < kScalesAtOnce; ++i) {
        if (group + i < groups) scales[i] = row.scales[group + i];
      }
    }
    if (!wait_ring<true>(packing.life.waiter(), full + 8 * stores.buffer(),
                         stores.number / kPackBuffers % 2)) {
      return false;
    }
    if (has_piece(stores)) {
      store_bytes(packing.tokens.packed + std::size_t{row.to} * bytes + stores.byte, place(stores),
                  piece_bytes(stores));
    }
    commit_stores();
    if constexpr (kScaled<P>) {
      float* const to = scales_of_row(packing, row.to) + group * kMaxHeight<P>;
#pragma unroll
      for (std::uint32_t i = 0; i < kScalesAtOnce; ++i) {
        if (group + i < groups) to[i * kMaxHeight<P>] = scales[i];
      }
      group += kScalesAtOnce;
    }
    advance(stores);
    // The next load reuses the buffer of the stores before these.
    await_all_stores_but<1>();
    __syncwarp();
    load_next();
  }
  await_all_stores_but<0>();
  return true;
}

// Packs kRows rows from row0 on; rows before `begin` and from `end` on are skipped. Rows are
// numbered over the shared expert's and then all experts' rows. Returns false if the pass was given
// up; the pack warp is then done. Called by one warp.
template <std::uint32_t kRows, typename P>
__device__ __forceinline__ bool pack_rows(const Packing<P>& packing, std::uint32_t row0,
                                          std::uint32_t begin, std::uint32_t end,
                                          const RowPart& part = {}) {
  // Computed again wherever it is needed, like `mine`, because registers are few.
  const auto lane = [] { return reread_thread_index<32>(); };
  const auto of_warp = [&] {  // the number of the pack warp's group
    return *static_cast<const volatile std::uint32_t*>(&packing.block.pack_row) /
           (kRows * gridDim.x);
  };
  if (kRows > 1 && lane() == 0)
    packing.exchange.trace.stamp(TraceRole::kPack, of_warp(), &TraceRecord::ready);
  // Lane i < kRows looks up the place of row i.
  const std::uint32_t row = row0 + lane();
  // One word holds tile and row, and one holds expert and distance of the source, because registers
  // are few.
  constexpr std::uint32_t kNone = ~0u;
  std::uint32_t place = kNone, list = 0;
  const auto reload = [](std::uint32_t& word) {
    asm volatile("" : "+r"(word));
    return word;
  };
  const auto mine = [&] { return reload(place) != kNone; };
  const auto tile_of = [&] { return place / kMaxHeight<P>; };
  const auto expert = [&] { return ExpertSource::expert(reload(list)); };
  const auto distance = [&] { return ExpertSource::distance(reload(list)); };
  // The row's position in the source's list. For rows of this rank it becomes the token as soon as
  // that is known.
  std::uint32_t position = row - packing.table.shared_row();
  const auto entry = [&] {
    return __ldcg(entry_of(packing.exchange, expert(), {distance(), position}));
  };
  if (row < row0 + kRows && row >= begin && row < end) {
    protocol::TokenTiles cut = packing.table.state.shared_tiles;
    std::uint32_t of_expert = row - packing.table.shared_row();
    std::uint32_t first_tile = packing.table.shared_tile();
    if (of_expert >= cut.rows) {
      const auto* const row_begin = packing.table.block.row_begin + packing.table.first_expert();
      const std::uint32_t e = find_expert(row_begin, packing.table.local_experts(), row);
      of_expert = row - row_begin[e];
      first_tile = packing.table.block.tile_begin[packing.table.first_expert() + e];
      cut = packing.table.tiles_of(packing.table.first_expert() + e);
      const SourceRow source = find_source(packing.exchange, e, of_expert);
      list = ExpertSource::pack(e, source.distance);
      position = source.position;
      if (source.distance == 0) position = SlotEntry::token(entry());
    }
    place = packing.table.place_of(cut, first_tile, of_expert);
  }
  // Two conditions: GEMM1 of the tile that used the slot before is complete, and rows of other
  // ranks have arrived.
  const auto is_there = [&] {
    return !mine() || has_arrived(packing.exchange, expert(), distance());
  };
  const bool free = packing.life.waiter().template wait_for<WarpPace>(
      [&] {
        return __all_sync(~0u, is_there() && (!mine() || tile_of() < packing.tokens.packed_slots ||
                                              packing.progress.gemm1_complete(
                                                  tile_of() - packing.tokens.packed_slots))) != 0;
      },
      [&] {
        // The first row that has not arrived, if a row is missing at all.
        const std::uint32_t absent = __ballot_sync(~0u, !is_there());
        const int which = absent == 0 ? 0 : __ffs(absent) - 1;
        const std::uint32_t from = __shfl_sync(~0u, distance(), which);
        return protocol::Missing{protocol::Phase::kDispatch,
                                 packing.life.rank_at(absent == 0 ? 0 : from), tile_of(),
                                 packing.life.flag(), 0};
      });
  if (!__all_sync(~0u, free)) return false;
  if constexpr (P::kTraced && kRows > 1) {
    const std::uint32_t rows = __ballot_sync(~0u, mine());
    if (rows != 0 && lane() == __ffs(static_cast<int>(rows)) - 1u) {
      const int first_expert = static_cast<int>(packing.table.first_expert());
      packing.exchange.trace.subject(
          TraceRole::kPack, of_warp(),
          {TraceKind::kPack, static_cast<std::int32_t>(tile_of()), -1,
           packing.table.is_shared(tile_of()) ? -1 : first_expert + static_cast<int>(expert()),
           __popc(rows), distance() == 0 ? -1 : packing.life.rank_at(distance())});
      packing.exchange.trace.stamp(TraceRole::kPack, of_warp(), &TraceRecord::begin);
    }
  }
  if (distance() != 0)
    position = SlotEntry::token(SlotEntry::sent(entry(), packing.exchange.shape));
  // Lane i holds the copy of row i.
  RowCopy copy;
  if (mine()) {
    copy.to = packing.packed_row(place);
    if (distance() == 0) {
      copy.values = packing.exchange.tokens.rows + position * packing.exchange.tokens.row_bytes;
      copy.scales =
          packing.exchange.tokens.row_scales + position * packing.exchange.tokens.row_scale_stride;
    } else {
      copy.values =
          packing.exchange.layer.heap.pool(distance(), position).in(packing.exchange.layer.mine);
      copy.scales =
          reinterpret_cast<const float*>(copy.values + packing.exchange.layer.heap.scale_offset());
    }
  }
  if constexpr (kRows == 1) {
    copy_by_warp(packing, copy.of_lane(0), part);
  } else if (!copy_by_engine(packing, copy, kRows / kPackPieces)) {
    return false;
  }
  fence_async_proxy();
  __syncwarp();
  if (mine() && packing.life.goes_on())
    add_release_gpu(packing.progress.packed(tile_of()), part.units());
  if (kRows > 1 && lane() == 0)
    packing.exchange.trace.stamp(TraceRole::kPack, of_warp(), &TraceRecord::end);
  return true;
}

// The first row of one of this rank's tiles, or the number of rows if there are fewer tiles.
template <typename P>
__device__ __forceinline__ std::uint32_t first_row_of(const Packing<P>& packing,
                                                      std::uint32_t tile) {
  if (tile >= packing.table.num_tiles()) return packing.table.num_rows();
  if (packing.table.is_shared(tile)) return packing.table.state.shared_tiles.begin(tile);
  const std::uint32_t e = packing.table.first_expert() +
                          find_expert(packing.table.block.tile_begin + packing.table.first_expert(),
                                      packing.table.local_experts(), tile);
  const protocol::TokenTiles cut = packing.table.tiles_of(e);
  return packing.table.block.row_begin[e] + cut.begin(tile - packing.table.block.tile_begin[e]);
}

// The number of tiles that the math warps pack before their first task: the tiles whose first tasks
// all blocks take up at once.
template <typename P>
__device__ __forceinline__ std::uint32_t first_tiles(const Packing<P>& packing) {
  std::uint32_t rows = packing.progress.experts.routed.gemm1_rows;
  if (packing.table.state.shared_tiles.count != 0)
    rows = min(rows, packing.progress.experts.shared.gemm1_rows);
  return max(
      1u << packing.table.state.log2_band,
      protocol::ceil_div(gridDim.x, packing.progress.tasks(rows) << packing.progress.paired) + 1);
}
// The fewest rows that the math warps pack: with one rank, a few for each warp.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows_at_least(const Packing<P>& packing) {
  constexpr std::uint32_t kBytesOfWarp = 8192;
  const auto row_bytes =
      static_cast<std::uint32_t>(packing.exchange.shape.hidden * P::kNumerics.token_bytes());
  return packing.exchange.distributed() ? 0 : kBytesOfWarp / row_bytes * gridDim.x * kMathWarps;
}
// The number of rows that the math warps pack. They are only of tiles whose slots no other tile had
// before: the math warps must not wait for a slot that only they can free.
template <typename P>
__device__ __forceinline__ std::uint32_t first_rows(const Packing<P>& packing) {
  return min(max(first_row_of(packing, first_tiles(packing)), first_rows_at_least(packing)),
             first_row_of(packing, packing.tokens.packed_slots));
}

// A slot of one of this block's tokens: with a routed expert, with the shared one, or with none.
struct OwnSlot {
  static constexpr std::int32_t kShared = -1, kNone = -2;
  std::uint32_t token = 0, position = 0;  // in the expert's list
  std::int32_t expert = kNone;
};
template <typename P>
__device__ __forceinline__ OwnSlot own_slot(const Packing<P>& packing, std::uint32_t token,
                                            std::uint32_t k) {
  if (k == static_cast<std::uint32_t>(packing.exchange.shape.top_k))
    return {token, token, OwnSlot::kShared};
  const std::size_t at = std::size_t{token} * packing.exchange.shape.top_k + k;
  const std::int32_t expert = packing.exchange.lists.ids[at];
  return {token, packing.exchange.lists.positions[at], expert < 0 ? OwnSlot::kNone : expert};
}

// Packs rows of the tokens that this block has routed, when there is one rank. These rows need no
// lookup, and each is read once for all its places. The math warps call it before tiles are placed.
// Until then they rehearse it on rows of no bytes, because code that is fetched after weights have
// begun to stream queues behind them. Returns how many rows this warp has packed.
template <typename P>
__device__ __forceinline__ std::uint32_t pack_own_tokens(const Packing<P>& packing) {
  constexpr std::uint32_t kVectors = kScaled<P> && kFewRegisters<P> ? 4 : 8, kStep = 16 * 32;
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kWarpgroup / 32;
  const auto row_bytes =
      static_cast<std::uint32_t>(packing.exchange.shape.hidden * P::kNumerics.token_bytes());
  const auto cells = static_cast<std::uint32_t>(packing.exchange.shape.cells_per_token);
  const std::uint32_t token0 = packing.first_token(blockIdx.x);
  const std::uint32_t slots = (packing.first_token(blockIdx.x + 1) - token0) * cells;
  const std::uint32_t at_once = min(protocol::ceil_div(slots, std::uint32_t{kMathWarps}), 32u);
  std::uint32_t slot0 = warp * at_once, packed = 0;
  // Lane i < at_once looks up slot i.
  const auto find_slot = [&]() -> OwnSlot {
    const std::uint32_t slot = slot0 + lane;
    if (lane >= at_once || slot >= slots) return {};
    return own_slot(packing, token0 + slot / cells, slot % cells);
  };
  OwnSlot own = find_slot();
#pragma unroll 1
  for (std::uint32_t rehearsal = opaque<1>();;) {
    // The rows are those of first_rows(). These warps do not wait until it can be called.
    const std::uint32_t tiles = first_tiles(packing), rows = first_rows_at_least(packing);
    const std::uint32_t bytes = rehearsal != 0 ? 0 : row_bytes;
    const std::uint32_t groups = rehearsal != 0 ? 0 : packing.tokens.x_groups;
    std::uint32_t place = 0;
    bool mine = own.expert != OwnSlot::kNone;
    if (mine) {
      protocol::TokenTiles cut = packing.table.state.shared_tiles;
      std::uint32_t first_row = 0, first_tile = 0;
      if (own.expert != OwnSlot::kShared) {
        cut = packing.table.tiles_of(own.expert);
        first_tile = packing.table.block.tile_begin[own.expert];
        first_row = packing.table.block.row_begin[own.expert];
      }
      place = packing.table.place_of(cut, first_tile, own.position);
      const std::uint32_t tile = place / kMaxHeight<P>;
      mine = rehearsal == 0 && tile < packing.tokens.packed_slots &&
             (tile < tiles || first_row + own.position < rows);
    }
    const std::uint32_t my_row = packing.packed_row(place);
    std::uint32_t left = __ballot_sync(~0u, mine);
    packed += __popc(left);
    left |= rehearsal;
#pragma unroll 1
    while (left != 0) {
      const std::uint32_t token = __shfl_sync(~0u, own.token, __ffs(static_cast<int>(left)) - 1);
      const std::uint32_t places = __ballot_sync(~0u, mine && own.token == token) | rehearsal;
      left &= ~places;
      const std::byte* const from =
          packing.exchange.tokens.rows + token * packing.exchange.tokens.row_bytes;
      const float* const scales =
          packing.exchange.tokens.row_scales + token * packing.exchange.tokens.row_scale_stride;
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
          std::byte* const to_row = packing.tokens.packed + std::size_t{to} * row_bytes;
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
          float* const to_scales = scales_of_row(packing, to);
          if (lane < groups) to_scales[lane * kMaxHeight<P>] = first_scale;
          for (std::uint32_t group = lane + 32; group < groups; group += 32) {
            to_scales[group * kMaxHeight<P>] = scales[group];
          }
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (mine) add_release_gpu(packing.progress.packed(place / kMaxHeight<P>), RowPart::kUnits);
    if (rehearsal == 0) {
      slot0 += kMathWarps * at_once;
      if (slot0 >= slots) return packed;
      own = find_slot();
    } else {
      rehearsal = 0;
      named_barrier_anywhere<kMathAndScheduler>(kTilesPlaced);
      if (packing.life.state.plan_failed) return packed;
    }
  }
}

// Calls do_part(row, part) for this math warp's parts of `rows` rows. A row goes to one warp, or to
// several if there are enough, and neighbouring rows go to different blocks.
template <typename P, typename DoPart>
__device__ __forceinline__ void share_out(const Packing<P>& packing, std::uint32_t rows,
                                          DoPart&& do_part) {
  const std::uint32_t warps = gridDim.x * kMathWarps;
  const auto row_bytes =
      static_cast<std::uint32_t>(packing.exchange.shape.hidden * P::kNumerics.token_bytes());
  const std::uint32_t log2 = RowPart::log2_of(rows, warps, row_bytes);
#pragma unroll 1
  for (std::uint32_t i = (threadIdx.x / 32 - 4) * gridDim.x + blockIdx.x; i >> log2 < rows;
       i += warps) {
    do_part(i >> log2, RowPart{i & ((1u << log2) - 1), log2});
  }
}

}  // namespace switchyard::gpu
