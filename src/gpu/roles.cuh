// The roles of a block once the pass is planned: scheduler, weights, tokens, math. Each walks the
// tasks of the block in the order in which the scheduler hands them out.
#pragma once

#include "gpu/combine.cuh"
#include "gpu/epilogue.cuh"
#include "gpu/plan.cuh"

namespace switchyard::gpu {

// The queue of tasks as one of its readers sees it.
class TaskReader {
 public:
  __device__ TaskReader(const Pass& pass) : pass_(pass) {}

  // Whether next() will not wait.
  __device__ bool ready() const {
    return test_wait(shared_address(&pass_.block.task_full[count_ % kTaskSlots]),
                     count_ / kTaskSlots % 2);
  }
  // Waits for the next task. One lane of the warp must call release() when all have read it.
  __device__ TaskDescriptor next() {
    const std::uint32_t slot = count_ % kTaskSlots, parity = count_ / kTaskSlots % 2;
    ++count_;
    TaskDescriptor task;
    task.work = Work::kStop;
    if (wait_ring(pass_.waiter(), shared_address(&pass_.block.task_full[slot]), parity)) {
      task = pass_.block.tasks[slot];
    }
    return task;
  }
  // For a role of one thread: the next task that is a GEMM; false when there are no more.
  __device__ bool next_gemm(TaskDescriptor& task) {
    do {
      task = next();
      release();
    } while (task.work == Work::kCombine);
    return task.work != Work::kStop;
  }
  __device__ void release() const {
    arrive(shared_address(&pass_.block.task_empty[(count_ - 1) % kTaskSlots]));
  }

 private:
  const Pass& pass_;
  // Of tasks read. One word tells slot and parity: the math warps have no registers to spare.
  std::uint32_t count_ = 0;
};

// --- Scheduler: one warp. Takes tickets from the counter all blocks share and hands out tasks.

// The task of a pair, or of a block by itself, as this block has to do it.
__device__ __forceinline__ TaskDescriptor describe(const Pass& pass, const protocol::Task& task,
                                                   std::uint32_t share) {
  const LayerParams& layer = pass.layer;
  TaskDescriptor d{};
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
    d.expert = find_expert_together(pass.block.tile_begin, layer.num_experts, task.index);
    tiles = protocol::TokenTiles(pass.block.expert_rows[d.expert], kTileShape);
    tile_of_expert -= pass.block.tile_begin[d.expert];
  }
  d.first_row = tiles.begin(tile_of_expert);
  d.rows = tiles.end(tile_of_expert) - d.first_row;
  d.units = protocol::ceil_div(d.rows, kUnitRows);
  d.one_tile = tiles.count == 1 ? 1 : 0;
  if (d.shared == 0) {
    d.list = (pass.state().tables.alone
                  ? pass.block.own.lists + pass.block.row_begin[d.expert] -
                        pass.state().shared_tiles.rows
                  : layer.lists + static_cast<std::size_t>(d.expert) * layer.max_tokens) +
             d.first_row;
  }
  const bool first = task.kind == protocol::TaskKind::kGemm1;
  d.work = first ? Work::kGemm1 : Work::kGemm2;
  const int depth = first ? layer.hidden : pass.ffn(d.shared != 0).intermediate;
  d.k_blocks = static_cast<std::uint32_t>(protocol::ceil_div(depth, kStageRowBytes / 2));
  if (const std::uint32_t log2 = first ? 0 : pass.state().log2_splits; log2 != 0) {
    d.split = d.block & ((1u << log2) - 1);
    d.block >>= log2;
    d.first_k_block = d.k_blocks * d.split >> log2;
    d.k_blocks = (d.k_blocks * (d.split + 1) >> log2) - d.first_k_block;
  }
  return d;
}

// The second block has read the ticket before: only then did it demand this one.
__device__ __forceinline__ void send_ticket(BlockStorage& block, std::uint32_t ticket) {
  asm volatile(
      "st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_pair(shared_address(&block.ticket), 1)),
      "r"(ticket)
      : "memory");
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
  arrive_in_pair(address_in_pair(shared_address(&block.ticket_full), 1));
}
__device__ __forceinline__ std::uint32_t load_ticket(const BlockStorage& block) {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
  return *static_cast<const volatile std::uint32_t*>(&block.ticket);
}

