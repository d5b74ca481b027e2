// The weighted sum of a token's cells, in the order of its slots, in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/exchange/exchange.cuh"
#include "gpu/schedule/queue.cuh"

namespace switchyard::gpu {

template <typename P>
struct Combine {
  Exchange<P> exchange;
  const OutputCall& call;
  const RoutingTables& tables;
  const std::uint16_t* own_positions;  // of a pass that this block routes for itself
  Queue<P> queue;
};

// Adds to v the output that is there.
__device__ __forceinline__ void add_output(const OutputCall& call, std::int64_t at, float (&v)[8]) {
  if (call.y_type == DType::kF32) {
    const auto* const from = static_cast<const float*>(call.y) + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += from[i];
    return;
  }
  const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<std::uint16_t*>(call.y) + at);
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u)};
    if (call.y_type == DType::kF16) {
      pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    }
    v[2 * i] += pair.x;
    v[2 * i + 1] += pair.y;
  }
}

__device__ __forceinline__ void store_output(const OutputCall& call, std::uint32_t token,
                                             std::uint32_t column, float (&v)[8]) {
  const std::int64_t at = token * call.y_stride + column;
#pragma unroll
  for (float& value : v) value *= call.scale;
  if (call.accumulate) add_output(call, at, v);
  if (call.y_type == DType::kF32) {
    auto* const to = reinterpret_cast<float4*>(static_cast<float*>(call.y) + at);
    to[0] = float4{v[0], v[1], v[2], v[3]};
    to[1] = float4{v[4], v[5], v[6], v[7]};
    return;
  }
  uint4 packed;
  auto* const words = reinterpret_cast<std::uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (call.y_type == DType::kBF16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
  store_vector(static_cast<std::uint16_t*>(call.y) + at, packed);
}

__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& cell, float weight) {
  const std::uint32_t words[4] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Combines kCombinedColumns columns of one token in one warp. Lane l has 8 columns from 8 l on
// (`column`), and 8 from 256 further on. Lane c < cells_per_token holds slot c's weight, 0 for a
// slot without an expert, whose cells nobody wrote. A slot has a cell for each part of GEMM2's K.
// The loads of kAtOnce cells are in flight together. With `rehearsal` nothing is loaded or stored.
inline constexpr std::uint32_t kCombinedColumns = 512;
template <std::uint32_t kAtOnce>
__device__ __forceinline__ void combine_columns(const ModelShape& shape,
                                                const std::uint16_t* all_cells,
                                                const OutputCall& call, std::uint32_t token,
                                                std::uint32_t column, float weight,
                                                std::uint32_t present, std::uint32_t log2_splits,
                                                bool rehearsal) {
  constexpr std::uint32_t kGroups = 2, kGroup = kCombinedColumns / kGroups;
  if (rehearsal) present = 0;
  const std::uint32_t cells = static_cast<std::uint32_t>(shape.cells_per_token) << log2_splits;
  const auto hidden = static_cast<std::uint32_t>(shape.hidden);
  const std::uint16_t* from = all_cells + static_cast<std::size_t>(token) * cells * hidden + column;
  float sum[kGroups][8] = {};
#pragma unroll 1
  for (std::uint32_t first = 0; first < cells; first += kAtOnce) {
    uint4 values[kAtOnce][kGroups];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const bool there = first + i < cells && (present >> (first + i >> log2_splits) & 1) != 0;
#pragma unroll
      for (std::uint32_t g = 0; g < kGroups; ++g) {
        values[i][g] = uint4{0, 0, 0, 0};
        if (there && column + g * kGroup < hidden) {
          values[i][g] = __ldcg(reinterpret_cast<const uint4*>(
              from + static_cast<std::size_t>(first + i) * hidden + g * kGroup));
        }
      }
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const float factor = __shfl_sync(~0u, weight, (first + i >> log2_splits) % 32);
#pragma unroll
      for (std::uint32_t g = 0; g < kGroups; ++g) add_weighted(sum[g], values[i][g], factor);
    }
  }
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    if (column + g * kGroup < hidden && !rehearsal) {
      store_output(call, token, column + g * kGroup, sum[g]);
    }
  }
}

