// The kernel of GroupedGemm: products of experts with their rows of tokens, and nothing around
// them.
//
// Blocks share nothing but the order of tasks, which every role of every block computes by itself
// from the experts' rows. So there is no queue, and blocks need not be resident together. The roles
// are those of the layer kernel (pipeline/roles.h):
//   weights   tasks -> the copy engine: 128 weight rows x 128 bytes per stage
//   tokens    tasks -> the copy engine: the tile's rows x 128 bytes per stage
//   math      two warpgroups: matrix instructions over the ring, the epilogue
#pragma once

#include "gpu/grouped/params.h"
#include "gpu/tile/find_expert.cuh"
#include "gpu/tile/gemm.cuh"
#include "gpu/tile/load.cuh"

namespace switchyard::gpu {

// Weight-major tiles in bf16, of 16 to 256 tokens.
struct GroupedConfig {
  static constexpr Numerics kNumerics{
      .weight = DType::kBF16, .token = DType::kBF16, .scale_group = 0};
  static constexpr TileConfig kTile{.weight_rows = kTileRows,
                                    .token_rows = {256, 32, 16},
                                    .stages = kMaxStages,
                                    .orientation = Orientation::kWeightMajor,
                                    .cluster = 1,
                                    .most_log2_split = 0};
  static constexpr TokenSource kTokens = TokenSource::kPacked;
  static constexpr std::uint32_t kStagesTogether = 1;
  static constexpr int kSlotRows = kTile.max_height();
  static constexpr int kStagedTokens = 16;
  static constexpr RoleRegisters kRegisters{.loading = 88, .math = 208};
};
static_assert(suffice(GroupedConfig::kRegisters));

// Where each expert's rows are.
struct RowTable {
  std::uint32_t tile_begin[kMostGroupedExperts + 1];    // its first tile
  std::uint32_t packed_begin[kMostGroupedExperts + 1];  // its first row in packed order
  // Its first row in the input and the output. Of blocked layouts; of others it is computed.
  std::uint32_t in_begin[kMostGroupedExperts], out_begin[kMostGroupedExperts];
};

struct GroupedStorage {
  RingMemory memory;
  StagingMemory<GroupedConfig> staging;
  RingBarriers barriers;
  RowTable rows;
  LifeState life;
  StageShape<StageLayout<GroupedConfig>> shape;
  std::uint32_t paired;  // 0: TilePipeline asks
};
static_assert(sizeof(GroupedStorage) <= std::size_t{227} * 1024,
              "the block's shared memory is full");

// The expert's first row, of a layout whose blocked rows begin at begin[expert].
__device__ __forceinline__ std::uint32_t first_row(const RowLayout& layout, const RowTable& rows,
                                                   const std::uint32_t* begin,
                                                   std::uint32_t expert) {
  switch (layout.kind) {
    case RowLayout::Kind::kPacked:
      return rows.packed_begin[expert];
    case RowLayout::Kind::kBlocked:
      return begin[expert];
    case RowLayout::Kind::kPadded:
      return expert * static_cast<std::uint32_t>(layout.size);
  }
  return 0;
}

// Computes the table. Called by one warp; each lane takes a run of experts. Returns the height of
// the highest tile. Loops are not unrolled: the code runs once.
__device__ __forceinline__ std::uint32_t place_rows(const GroupedParams& params,
                                                    const GroupedCall& call, RowTable& table) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto num_experts = static_cast<std::uint32_t>(params.num_experts);
  const std::uint32_t per_lane = protocol::ceil_div(num_experts, 32u);
  const std::uint32_t begin = min(lane * per_lane, num_experts);
  const std::uint32_t end = min(begin + per_lane, num_experts);
  const auto end_of = [&](std::uint32_t e) {
    return call.wide_ends
               ? static_cast<std::uint32_t>(static_cast<const std::int64_t*>(call.ends)[e])
               : static_cast<const std::uint32_t*>(call.ends)[e];
  };
  const auto in_block =
      static_cast<std::uint32_t>(call.in.kind == RowLayout::Kind::kBlocked ? call.in.size : 1);
  const auto out_block =
      static_cast<std::uint32_t>(call.out.kind == RowLayout::Kind::kBlocked ? call.out.size : 1);
  std::uint32_t tiles = 0, in = 0, out = 0, height = GroupedConfig::kTile.token_rows.least;
  std::uint32_t row = begin == 0 || begin == end ? 0 : end_of(begin - 1);
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    const std::uint32_t next = end_of(e), rows = next - row;
    const protocol::TokenTiles cut(rows, GroupedConfig::kTile.token_rows);
    table.packed_begin[e] = row;
    table.tile_begin[e] = tiles;
    table.in_begin[e] = in;
    table.out_begin[e] = out;
    tiles += cut.count;
    in += protocol::round_up(rows, in_block);
    out += protocol::round_up(rows, out_block);
    height = max(height, cut.height);
    row = next;
  }
  std::uint32_t tiles_to = tiles, in_to = in, out_to = out;  // sums up to this lane's last expert