__device__ __forceinline__ void scheduler_role(const Pass& pass) {
  const LayerParams& layer = pass.layer;
  // The two blocks of a pair do each task together, the first taking the tickets; in small passes
  // every block is for itself.
  const std::uint32_t paired = pass.call.paired, share = paired == 0 ? 0 : rank_in_pair();
  const std::uint32_t log2_splits = pass.state().log2_splits;
  protocol::Workload work;
  work.num_shared_tiles = pass.state().shared_tiles.count;
  work.num_routed_tiles =
      pass.block.tile_begin[layer.num_experts] - pass.state().shared_tiles.count;
  work.shared_gemm1_blocks = layer.shared.gemm1_blocks >> paired;
  work.shared_gemm2_blocks = layer.shared.gemm2_blocks << log2_splits >> paired;
  work.routed_gemm1_blocks = layer.routed.gemm1_blocks >> paired;
  work.routed_gemm2_blocks = layer.routed.gemm2_blocks << log2_splits >> paired;
  const std::uint32_t log2_chunk = pass.state().log2_combine_chunk + paired;
  work.num_combine_chunks = (pass.call.tokens + (1u << log2_chunk) - 1) >> log2_chunk;
  work.band = pass.state().band;
  work.lag = work.band == 1 ? layer.lag : layer.banded_lag;
  const std::uint32_t num_tasks = work.num_gemm_tasks() + work.num_combine_chunks;
  const bool speaks = threadIdx.x % 32 == 0;
  std::uint32_t heard = 0;  // parity of demands, or of tickets from the first block
  RingPlace place;
  const auto slot_empty = [&] { return shared_address(&pass.block.task_empty[place.stage]); };
  for (std::uint32_t ticket = blockIdx.x >> paired;;) {
    const bool last = ticket >= num_tasks;
    TaskDescriptor task{};
    task.work = Work::kStop;
    if (!last) task = describe(pass, protocol::tile_task_at(work, ticket), share);
    if (!wait_ring(pass.waiter(), slot_empty(), place.parity ^ 1)) return;
    if (speaks) {
      pass.block.tasks[place.stage] = task;
      arrive(shared_address(&pass.block.task_full[place.stage]));
    }
    place.advance(kTaskSlots);
    if (last) return;
    if (share == 0) {
      // No sooner than need be: a ticket taken is a task that no other block can do.
      if (!wait_ring(pass.waiter(), shared_address(&pass.block.demand), heard)) return;
      if (speaks) {
        ticket = (gridDim.x >> paired) + atomicAdd(pass.state().words.next_task(), 1u);
        if (paired != 0) send_ticket(pass.block, ticket);
      }
      ticket = __shfl_sync(~0u, ticket, 0);
    } else {
      if (!wait_ring(pass.waiter(), shared_address(&pass.block.ticket_full), heard)) return;
      ticket = load_ticket(pass.block);
    }
    heard ^= 1;
  }
}

// A warp, or a math thread, could do with another task soon.
__device__ __forceinline__ void demand(const Pass& pass) {
  const std::uint32_t barrier = shared_address(&pass.block.demand);
  arrive_in_pair(pass.call.paired == 0 ? barrier : address_in_pair(barrier, 0));
}

// --- Weights: one thread. Streams the tasks' weight rows; they wait for nothing but a free stage.

__device__ __forceinline__ void load_weights(const CUtensorMap& map, std::uint32_t to,
                                             std::uint32_t barrier, int k, int row_group,
                                             int expert, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(row_group), "r"(expert), "l"(policy)
      : "memory");
}

template <bool kGated>
__device__ __forceinline__ void weights_role(const Pass& pass) {
  // To load before the next task must be known, lest the ring run dry. A ticket taken early is a
  // task that nobody else can do, which matters where there are no more tasks than blocks.
  const std::uint32_t stages_ahead = pass.state().tables.alone ? 4 : 12;
  // As createpolicy.fractional makes them: weights read once need not stay in the L2 cache.
  constexpr std::uint64_t kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;
  const Ring ring = pass.state().ring;
  TaskReader reader(pass);
  RingPlace place;
  for (TaskDescriptor task; reader.next_gemm(task);) {
    const bool first = task.work == Work::kGemm1;
    const FfnParams& ffn = pass.ffn(task.shared != 0);
    const CUtensorMap& map = first ? ffn.gemm1_map : ffn.gemm2_map;
    // Of a gated first GEMM, half of the box's rows are gate's and half up's.
    const int groups = kTileRows / kRowGroup / (first && kGated ? 2 : 1);
    const std::uint64_t policy = task.one_tile != 0 ? kEvictFirst : kEvictLast;
    const std::uint32_t last_but_few =
        task.k_blocks > stages_ahead ? task.k_blocks - stages_ahead : 0;
    for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
      if (!wait_ring(pass.waiter(), ring.empty_barrier(place.stage), place.parity ^ 1)) return;
      if (kb == last_but_few) demand(pass);
      const std::uint32_t full = ring.full_barrier(place.stage);
      arrive_expect_bytes(full, kWeightStageBytes);
      load_weights(map, ring.weights(place.stage), full,
                   static_cast<int>((task.first_k_block + kb) * (kStageRowBytes / 2)),
                   static_cast<int>(task.block) * groups, static_cast<int>(task.expert), policy);
      place.advance(ring.stages);
    }
  }
}

// --- Tokens: one thread. Loads the packed rows of the tile.

