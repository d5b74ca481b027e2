// The gate's product: router logits as partial sums over slices of the hidden dimension, which are
// summed in a fixed order when a token is routed. Few tokens make many slices, so that the router's
// weight is read by as many SMs as there are units: tiles of tokens x router columns x one slice.
#pragma once

#include "gpu/pipeline/ring.cuh"
#include "gpu/ptx/bulk_copy.cuh"
#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/mma.cuh"
#include "gpu/ptx/wgmma.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/tile/config.h"

namespace switchyard::gpu {

// What a unit takes of tokens and router columns, a step of its loop of the hidden dimension, and
// the fewest steps of a slice. In small passes the warps take steps in turn: with fewer steps some
// would be idle.
template <typename P, GateLoads = P::kGate>
struct GateUnit {
  static constexpr int kTokens = 32, kColumns = 32, kDepth = 32, kFewestSteps = kMathWarps;
};
template <typename P>
struct GateUnit<P, GateLoads::kCopyEngine> {
  static constexpr int kTokens = kGateBoxRows, kColumns = kMathGroups * kGateBoxRows,
                       kDepth = kStageRowBytes / 2, kFewestSteps = 4;
};

// The gate as the warps see it that compute it. They have the ring, which the tasks do not use yet.
template <typename P>
struct Gate {
  Lifetime life;
  const ModelShape& shape;
  const RouterParams& router;
  const RouteCall& call;
  const std::uint32_t& tokens;
  const bool& converts;  // this pass made the activations
  RouteState& state;
  std::byte* ring;
  std::uint64_t* full;  // [kGateStages]
};

template <typename P>
struct GateGrid {
  std::uint32_t column_groups, token_groups, slices, steps;

  __device__ GateGrid(const RouterParams& router, std::uint32_t tokens) {
    using Unit = GateUnit<P>;
    column_groups = protocol::ceil_div(router.gate_columns, Unit::kColumns);
    token_groups = protocol::ceil_div(tokens, std::uint32_t{Unit::kTokens});
    steps = protocol::ceil_div(router.gate_stride, Unit::kDepth);
    const std::uint32_t tiles = column_groups * token_groups;
    const std::uint32_t most = min(protocol::ceil_div(steps, std::uint32_t{Unit::kFewestSteps}),
                                   std::uint32_t{kMaxGateSlices});
    slices = max(1u, min(most, kNominalBlocks / max(1u, tiles)));
  }
  __device__ std::uint32_t units() const { return column_groups * token_groups * slices; }
};

// --- Small passes: every warp takes what it multiplies from the caches.

// Stages of the ring while the gate has it.
inline constexpr std::uint32_t kGateStages = 8;
inline constexpr int kGateStepsAtOnce = 2;  // by one warp: loads in flight are what counts

// By the math warps.
template <typename P>
__device__ __forceinline__ void few_logits(const Gate<P>& gate) {
  using Unit = GateUnit<P>;
  constexpr int kAtOnce = kGateStepsAtOnce;
  const RouterParams& router = gate.router;
  const std::uint32_t tokens = gate.tokens;
  const std::uint16_t* const x = gate.state.x;
  const std::int64_t x_stride = gate.state.x_stride;
  auto* const scratch = reinterpret_cast<float*>(gate.ring);  // [kMathWarps, tokens, columns]
  const GateGrid<P> grid(router, tokens);
  const std::uint32_t thread = fresh_thread_index<kThreads>() - (kThreads - kMathThreads);
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  // Lane 4 g + t holds columns 8 t to 8 t + 7 of rows g (and g + 8): one 16-byte load, and two
  // instructions' worth of operands. Which k an operand register means is free, as long as both
  // operands mean the same.
  const std::uint32_t g = lane / 4, t = lane % 4;
  const std::uint32_t units = grid.units();
#pragma unroll 1
  for (std::uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const std::uint32_t slice = unit % grid.slices;
    const std::uint32_t column0 = unit / grid.slices % grid.column_groups * Unit::kColumns;
    const std::uint32_t token0 = unit / grid.slices / grid.column_groups * Unit::kTokens;
    const std::uint32_t token_tiles = min((tokens - token0 + 7) / 8, 4u);
    const std::uint32_t step_end = grid.steps * (slice + 1) / grid.slices;
    float sum[2][4][4] = {};
#pragma unroll 1
    for (std::uint32_t step0 = grid.steps * slice / grid.slices + warp; step0 < step_end;
         step0 += kAtOnce * kMathWarps) {
      uint4 b[kAtOnce][4];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const std::uint32_t step = step0 + s * kMathWarps, k = step * Unit::kDepth + 8 * t;
        const bool inside = step < step_end && k < static_cast<std::uint32_t>(gate.shape.hidden);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const std::uint32_t token = token0 + 8 * n + g;
          b[s][n] = load_vector(x + token * x_stride + k, token < tokens && inside);
        }
      }
#pragma unroll 1
      for (int plane = 0; plane < router.num_planes; ++plane) {
        const std::uint16_t* const rows =
            router.router + (static_cast<std::size_t>(plane) * router.gate_columns + column0 + g) *
                                router.gate_stride;
        uint4 a[kAtOnce][4];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const std::uint32_t step = step0 + s * kMathWarps, k = step * Unit::kDepth + 8 * t;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            a[s][m] = load_vector(rows + static_cast<std::size_t>(8 * m) * router.gate_stride + k,
                                  step < step_end);
          }
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (n >= static_cast<int>(token_tiles)) break;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint4 &top = a[s][2 * m], &bottom = a[s][2 * m + 1], &x_part = b[s][n];
              multiply_16x8x16(sum[m][n], top.x, bottom.x, top.y, bottom.y, x_part.x, x_part.y);
              multiply_16x8x16(sum[m][n], top.z, bottom.z, top.w, bottom.w, x_part.z, x_part.w);
            }
          }
        }
      }
    }
    // Token-major, so that sums and stores are coalesced over columns.
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t token = 8 * n + 2 * t + i % 2, column = 16 * m + g + 8 * (i / 2);
          scratch[(warp * Unit::kTokens + token) * Unit::kColumns + column] = sum[m][n][i];
        }
      }
    }
    named_barrier<kMathThreads>(kOfMath);
    for (std::uint32_t i = thread; i < 8 * token_tiles * Unit::kColumns; i += kMathThreads) {
      const std::uint32_t token = token0 + i / Unit::kColumns;
      if (token >= tokens) break;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kMathWarps; ++w) total += scratch[w * Unit::kTokens * Unit::kColumns + i];
      router
          .partial_logits[(static_cast<std::size_t>(slice) * tokens + token) * router.gate_columns +
                          column0 + i % Unit::kColumns] = total;
    }
    named_barrier<kMathThreads>(kOfMath);
  }
}