#pragma unroll 1
  for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t before[] = {__shfl_up_sync(~0u, tiles_to, offset),
                                    __shfl_up_sync(~0u, in_to, offset),
                                    __shfl_up_sync(~0u, out_to, offset)};
    if (lane < offset) continue;
    tiles_to += before[0];
    in_to += before[1];
    out_to += before[2];
  }
#pragma unroll 1
  for (std::uint32_t e = begin; e < end; ++e) {
    table.tile_begin[e] += tiles_to - tiles;
    table.in_begin[e] += in_to - in;
    table.out_begin[e] += out_to - out;
  }
  if (lane == 31) {
    table.tile_begin[num_experts] = tiles_to;
    table.packed_begin[num_experts] = end_of(num_experts - 1);
  }
  return __reduce_max_sync(~0u, height);
}

// A block's tasks, in the one order in which all of its roles take them: block b has tasks b, b +
// gridDim.x and so on. An expert's tasks stand together, those of one block of weight rows side by
// side, so that blocks that run at the same time read the same weights.
class GroupedTasks {
 public:
  __device__ GroupedTasks(const GroupedParams& params, const RowTable& rows)
      : params_(params), rows_(rows), next_(blockIdx.x) {}

  // False when there are no more.
  __device__ __forceinline__ bool next(TileTask& task) {
    const auto num_experts = static_cast<std::uint32_t>(params_.num_experts);
    if (next_ >= rows_.tile_begin[num_experts] * params_.row_blocks) return false;
    const std::uint32_t expert =
        find_expert(rows_.tile_begin, num_experts, next_ / params_.row_blocks);
    const std::uint32_t rows = rows_.packed_begin[expert + 1] - rows_.packed_begin[expert];
    const protocol::TokenTiles tiles(rows, GroupedConfig::kTile.token_rows);
    const std::uint32_t place = next_ - rows_.tile_begin[expert] * params_.row_blocks;
    const std::uint32_t of_expert = place % tiles.count;
    task = {};
    task.expert = expert;
    task.tile = rows_.tile_begin[expert] + of_expert;
    task.block = place / tiles.count;
    task.first_row = tiles.begin(of_expert);
    task.rows = tiles.end(of_expert) - task.first_row;
    task.units = protocol::ceil_div(task.rows, kUnitRows);
    task.k_blocks = params_.k_blocks;
    task.one_tile = tiles.count == 1 ? 1 : 0;
    next_ += gridDim.x;
    return true;
  }

 private:
  const GroupedParams& params_;
  const RowTable& rows_;
  std::uint32_t next_;
};

// Rows of the input, from any row on. (Rows past the tile's end are another expert's, or none's.
// They are multiplied and not stored.)
struct InputRows {
  const TokenMaps& maps;
  std::uint32_t row;

  template <typename C>
  static constexpr std::uint32_t kRowsOfPlace = 1;
  __device__ std::uint32_t place() const { return row; }
};