// What others wrote with ordinary stores and this thread acquired, the copy engine must see too.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Into this block's ring or, `paired`, into that of both blocks of the pair.
__device__ __forceinline__ void load_tokens(const CUtensorMap& map, std::uint32_t to,
                                            std::uint32_t barrier, int k, int row, bool paired) {
  if (paired) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(row), "h"(static_cast<std::uint16_t>((1 << kPair) - 1))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(row)
        : "memory");
  }
}

// All stages of a task's tokens, packed or of h. Of several threads that each arrive, the first
// loads. Each block of a pair loads half of them, for both. False if the pass was given up.
template <std::uint32_t kShares>
__device__ __forceinline__ bool load_tile(const Pass& pass, const TaskDescriptor& task,
                                          RingPlace& place, std::uint32_t thread) {
  constexpr std::uint32_t kUnitBytes = kUnitRows * kStageRowBytes;
  constexpr std::uint32_t kUnitsOfMany = TokenMaps::kManyRows / kUnitRows;
  static_assert(TokenMaps::kFewRows == kUnitRows);
  const Ring ring = pass.state().ring;
  const bool first = task.work == Work::kGemm1;
  const TokenMaps& maps = first ? pass.layer.x_maps : pass.ffn(task.shared != 0).h_maps;
  const std::uint32_t slots = first ? pass.layer.packed_slots : pass.layer.h_slots;
  const std::uint32_t share = kShares == 1 ? 0 : rank_in_pair();
  const std::uint32_t begin = task.units * share / kShares;
  const std::uint32_t end = task.units * (share + 1) / kShares;
  const auto row0 = static_cast<int>(task.tile % slots * kTileShape.max_height + begin * kUnitRows);
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!wait_ring(pass.waiter(), ring.empty_barrier(place.stage), place.parity ^ 1)) return false;
    const std::uint32_t full = ring.full_barrier(place.stage);
    if (thread != 0) {
      arrive(full);
      place.advance(ring.stages);
      continue;
    }
    arrive_expect_bytes(full, task.units * kUnitBytes);
    std::uint32_t to = ring.tokens(place.stage) + begin * kUnitBytes;
    const auto k = static_cast<int>((task.first_k_block + kb) * (kStageRowBytes / 2));
    int row = row0;
    for (std::uint32_t i = 0; i < (end - begin) / kUnitsOfMany; ++i) {
      load_tokens(maps.many, to, full, k, row, kShares != 1);
      to += kUnitsOfMany * kUnitBytes;
      row += TokenMaps::kManyRows;
    }
    for (std::uint32_t i = 0; i < (end - begin) % kUnitsOfMany; ++i) {
      load_tokens(maps.few, to, full, k, row, kShares != 1);
      to += kUnitBytes;
      row += TokenMaps::kFewRows;
    }
    place.advance(ring.stages);
  }
  return true;
}

__device__ __forceinline__ void tokens_role(const Pass& pass) {
  TaskReader reader(pass);
  RingPlace place;
  for (TaskDescriptor task; reader.next_gemm(task);) {
    const bool first = task.work == Work::kGemm1;
    // Given up or not, the block goes on: its other roles wait for these stages.
    pass.waiter().wait(first ? protocol::Phase::kDispatch : protocol::Phase::kExperts, task.tile,
                       [&] {
                         return first ? load_acquire_gpu(pass.packed(task.tile)) >= task.rows
                                      : pass.gemm1_complete(task.tile);
                       });
    fence_async_proxy();
    const bool loaded = pass.call.paired == 0 ? load_tile<1>(pass, task, place, 0)
                                              : load_tile<kPair>(pass, task, place, 0);
    if (!loaded) return;
  }
}

// --- Gather: two warps, in small passes. They take the rows of the first GEMM from where they are,
// 16 bytes per thread at a time. (A TMA of packed rows is three times as fast: the compiler puts
// three empty shared-memory loads before each cp.async.)