// --- Large passes: the copy engine brings both operands, the tensor cores multiply.

inline constexpr std::uint32_t kGateBoxBytes = kGateBoxRows * kStageRowBytes;

// By the math warps. The stages of the ring hold a box of tokens, and one of router columns for
// each warpgroup.
template <typename P>
__device__ __forceinline__ void many_logits(const Gate<P>& gate) {
  using Unit = GateUnit<P>;
  constexpr std::uint32_t kStages = kGateStages, kStageBytes = (1 + kMathGroups) * kGateBoxBytes;
  static_assert(kStages * kStageBytes <= kRingBytes);
  const RouterParams& router = gate.router;
  const std::uint32_t tokens = gate.tokens;
  const auto columns = static_cast<std::uint32_t>(router.gate_columns);
  const GateGrid<P> grid(router, tokens);
  const std::uint32_t units = grid.units(), group = __reduce_max_sync(~0u, math_group());
  const std::uint32_t ring = shared_address(gate.ring);
  const std::uint32_t full = shared_address(gate.full);
  bool loads = fresh_thread_index<kThreads>() / 32 == kWarpgroup / 32;
  if (loads && gate.converts) fence_async_proxy();
  RingPlace place;
#pragma unroll 1
  for (std::uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const std::uint32_t slice = unit % grid.slices;
    const std::uint32_t column0 = unit / grid.slices % grid.column_groups * Unit::kColumns;
    const std::uint32_t token0 = unit / grid.slices / grid.column_groups * Unit::kTokens;
    const std::uint32_t first = grid.steps * slice / grid.slices;
    const std::uint32_t depth = grid.steps * (slice + 1) / grid.slices - first;
    const std::uint32_t steps = depth * static_cast<std::uint32_t>(router.num_planes);
    const std::uint32_t boxes =
        min(protocol::ceil_div(columns - column0, std::uint32_t{kGateBoxRows}),
            std::uint32_t{kMathGroups});
    // A plane's steps, then the next plane's. (Beyond the columns is the next plane, or zeros:
    // products that nobody stores.)
    const auto load = [&](std::uint32_t step, std::uint32_t stage) {
      if (!loads || !elect()) return;
      const std::uint32_t to = ring + stage * kStageBytes, barrier = full + 8 * stage;
      const auto k = static_cast<int>((first + step % depth) * Unit::kDepth);
      arrive_expect_bytes(barrier, (1 + boxes) * kGateBoxBytes);
      load_rows(gate.call.x_map, to, barrier, k, static_cast<int>(token0));
      for (std::uint32_t i = 0; i < boxes; ++i) {
        load_rows(router.router_map, to + (1 + i) * kGateBoxBytes, barrier, k,
                  static_cast<int>(step / depth * columns + column0 + i * kGateBoxRows));
      }
    };
    std::uint32_t loaded = 0;
    for (RingPlace next = place; loaded < min(steps, kStages); ++loaded, next.advance(kStages)) {
      load(loaded, next.stage);
    }
    float sums[kGateBoxRows / 2];
#pragma unroll 1
    for (std::uint32_t step = 0; step < steps; ++step) {
      // After a stage that has not come, in a pass that was given up, no other use may be
      // announced.
      loads &= wait_ring<true>(gate.life.waiter(), full + 8 * place.stage, place.parity);
      if (group < boxes) {
        const std::uint32_t stage = ring + place.stage * kStageBytes;
        const std::uint32_t a = __reduce_max_sync(~0u, matrix_address(stage));
        const std::uint32_t b =
            __reduce_max_sync(~0u, matrix_address(stage + (1 + group) * kGateBoxBytes));
        constexpr std::uint32_t kStepBytes = 32;  // an instruction's
        cute::warpgroup_arrive();
#pragma unroll
        for (std::uint32_t k = 0; k < kStageRowBytes / kStepBytes; ++k) {
          multiply<DType::kBF16, kGateBoxRows>(swizzled_descriptor(a + k * kStepBytes / 16),
                                               swizzled_descriptor(b + k * kStepBytes / 16), sums,
                                               step != 0 || k != 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
      }
      named_barrier<kMathThreads>(kOfMath);
      if (loaded < steps) load(loaded++, place.stage);
      place.advance(kStages);
    }
    if (group >= boxes) continue;
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
    // A lane has rows `lane / 4` of the warp's 16 and the eighth after it, columns 2 (lane % 4) and
    // the next of every 8.
    const std::uint32_t lane = fresh_thread_index<32>();
    const std::uint32_t token = token0 + fresh_thread_index<kWarpgroup>() / 32 * 16 + lane / 4;
    const std::uint32_t column = column0 + group * kGateBoxRows + lane % 4 * 2;
#pragma unroll
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t row = token + 8 * half;
      if (row >= tokens) break;
      float* const to =
          router.partial_logits + (std::size_t{slice} * tokens + row) * columns + column;
#pragma unroll
      for (std::uint32_t n = 0; n < kGateBoxRows / 8; ++n) {
        if (column + 8 * n >= columns) break;
        *reinterpret_cast<float2*>(to + 8 * n) = {sums[4 * n + 2 * half],
                                                  sums[4 * n + 2 * half + 1]};
      }
    }
  }
  named_barrier<kMathThreads>(kOfMath);
}

template <typename P>
__device__ __forceinline__ void gate_logits(const Gate<P>& gate) {
  if constexpr (P::kGate == GateLoads::kCaches) {
    few_logits(gate);
  } else {
    many_logits(gate);
  }
}

// logits[j] += column `column + 32 j` of a token's logits, summed over slices, where it is less
// than `end`. Other blocks wrote the partial sums in this pass: past the L1 cache.
template <int kPerLane>
__device__ __forceinline__ void sum_slices(const RouterParams& router, std::uint32_t slices,
                                           std::uint32_t tokens, std::uint32_t token,
                                           std::uint32_t column, std::uint32_t end,
                                           float (&logits)[kPerLane]) {
  constexpr int kAtOnce = kPerLane < 16 ? 16 / kPerLane : 1;
  const float* at =
      router.partial_logits + static_cast<std::size_t>(token) * router.gate_columns + column;
  const std::size_t stride = static_cast<std::size_t>(tokens) * router.gate_columns;
  for (std::uint32_t first = 0; first < slices; first += kAtOnce, at += kAtOnce * stride) {
    // All loads before the first sum, for each is a trip to the L2 cache.
    float values[kAtOnce][kPerLane];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const bool exists = first + s < slices && column + 32 * j < end;
        values[s][j] = exists ? __ldcg(at + s * stride + 32 * j) : 0.0f;
      }
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) logits[j] += values[s][j];
    }
  }
}

}  // namespace switchyard::gpu
