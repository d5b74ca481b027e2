// The gate's product: router logits as partial sums over slices of the hidden dimension. Routing
// sums them per token in a fixed order. Few tokens make many slices: a unit is a tile of tokens x
// router columns x one slice, and the router's weight should be read by as many SMs as possible.
#pragma once

#include "gpu/pipeline/ring.cuh"
#include "gpu/ptx/bulk_copy.cuh"
#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/mma.cuh"
#include "gpu/ptx/wgmma.cuh"
#include "gpu/route/lists.cuh"
#include "gpu/tile/config.h"

namespace switchyard::gpu {

// The size of a unit: its tokens, its router columns, the depth of one step of its loop over the
// hidden dimension, and the fewest steps of a slice. In small passes the warps take steps in turn:
// with fewer steps some would be idle.
template <typename P, GateLoads = P::kGate>
struct GateUnit {
  static constexpr int kTokens = 32, kColumns = 32, kDepth = 32, kFewestSteps = kMathWarps;
};
template <typename P>
struct GateUnit<P, GateLoads::kCopyEngine> {
  static constexpr int kTokens = kGateBoxRows, kColumns = kMathGroups * kGateBoxRows,
                       kDepth = kStageRowBytes / 2, kFewestSteps = 4;
};

// The gate as its warps see it. They use the ring's memory, which the tasks do not need yet.
template <typename P>
struct Gate {
  Lifetime life;
  const ModelShape& shape;
  const RouterParams& router;
  const RouteCall& call;
  const std::uint32_t& tokens;
  const bool& converts;  // this pass converted the activations
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

// --- Small passes: every warp loads its operands through the caches.

// Stages of the ring while the gate uses it.
inline constexpr std::uint32_t kGateStages = 8;
inline constexpr int kGateStepsAtOnce = 2;  // per warp: loads in flight decide the speed

// Computes partial logits of a small pass in the math warps.
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
  const std::uint32_t thread = reread_thread_index<kThreads>() - (kThreads - kMathThreads);
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  // Lane 4 g + t holds columns 8 t to 8 t + 7 of rows g (and g + 8): one 16-byte load, and two
  // instructions' worth of operands. An operand register may stand for any k, as long as both
  // operands agree.
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
    // The scratch is token-major, so that sums and stores are coalesced over columns.
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

// --- Large passes: the copy engine loads both operands, the tensor cores multiply.

inline constexpr std::uint32_t kGateBoxBytes = kGateBoxRows * kStageRowBytes;

// Computes partial logits of a large pass in the math warps. A stage of the ring holds a box of
// tokens and, for each warpgroup, a box of router columns.
template <typename P>
__device__ __forceinline__ void many_logits(const Gate<P>& gate) {
  using Unit = GateUnit<P>;
  constexpr std::uint32_t kStageBytes = (1 + kMathGroups) * kGateBoxBytes;
  constexpr std::uint32_t kStages = std::min<std::uint32_t>(kGateStages, kRing<P> / kStageBytes);
  const RouterParams& router = gate.router;
  const std::uint32_t tokens = gate.tokens;
  const auto columns = static_cast<std::uint32_t>(router.gate_columns);
  const GateGrid<P> grid(router, tokens);
  const std::uint32_t units = grid.units(), group = __reduce_max_sync(~0u, math_group());
  const std::uint32_t ring = shared_address(gate.ring);
  const std::uint32_t full = shared_address(gate.full);
  bool loads = reread_thread_index<kThreads>() / 32 == kWarpgroup / 32;
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
    // Loads a plane's steps, then the next plane's. (Beyond the last column the box reads the next
    // plane or zeros; their products are not stored.)
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
      // If a stage does not arrive because the pass was given up, no further use of it may be
      // announced.
      loads &= wait_ring<true>(gate.life.waiter(), full + 8 * place.stage, place.parity);
      if (group < boxes) {
        const std::uint32_t stage = ring + place.stage * kStageBytes;
        const std::uint32_t a = __reduce_max_sync(~0u, matrix_address(stage));
        const std::uint32_t b =
            __reduce_max_sync(~0u, matrix_address(stage + (1 + group) * kGateBoxBytes));
        constexpr std::uint32_t kStepBytes = 32;  // of one instruction
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
    // A lane holds rows `lane / 4` and `lane / 4 + 8` of the warp's 16 and, of every 8 columns,
    // columns 2 (lane % 4) and the next.
    const std::uint32_t lane = reread_thread_index<32>();
    const std::uint32_t token = token0 + reread_thread_index<kWarpgroup>() / 32 * 16 + lane / 4;
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

// Adds to logits[j] the slices of column `column + 32 j` of a token's logits, if the column is less
// than `end`. Other blocks wrote the partial sums in this pass, so loads bypass the L1 cache.
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
    // All loads come before the first sum, because each is a round trip to the L2 cache.
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