__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies if `valid`, else writes zeros.
__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void gather_role(const Pass& pass) {
  constexpr std::uint32_t kRowsAtOnce = kGatherThreads / 8;  // eight threads take a row's 128 bytes
  constexpr std::uint32_t kMostRounds =
      kMaxOwnTokens / kRowsAtOnce;  // of an expert of a small pass
  constexpr std::uint32_t kRoundBytes = kRowsAtOnce * kStageRowBytes;
  static_assert(kRowsAtOnce % 8 == 0, "a thread keeps its place in the swizzle");
  const std::uint32_t thread = threadIdx.x - 32 * kTokensWarp;
  const std::uint32_t my_row = thread / 8, my_chunk = thread % 8;
  const std::uint32_t my_place = my_row * kStageRowBytes + ((my_chunk ^ (my_row & 7)) << 4);
  const Ring ring = pass.state().ring;
  TaskReader reader(pass);
  RingPlace place;
  for (;;) {
    const TaskDescriptor task = reader.next();
    __syncwarp();
    if (thread % 32 == 0) reader.release();
    if (task.work == Work::kStop) return;
    if (task.work == Work::kCombine) continue;
    if (task.work == Work::kGemm2) {
      // Given up or not, the block goes on: its other roles wait for these stages.
      pass.waiter().wait(protocol::Phase::kExperts, task.tile,
                         [&] { return pass.gemm1_complete(task.tile); });
      fence_async_proxy();
      if (!load_tile<1>(pass, task, place, thread)) return;
      continue;
    }
    const std::byte* from = reinterpret_cast<const std::byte*>(pass.state().x);
    const auto stride = static_cast<std::uint32_t>(pass.state().x_stride) / 8;
    const auto offset_of = [&](std::uint32_t row) {  // of this thread's chunk, in 16 bytes
      const std::uint32_t source =
          task.list == nullptr ? task.first_row + row : RowEntry::token(task.list[row]);
      return source * stride + my_chunk;
    };
    // All but the last few rows in whole rounds, which need no test of each.
    const std::uint32_t rounds = task.rows / kRowsAtOnce;
    const bool one_more = rounds * kRowsAtOnce + my_row < task.rows;
    const std::uint32_t last_offset = one_more ? offset_of(rounds * kRowsAtOnce + my_row) : 0;
    std::uint32_t offsets[kMostRounds];
#pragma unroll
    for (std::uint32_t i = 0; i < kMostRounds; ++i) {
      offsets[i] = i < rounds ? offset_of(i * kRowsAtOnce + my_row) : 0;
    }
    const auto copy_rows = [&](auto copy) {
      const std::uint32_t to = ring.tokens(place.stage) + my_place;
#pragma unroll
      for (std::uint32_t i = 0; i < kMostRounds; ++i) {
        if (i >= rounds) break;
        copy(to + i * kRoundBytes, from + std::size_t{offsets[i]} * 16);
      }
      if (one_more) copy(to + rounds * kRoundBytes, from + std::size_t{last_offset} * 16);
      arrive_after_copies(ring.full_barrier(place.stage));
      place.advance(ring.stages);
      from += kStageRowBytes;
    };
    const auto depth = static_cast<std::uint32_t>(pass.layer.hidden);
    const std::uint32_t whole_blocks = depth / (kStageRowBytes / 2);
    for (std::uint32_t kb = 0; kb < whole_blocks; ++kb) {
      if (!wait_ring(pass.waiter(), ring.empty_barrier(place.stage), place.parity ^ 1)) return;
      copy_rows([](std::uint32_t to, const std::byte* source) { copy_async(to, source); });
    }
    if (whole_blocks < task.k_blocks) {
      if (!wait_ring(pass.waiter(), ring.empty_barrier(place.stage), place.parity ^ 1)) return;
      const bool inside = whole_blocks * (kStageRowBytes / 2) + 8 * my_chunk < depth;
      copy_rows(
          [inside](std::uint32_t to, const std::byte* source) { copy_async(to, source, inside); });
    }
  }
}

// --- Pack: warps that copy token rows into the tiles' slots, in the order of tiles.

