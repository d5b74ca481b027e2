// y[to[r]] = x[from[r]]: a product with the identity, between the token source and the row sink of
// blackwell/rows.cuh. It is there to compile and disassemble both for sm_100a. Never run: no
// host code launches it, and it is in no library.
#include "blackwell/rows.cuh"
#include "gpu/tile/policies.h"

namespace switchyard::gpu {
namespace {

struct Config : PackedTiles {
  static constexpr Numerics kNumerics = Numerics::stored_as(DType::kBF16);
  static constexpr TileConfig kTile{.weight_rows = 0,  // the identity is nowhere in memory
                                    .token_rows = {64, 64, 16},
                                    .stages = 4,
                                    .orientation = Orientation::kWeightMajor,
                                    .cluster = 1,
                                    .most_log2_split = 0};
};

struct MoveParams : WaitParams {
  CUtensorMap x, y;
  const std::int32_t *from, *to;  // [rows]
  std::int32_t nowhere;           // see ScatteredRows
  std::uint32_t rows, columns;
};

struct Storage {
  RingMemory memory;
  StagingMemory<Config> staging;
  RingBarriers barriers;
  LifeState life;
  StageShape<StageLayout<Config>> shape;
  std::uint32_t paired;
};

// Reads from a stage's tokens the values that the accumulators stand for: of the weight row (with
// the identity, the column) and the token that tile/weight_major.cuh names.
template <int N>
__device__ __forceinline__ void read_stage(const std::byte* tokens, float (&acc)[N / 2]) {
  const std::uint32_t thread = reread_thread_index<kWarpgroup>(), lane = thread % 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const std::uint32_t column = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const std::uint32_t token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const std::uint32_t at =
        token * kStageRowBytes + ((column / 8 ^ (token & 7)) << 4) + column % 8 * 2;
    acc[i] =
        __uint_as_float(std::uint32_t{*reinterpret_cast<const std::uint16_t*>(tokens + at)} << 16);
  }
}

}  // namespace

// A block for every tile of 64 rows.
__global__ void __launch_bounds__(kThreads, 1)
    move_rows(const __grid_constant__ MoveParams params) {
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<Storage*>(shared_memory);
  constexpr auto kHeight = kMaxHeight<Config>;
  if (threadIdx.x == 0) {
    for (std::uint32_t s = 0; s < kMaxStages; ++s) {
      init_barrier(shared_address(&block.barriers.full[s]), 1);  // no role brings weights
      init_barrier(shared_address(&block.barriers.empty[s]), kMathWarps);
    }
    fence_new_barriers();
    block.life.epoch = 0;
    block.life.going = Going::kOn;
    block.shape = {StageLayout<Config>::count(kHeight), StageLayout<Config>::bytes(kHeight)};
    block.paired = 0;
  }
  __syncthreads();
  const TilePipeline<Config> pipeline{{params, block.life}, block.shape,          block.memory.ring,
                                      block.barriers.full,  block.barriers.empty, nullptr,
                                      block.paired};
  const std::uint32_t first = blockIdx.x * kHeight;
  TileTask task{};
  task.rows = min(kHeight, params.rows - first);
  task.units = protocol::ceil_div(task.rows, kUnitRows);
  task.k_blocks = protocol::ceil_div(params.columns, kStageColumns<Config>);
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  RingPlace place;
  if (warp < kWarpgroup / 32) {
    if (warp == kTokensWarp && elect()) {
      load_tile(pipeline, IndexedTokens{params.x, params.from + first}, task, place, 0);
    }
    return;
  }
  const Ring<StageLayout<Config>> ring = pipeline.ring();
  ScatteredRows<Config> sink{params.y,       params.to + first,   params.nowhere,
                             params.columns, block.staging.bytes, task};
  for (std::uint32_t kb = 0; kb < task.k_blocks; ++kb) {
    if (!wait_ring<true>(pipeline.waiter(), ring.full_barrier(place.stage), place.parity)) break;
    // A stage has 64 columns. The warpgroups take stages in turn.
    const bool mine = kb % kMathGroups == math_group();
    float acc[kHeight / 2];
    if (mine) {
      read_stage<kHeight>(block.memory.ring + (ring.tokens(place.stage) - ring.base), acc);
    }
    __syncwarp();
    if (elect()) arrive(ring.empty_barrier(place.stage));
    if (mine) {
      task.block = kb / kMathGroups;
      sink.finish<kHeight>(acc);
    }
    place.advance(ring.stages);
  }
  sink.end();
  if (!pipeline.goes_on() && threadIdx.x == kWarpgroup) params.failures->given_up = 1;
}

}  // namespace switchyard::gpu