template <typename P>
__device__ __forceinline__ void combine_task(const Combine<P>& combine, std::uint32_t chunk,
                                             std::uint32_t index) {
  const Exchange<P>& exchange = combine.exchange;
  const std::uint32_t thread = reread_thread_index<kThreads>();
  const std::uint32_t warp = thread / 32 - kWarpgroup / 32, lane = thread % 32;
  const std::uint32_t log2_chunk = exchange.progress.work.log2_combine_chunk;
  // Each token has one warp or, where there are few tokens, several.
  const std::uint32_t warps_per_token = kMathWarps >> log2_chunk;
  const std::uint32_t token = (chunk << log2_chunk) + (warp << log2_chunk) / kMathWarps;
  const auto demand_next = [&] {
    if (thread != kWarpgroup) return;
    for (int i = 0; i < arrivals_of(P::kTokens).demand; ++i) demand(combine.queue);
  };
  const auto began = [&] { exchange.trace.math(kFirstTaskRecord + index, &TraceRecord::begin); };
  if (token >= exchange.progress.tokens) {
    began();
    return demand_next();
  }
  const RoutingTables& tables = combine.tables;
  const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
  const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
  bool exists = false;
  std::uint32_t tile = 0;
  const std::uint32_t* finished = nullptr;  // the flag of an expert, usually another rank's
  float weight = 0;
  std::int32_t id = -1;
  if (lane < tables.top_k) {
    id = tables.ids[slot];
    const std::uint32_t position =
        kOwnStart<P> ? combine.own_positions[slot] : __ldcg(exchange.lists.positions + slot);
    exists = id >= 0;
    if (exists) {
      weight = exchange.activation.weight_on_input ? 1.0f : tables.weights[cell];
      const bool elsewhere =
          exchange.distributed() &&
          static_cast<std::uint32_t>(id - exchange.table.partition.first_expert) >=
              static_cast<std::uint32_t>(exchange.table.partition.local_experts);
      // (Tables are those of the second round, if there are two. Then this rank has flags, too.)
      if (elsewhere || exchange.table.round() != 0) {
        finished = exchange.layer.heap.finished(id).in(exchange.layer.mine);
      } else {
        tile = exchange.table.block.tile_begin[id] + position / exchange.table.tiles_of(id).height;
      }
    }
  } else if (lane < tables.cells_per_token) {
    exists = true;
    weight = tables.weights[cell];
    tile = exchange.table.shared_tile() + token / exchange.table.state.shared_tiles.height;
  }
  const std::uint32_t present = __ballot_sync(~0u, exists);
  // A lane looks again only while its output is missing: looking at own tiles and at others' flags
  // takes two trips to memory.
  bool missing = exists;
  const auto all_done = [&] {
    if (missing) {
      missing = finished != nullptr ? protocol::load_acquire(finished) != exchange.life.flag()
                                    : !exchange.progress.gemm2_complete(tile);
    }
    return !__any_sync(~0u, missing);
  };
  // A warp that has to wait rehearses meanwhile, because instructions are fetched one cache line
  // after another.
#pragma unroll 1
  for (bool rehearsal = !all_done();; rehearsal = false) {
    if (!rehearsal) {
      exchange.life.waiter().template wait_for<WarpPace>(all_done, [&] {
        // The first output that is missing from another rank, if there is one.
        const std::uint32_t absent = __ballot_sync(~0u, finished != nullptr && missing);
        const std::int32_t of = __shfl_sync(~0u, id, absent == 0 ? 0 : __ffs(absent) - 1);
        const int peer =
            absent == 0 ? exchange.life.rank() : exchange.life.layer.heaps.experts.owner(of);
        return protocol::Missing{protocol::Phase::kCombine, peer, token, exchange.life.flag(), 0};
      });
      __syncwarp();  // all lanes see what one has acquired
      demand_next();
      began();
    }
    for (std::uint32_t column = (warp & (warps_per_token - 1)) * kCombinedColumns;
         column < static_cast<std::uint32_t>(exchange.shape.hidden);
         column += warps_per_token * kCombinedColumns) {
      combine_columns<P::kCombinesAtOnce>(exchange.shape, exchange.layer.cells, combine.call, token,
                                          column + 8 * lane, weight, present,
                                          exchange.progress.work.log2_splits, rehearsal);
      if (rehearsal) break;
    }
    if (!rehearsal) return;
  }
}

}  // namespace switchyard::gpu