// Rows [begin, end), counted over the shared expert's and then all experts' rows, of which this
// warp takes every num_workers-th group of kRows, and tells of a group at a time.
template <std::uint32_t kRows>
__device__ __forceinline__ void pack_rows(const Pass& pass, std::uint32_t begin, std::uint32_t end,
                                          std::uint32_t worker, std::uint32_t num_workers) {
  const LayerParams& layer = pass.layer;
  const BlockStorage& block = pass.block;
  const std::uint32_t lane = threadIdx.x % 32;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  for (std::uint32_t row0 = begin + worker * kRows; row0 < end; row0 += num_workers * kRows) {
    // Lane i < kRows finds row i's place.
    const std::uint32_t row = row0 + lane;
    const bool mine = lane < kRows && row < end;
    std::uint32_t tile = 0, from = 0, to = 0;
    if (mine) {
      protocol::TokenTiles cut = pass.state().shared_tiles;
      std::uint32_t position = row, first_tile = 0;
      from = row;
      if (row >= cut.rows) {
        const std::uint32_t e = find_expert(block.row_begin, layer.num_experts, row);
        position = row - block.row_begin[e];
        first_tile = block.tile_begin[e];
        cut = protocol::TokenTiles(block.expert_rows[e], kTileShape);
        from = RowEntry::token(
            __ldcg(layer.lists + static_cast<std::size_t>(e) * layer.max_tokens + position));
      }
      tile = first_tile + position / cut.height;
      to = pass.packed_row(tile, position % cut.height);
    }
    // The tile that had the slot before is no longer needed once its GEMM1 is complete.
    pass.waiter().wait(protocol::Phase::kDispatch, row0, [&] {
      return __all_sync(~0u, !mine || tile < layer.packed_slots ||
                                 pass.gemm1_complete(tile - layer.packed_slots)) != 0;
    });
    const std::uint32_t rows = min(kRows, end - row0);
#pragma unroll 1
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::uint16_t* const source =
          pass.state().x + __shfl_sync(~0u, from, i) * pass.state().x_stride;
      std::uint16_t* const target = layer.packed + std::size_t{__shfl_sync(~0u, to, i)} * hidden;
      constexpr std::uint32_t kVectors = 8, kStep = 8 * 32;
#pragma unroll 1
      for (std::uint32_t column0 = 8 * lane; column0 < hidden; column0 += kVectors * kStep) {
        uint4 values[kVectors];
#pragma unroll
        for (std::uint32_t v = 0; v < kVectors; ++v) {
          const std::uint32_t column = column0 + v * kStep;
          if (column < hidden) values[v] = *reinterpret_cast<const uint4*>(source + column);
        }
#pragma unroll
        for (std::uint32_t v = 0; v < kVectors; ++v) {
          const std::uint32_t column = column0 + v * kStep;
          if (column < hidden) store_vector(target + column, values[v]);
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (mine) add_release_gpu(pass.packed(tile), 1);
  }
}

// Rows of the tiles whose first tasks all blocks take up at once. The math warps, which have
// nothing else to do then, pack these.
__device__ __forceinline__ std::uint32_t first_rows(const Pass& pass) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t total = pass.block.row_begin[layer.num_experts];
  std::uint32_t blocks = layer.routed.gemm1_blocks;
  if (pass.state().shared_tiles.count != 0) blocks = min(blocks, layer.shared.gemm1_blocks);
  const std::uint32_t tile = max(pass.state().band, protocol::ceil_div(gridDim.x, blocks) + 1);
  if (tile >= pass.block.tile_begin[layer.num_experts]) return total;
  if (pass.is_shared(tile)) return pass.state().shared_tiles.begin(tile);
  const std::uint32_t e = find_expert(pass.block.tile_begin, layer.num_experts, tile);
  const protocol::TokenTiles cut(pass.block.expert_rows[e], kTileShape);
  return pass.block.row_begin[e] + cut.begin(tile - pass.block.tile_begin[e]);
}

__device__ __forceinline__ void pack_role(const Pass& pass) {
  const std::uint32_t total = pass.block.row_begin[pass.layer.num_experts];
  pack_rows<4>(pass, first_rows(pass), total, blockIdx.x, gridDim.x);
}

// --- Math: two warpgroups, each with half of the tile's weight rows.

// What a math warpgroup has stored but its first thread not yet told others. Telling means to wait
// until all stores have reached the L2 cache, so it is put off until the next tile's products are
// under way, but never beyond a wait: what is waited for may depend on it.
class Signals {
 public:
  __device__ explicit Signals(BlockStorage& block) : block_(block) {}

  // The warpgroup stores, and has stored once all of it is past barrier_id, its part of what `word`
  // counts.
  __device__ void put_off(std::uint32_t* word, std::uint32_t barrier_id) {
    send();
    named_barrier<kWarpgroup>(barrier_id);
    if (fresh_thread_index<kWarpgroup>() == 0) mine() = word;
    any_ = true;
  }
  __device__ void send() {
    if (!any_) return;
    any_ = false;
    if (fresh_thread_index<kWarpgroup>() == 0) add_release_gpu(mine(), 1);
  }

 private:
  __device__ std::uint32_t*& mine() const {
    return block_.unsignalled[fresh_thread_index<kThreads>() / kWarpgroup - 1];
  }

  BlockStorage& block_;
  bool any_ = false;
};

// Its waits are not asked how they ended, here and in the epilogue: wgmma must not be in code that
// some threads may have left. A tile that was given up is finished with wrong numbers.
template <int N>
__device__ __forceinline__ void multiply_tile(const Pass& pass, std::uint32_t k_blocks,
                                              RingPlace& place, std::uint32_t group,
                                              Signals& signals, float (&acc)[N / 2]) {
  constexpr int kStepBytes = BF16Policy::kInstructionK * BF16Policy::kElementBytes;
  // Of the K loop: by then the last tile's stores have arrived. (Knowing it, the compiler would
  // make copies of the loop's body.)
  std::uint32_t blocks_before_signals;
  asm volatile("mov.u32 %0, 2;" : "=r"(blocks_before_signals));
  const Ring ring = pass.state().ring;
  const std::uint32_t lane = fresh_thread_index<32>();
  // Of a pair, a lane tells each block that a stage is free.
  const bool speaks = lane <= pass.call.paired;
  const std::uint32_t empty =
      speaks && pass.call.paired != 0 ? address_in_pair(ring.empty, lane) : ring.empty;
  const auto issue = [&](bool accumulate) {
    if (!test_wait(ring.full_barrier(place.stage), place.parity)) {
      signals.send();
      wait_ring(pass.waiter(), ring.full_barrier(place.stage), place.parity);
    }
    // The tokens' copies are ordinary writes; the matrix unit reads through the async proxy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const std::uint32_t a = ring.weights(place.stage) + group * 64 * kStageRowBytes;
    const std::uint32_t b = ring.tokens(place.stage);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStageRowBytes / kStepBytes; ++k) {
      multiply<BF16Policy, N>(swizzled_descriptor(a + k * kStepBytes),
                              swizzled_descriptor(b + k * kStepBytes), acc, accumulate || k != 0);
    }
    cute::warpgroup_commit_batch();
  };
  issue(false);
#pragma unroll 1
  for (std::uint32_t kb = 1; kb < k_blocks; ++kb) {
    const std::uint32_t previous = place.stage;
    place.advance(ring.stages);
    issue(true);
    if (kb == blocks_before_signals) signals.send();
    // All but the newest products are done, and with them the stage before.
    cute::warpgroup_wait<1>();
    if (speaks) arrive_in_pair(empty + 8 * previous);
  }
  cute::warpgroup_wait<0>();
  // The compiler does not know that this wait is for the accumulators: without a fence for each it
  // may compute with them before.
#pragma unroll
  for (float& sum : acc) cute::warpgroup_fence_operand(sum);
  if (speaks) arrive_in_pair(empty + 8 * place.stage);
  place.advance(ring.stages);
}