template <ActivationKind kKind, bool kGated, bool kActivates>
struct RowsSink {
  const GroupedParams& params;
  const GroupedCall& call;
  const Epilogue<GroupedConfig>& epilogue;
  const RowTable& rows;
  const TileTask& task;

  __device__ void started() {}
  __device__ void multiplied() {}
  template <int kVariant, typename Sums>
  __device__ __forceinline__ void finish(Sums& acc) {
    const std::uint32_t first = call.index != nullptr
                                    ? rows.packed_begin[task.expert]
                                    : first_row(call.out, rows, rows.out_begin, task.expert);
    const auto row_of = [&](std::uint32_t row) {
      const std::uint32_t at = first + task.first_row + row;
      if (call.index == nullptr) return call.y + at * call.y_stride;
      const std::int32_t place = __ldg(call.index + at);
      return place < 0 ? call.nowhere : call.y + place * call.y_stride;
    };
    if constexpr (kActivates) {
      finish_activated<kVariant, kKind, kGated>(epilogue, task, math_group(), row_of, acc);
    } else {
      finish_rows<kVariant>(epilogue, task, math_group(), row_of, acc);
    }
    // After this barrier all of the warpgroup has stored, so the next tile may use its places in
    // shared memory.
    named_barrier<kWarpgroup>(group_barrier(math_group()));
  }
};

template <ActivationKind kKind, bool kGated, bool kActivates>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_kernel(const __grid_constant__ GroupedParams params,
                   const __grid_constant__ GroupedCall call) {
  using C = GroupedConfig;
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<GroupedStorage*>(shared_memory);
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 0) {
    if (elect()) {
      make_ring_barriers<C::kTokens>(block.barriers, 0);
      fence_new_barriers();
      block.life.epoch = 0;
      block.life.going = Going::kOn;
      block.paired = 0;
    }
  } else if (warp == 1) {
    const std::uint32_t height =
        protocol::round_up(place_rows(params, call, block.rows), kUnitRows);
    if (elect()) block.shape = {StageLayout<C>::count(height), StageLayout<C>::bytes(height)};
  }
  __syncthreads();
  const TilePipeline<C> pipeline{{params, block.life}, block.shape,          block.memory.ring,
                                 block.barriers.full,  block.barriers.empty, nullptr,
                                 block.paired};
  GroupedTasks tasks(params, block.rows);
  TileTask task;
  RingPlace place;
  if (warp < kWarpgroup / 32) {
    cutlass::arch::warpgroup_reg_dealloc<C::kRegisters.loading>();
    if (warp == kWeightsWarp && elect()) {
      const FfnParams& ffn = params.routed;
      const WeightMaps& maps = kActivates ? ffn.gemm1_maps : ffn.gemm2_maps;
      constexpr int kGroups = kTileRows / kRowGroup / (kActivates && kGated ? 2 : 1);
      while (tasks.next(task)) {
        const WeightSource source{task.one_tile != 0 ? maps.once : maps.again, false, kGroups,
                                  task.one_tile != 0 ? kEvictFirst : kEvictLast, nullptr};
        if (!load_weights(pipeline, pipeline.ring(), source, task, place, false,
                          [](std::uint32_t) {})) {
          break;
        }
      }
    } else if (warp == kTokensWarp && elect()) {
      while (tasks.next(task)) {
        const InputRows rows{
            call.x_maps,
            first_row(call.in, block.rows, block.rows.in_begin, task.expert) + task.first_row};
        if (!load_tile(pipeline, rows, task, place, 0)) break;
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters.math>();
    const Epilogue<C> epilogue{params, params, params, block.staging.bytes, nullptr, nullptr};
    while (tasks.next(task)) {
      RowsSink<kKind, kGated, kActivates> sink{params, call, epilogue, block.rows, task};
      gemm_tile_of(__shfl_sync(~0u, task.units, 0), pipeline, task,
                   __shfl_sync(~0u, task.k_blocks, 0), kActivates && kGated, place, sink);
      if (!pipeline.goes_on()) {
        params.failures->given_up = 1;
        break;
      }
    }
  }
}

}  // namespace switchyard::gpu