// Adds the biases of this thread's two weight rows, where the model has any. What few models have
// is in passes of their own: the usual epilogue then has half as many instructions, to be executed,
// and to be fetched.
template <int N>
__device__ __forceinline__ void add_bias(const float* first, const float* second, bool first_exists,
                                         bool second_exists, float (&acc)[N / 2]) {
  if (first == nullptr) return;
  const float biases[2] = {first_exists ? __ldg(first) : 0.0f,
                           second_exists ? __ldg(second) : 0.0f};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] += biases[i / 2 % 2];
}

// Copies the tile's list to where the epilogue finds it at once, while the products are under way.
__device__ __forceinline__ void fetch_entries(const Pass& pass, const TaskDescriptor& task,
                                              std::uint32_t group) {
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t* const to = &pass.block.entries[group][row];
    if (task.list == nullptr) {
      *to = RowEntry::pack(task.first_row + row, pass.layer.top_k);
    } else if (pass.state().tables.alone) {
      *to = task.list[row];
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)),
                   "l"(task.list + row)
                   : "memory");
    }
  }
}
// A thread has the entries that it fetched itself; what it makes of them it shares behind a
// barrier.
__device__ __forceinline__ void await_entries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For the second GEMM, the rows' entries become the places of their cells, in vectors of 16 bytes.
__device__ __forceinline__ void place_cells(const Pass& pass, const TaskDescriptor& task,
                                            std::uint32_t group) {
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  const std::uint32_t vectors = static_cast<std::uint32_t>(pass.layer.hidden) / 8;
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& entry = pass.block.entries[group][row];
    entry = ((RowEntry::cell(entry, cells) << pass.state().log2_splits) + task.split) * vectors;
  }
  named_barrier<kWarpgroup>(1 + group);
}

// Where weights apply to the input: the rows' entries become their weights, and these multiply what
// is linear in the input.
template <int N>
__device__ __forceinline__ void weigh_input(const Pass& pass, const TaskDescriptor& task,
                                            std::uint32_t group, float (&acc)[N / 2]) {
  std::uint32_t* const entries = pass.block.entries[group];
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    const float weight = pass.state().tables.weights[RowEntry::cell(entries[row], cells)];
    entries[row] = __float_as_uint(weight);
  }
  named_barrier<kWarpgroup>(1 + group);
  const std::uint32_t first = 2 * fresh_thread_index<4>();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    // Of rows past the end, something; they are not stored.
    const uint2 weights = *reinterpret_cast<const uint2*>(entries + 8 * n + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * n + i] *= __uint_as_float(i % 2 ? weights.y : weights.x);
  }
}

// The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
template <int N>
__device__ __forceinline__ void clamp_gate_and_up(float limit, float up_bias, float (&acc)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    acc[i] = at_most(acc[i], limit);
    if (i / 2 % 2 == 1) acc[i] = at_least(acc[i], -limit) + up_bias;
  }
}

template <int N, ActivationKind kKind, bool kGated>
__device__ __forceinline__ void finish_gemm1(const Pass& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  if (layer.weight_on_input && task.shared == 0) weigh_input<N>(pass, task, group, acc);
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // of h, from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  const std::uint32_t row = column0 + warp * (kColumns / 4) + lane / 4;
  const std::size_t bias0 = static_cast<std::size_t>(task.expert) * intermediate + row;
  if constexpr (kGated) {
    add_bias<N>(ffn.gate_bias == nullptr ? nullptr : ffn.gate_bias + bias0, ffn.up_bias + bias0,
                row < intermediate, row < intermediate, acc);
    if (layer.clamps) clamp_gate_and_up<N>(layer.limit, layer.up_bias, acc);
  } else {
    add_bias<N>(ffn.up_bias == nullptr ? nullptr : ffn.up_bias + bias0, ffn.up_bias + bias0 + 8,
                row < intermediate, row + 8 < intermediate, acc);
  }
  const float slope = -1.44269504f * layer.alpha;
  const auto pair = [&](int n) {
    const float *first = acc + 4 * n, *second = first + 2;
    const auto value = [slope](float v) { return activate<kKind>(v, slope); };
    if constexpr (kGated) {
      return uint2{pack_bf16(value(first[0]) * second[0], value(first[1]) * second[1]), 0};
    } else {
      return uint2{pack_bf16(value(first[0]), value(first[1])),
                   pack_bf16(value(second[0]), value(second[1]))};
    }
  };
  const std::uint32_t stride = layer.h_stride / 8;
  const std::uint32_t to = task.tile % layer.h_slots * kTileShape.max_height * stride + column0 / 8;
  store_tile<N, kGated>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                        column0 < intermediate ? intermediate - column0 : 0, pair, layer.h,
                        [&](std::uint32_t token) { return to + token * stride; });
}

template <int N>
__device__ __forceinline__ void finish_gemm2(const Pass& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t column0 = task.block * kTileRows + group * 64;
  const std::uint32_t row = column0 + warp * 16 + lane / 4;
  const std::size_t bias0 = static_cast<std::size_t>(task.expert) * hidden + row;
  add_bias<N>(ffn.down_bias == nullptr || task.split != 0 ? nullptr : ffn.down_bias + bias0,
              ffn.down_bias + bias0 + 8, row < hidden, row + 8 < hidden, acc);
  const auto pair = [&](int n) {
    return uint2{pack_bf16(acc[4 * n], acc[4 * n + 1]), pack_bf16(acc[4 * n + 2], acc[4 * n + 3])};
  };
  store_tile<N, false>(
      shared_address(pass.block.staging[group]), 1 + group, task.rows,
      column0 < hidden ? hidden - column0 : 0, pair, layer.cells,
      [&](std::uint32_t token) { return pass.block.entries[group][token] + column0 / 8; });
}

template <int N, ActivationKind kKind, bool kGated>
__device__ __forceinline__ void gemm_task(const Pass& pass, const TaskDescriptor& task,
                                          std::uint32_t k_blocks, bool first, RingPlace& place,
                                          const TaskReader& reader, Signals& signals) {
  const std::uint32_t group = fresh_thread_index<kThreads>() / kWarpgroup - 1;
  float acc[N / 2];
  const bool needs_entries = !first || pass.layer.weight_on_input;
  if (needs_entries) fetch_entries(pass, task, group);
  multiply_tile<N>(pass, k_blocks, place, group, signals, acc);
  // From here on the scheduler may look for another task.
  if (fresh_thread_index<32>() == 0) reader.release();
  if (needs_entries) await_entries();
  if (first) {
    finish_gemm1<N, kKind, kGated>(pass, task, group, acc);
  } else {
    place_cells(pass, task, group);
    finish_gemm2<N>(pass, task, group, acc);
  }
  signals.put_off(first ? pass.gemm1_done(task.tile) : pass.gemm2_done(task.tile), 1 + group);
  if (pass.state().tables.alone) signals.send();
}

__device__ __forceinline__ void combine_task(const Pass& pass, const TaskDescriptor& task) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kThreads>();
  const std::uint32_t warp = thread / 32 - kWarpgroup / 32, lane = thread % 32;
  const std::uint32_t log2_chunk = pass.state().log2_combine_chunk;
  // A warp to a token, or, where there are few tokens, all warps to one.
  const std::uint32_t warps_per_token = kMathWarps >> log2_chunk;
  const std::uint32_t token = (task.tile << log2_chunk) + (warp << log2_chunk) / kMathWarps;
  const auto demand_next = [&] {
    if (thread == kWarpgroup) demand(pass);
  };
  if (token >= pass.call.tokens) return demand_next();
  const RoutingTables& tables = pass.state().tables;
  const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
  const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
  std::uint32_t tile = ~0u;
  float weight = 0;
  if (lane < tables.top_k) {
    const std::int32_t id = tables.ids[slot];
    const std::uint32_t position =
        tables.alone ? pass.block.own.positions[slot] : __ldcg(layer.positions + slot);
    if (id >= 0) {
      weight = layer.weight_on_input ? 1.0f : tables.weights[cell];
      const protocol::TokenTiles cut(pass.block.expert_rows[id], kTileShape);
      tile = pass.block.tile_begin[id] + position / cut.height;
    }
  } else if (lane < tables.cells_per_token) {
    weight = tables.weights[cell];
    tile = token / pass.state().shared_tiles.height;
  }
  const std::uint32_t present = __ballot_sync(~0u, tile != ~0u);
  pass.waiter().wait(protocol::Phase::kCombine, token, [&] {
    return __all_sync(~0u, tile == ~0u || pass.gemm2_complete(tile)) != 0;
  });
  demand_next();
  for (std::uint32_t column = (warp & (warps_per_token - 1)) * kCombinedColumns;
       column < static_cast<std::uint32_t>(layer.hidden);
       column += warps_per_token * kCombinedColumns) {
    combine_columns(layer, pass.call, token, column + 8 * lane, weight, present,
                    pass.state().log2_splits);
  }
}

// The words of the pass after this one, which were those of the pass before. Done while the first
// weights are on their way.
__device__ __forceinline__ void clear_next_words(const Pass& pass) {
  constexpr std::uint32_t kMathThreads = kMathGroups * kWarpgroup;
  const PassWords next = pass.layer.pass_words[~pass.waiter().epoch & 1];
  const std::uint32_t count = PassWords::count(pass.layer.num_experts, pass.layer.max_tiles);
  for (std::uint32_t i = blockIdx.x * kMathThreads + threadIdx.x - kWarpgroup; i < count;
       i += gridDim.x * kMathThreads) {
    next.words[i] = 0;
  }
  // All blocks know this pass's epoch: the next may have another.
  if (threadIdx.x == kWarpgroup && atomicInc(pass.layer.readers, gridDim.x - 1) == gridDim.x - 1) {
    *pass.layer.epoch = pass.waiter().epoch + 1;
  }
}

__device__ __forceinline__ void report_stuck_ring(const Pass& pass) {
  if (threadIdx.x != kWarpgroup || *pass.waiter().going != Going::kRingStuck) return;
  const int rank = pass.layer.heaps.rank;
  protocol::abort_world(pass.layer.heaps,
                        {rank, rank, protocol::Phase::kExperts, pass.waiter().epoch, blockIdx.x, 0,
                         0, 2 * pass.waiter().deadline_ns});
  *pass.layer.failed = static_cast<std::uint32_t>(Failure::kGivenUp);
}

// A first GEMM may not store before the tile that had its slot of h is no longer needed.
__device__ __forceinline__ void await_slot(const Pass& pass, std::uint32_t tile, Signals& signals) {
  if (tile < pass.layer.h_slots) return;
  const std::uint32_t before = tile - pass.layer.h_slots, group = threadIdx.x / kWarpgroup - 1;
  signals.send();
  if (threadIdx.x % kWarpgroup == 0) {
    pass.waiter().wait(protocol::Phase::kExperts, before,
                       [&] { return pass.gemm2_complete(before); });
  }
  named_barrier<kWarpgroup>(1 + group);
}

template <ActivationKind kKind, bool kGated>
__device__ __forceinline__ void math_role(const Pass& pass) {
  clear_next_words(pass);
  if (!pass.state().tables.alone) {
    // A row to a warp, as far as they go, and neighbours to different blocks.
    pack_rows<1>(pass, 0, first_rows(pass), (threadIdx.x / 32 - 4) * gridDim.x + blockIdx.x,
                 gridDim.x * kMathWarps);
  }
  TaskReader reader(pass);
  Signals signals(pass.block);
  RingPlace place;
  for (;;) {
    if (!reader.ready()) signals.send();
    const TaskDescriptor task = reader.next();
    __syncwarp();
    // Told to be the same in all lanes, the compiler keeps the warp together; all of it in one
    // word.
    const std::uint32_t head = __shfl_sync(
        ~0u, task.k_blocks << 8 | task.units << 2 | static_cast<std::uint32_t>(task.work), 0);
    const auto work = static_cast<Work>(head & 3);
    const bool gemm = work == Work::kGemm1 || work == Work::kGemm2;
    const std::uint32_t k_blocks = head >> 8;
    const bool first = work == Work::kGemm1;
    if (first) await_slot(pass, task.tile, signals);
    switch (gemm ? head >> 2 & 63 : 0) {
#define SWITCHYARD_HEIGHT(height)                                                          \
  case (height) / 16:                                                                      \
    gemm_task<height, kKind, kGated>(pass, task, k_blocks, first, place, reader, signals); \
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
        signals.send();
        if (threadIdx.x % 32 == 0) reader.release();
        if (work != Work::kCombine) {
          report_stuck_ring(pass);
          return;
        }
        combine_task(pass, task);
    }
    if (threadIdx.x == kWarpgroup) protocol::note_progress(*pass.waiter().heaps);
  }
}

}  // namespace switchyard::gpu
