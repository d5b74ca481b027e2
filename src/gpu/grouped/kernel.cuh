// The kernels of GroupedGemm: products of experts with their rows of tokens, and nothing around
// them.
//
// Blocks share nothing but the order of tasks, which every role of every block computes by itself
// from the experts' rows. So there is no queue, and blocks need not be resident together. Where
// experts have many rows, blocks are launched in pairs that do each task together, as in the layer
// kernel (layer/kernel.cuh), whose roles they have, too (pipeline/roles.h):
//   weights   tasks -> the copy engine: 128 or 256 weight rows x 128 bytes per stage
//   tokens    tasks -> the copy engine: the tile's rows x 128 bytes per stage; in FP8 also the
//             rows' scales, multiplied by the weights'. Through an index two other warps copy
//             the rows (grouped/gather.cuh)
//   math      two warpgroups: matrix instructions over the ring, the epilogue
#pragma once

#include "gpu/grouped/choose.cuh"
#include "gpu/grouped/finish.cuh"
#include "gpu/grouped/gather.cuh"
#include "gpu/tile/cut_task.cuh"
#include "gpu/tile/load.cuh"
#include "gpu/tile/policies.h"

namespace switchyard::gpu {

// Rows may also be gathered through an index.
struct BF16Grouped : BF16Tiles {
  static constexpr bool kMayGather = true;
};
struct F16Grouped : F16Tiles {
  static constexpr bool kMayGather = true;
};
struct FP8Grouped : FP8Tiles {
  static constexpr bool kMayGather = true;
};
struct MXFP4Grouped : MXFP4Tiles {
  static constexpr bool kMayGather = true;
};
struct INT4Grouped : INT4Tiles {
  static constexpr bool kMayGather = true;
};
// Rows have their scales in packed order, not in the ring: see finish_grouped(). They are always
// prepared, because a row has one scale here.
struct MXFP4FP8Grouped : MXFP4FP8Tiles {
  static constexpr Numerics kNumerics{{DType::kF4E2M1, DType::kF8E4M3, 32},
                                      {DType::kF8E4M3, DType::kF8E4M3, 0}};
  static constexpr TileConfig kTile = MXFP4Tiles::kTile;
  static constexpr bool kMayGather = true;
};

template <typename C>
struct GroupedStorage {
  RingMemory memory;
  StagingMemory<C> staging;
  ScaleMemory<C> scales;
  RingBarriers barriers;
  RowTable rows;
  GroupedCut cut;
  LifeState life;
  alignas(16) IndexMemory index;
  StageShape<StageLayout<C>> shape;
  std::uint32_t last_part[kMathGroups];  // see join_parts()

  __device__ const std::byte* ring_scales() const {
    if constexpr (kScaled<C>) {
      return scales.scales;
    } else {
      return nullptr;
    }
  }
};

// A block's tasks, in the one order in which all of its roles take them: block b, or pair b, has
// tasks b, b + the number of blocks or pairs, and so on. An expert's tasks stand together, and of
// those a band of tiles'; then those of one block of weight rows, so that blocks that run at the
// same time read the same weights.
template <typename C, bool kFirst>
class GroupedTasks {
 public:
  __device__ GroupedTasks(const GroupedParams& params, const GroupedCut& cut, const RowTable& rows,
                          const std::uint32_t& paired)
      : params_(params), cut_(cut), rows_(rows), paired_(paired), next_(blockIdx.x >> paired) {}

  // Returns false when there are no more tasks.
  __device__ __forceinline__ bool next(TileTask& task) {
    const auto num_experts = static_cast<std::uint32_t>(params_.num_experts);
    const std::uint32_t blocks = (params_.row_blocks + paired_) >> paired_;
    const std::uint32_t of_tile = blocks << cut_.log2_splits;  // tasks
    if (next_ >= rows_.tile_begin[num_experts] * of_tile) return false;
    task = {};
    task.kind = kFirst ? TaskKind::kGemm1 : TaskKind::kGemm2;
    task.expert = find_expert(rows_.tile_begin, num_experts, next_ / of_tile);
    TileCut cut;
    cut.tiles = protocol::TokenTiles(
        rows_.packed_begin[task.expert + 1] - rows_.packed_begin[task.expert], cut_.tile);
    cut.first_tile = rows_.tile_begin[task.expert];
    const std::uint32_t place = next_ - cut.first_tile * of_tile;
    const std::uint32_t first_of_band = place / of_tile / cut_.band * cut_.band;
    cut.band = min(cut_.band, cut.tiles.count - first_of_band);
    const std::uint32_t place_in_band = place - first_of_band * of_tile;
    cut.of_band = place_in_band % cut.band;
    cut.tile = first_of_band + cut.of_band;
    cut.part = place_in_band / cut.band;
    cut.k_blocks = params_.k_blocks;
    cut.log2_splits = cut_.log2_splits;
    cut_task<C>(task, cut, paired_, paired_ == 0 ? 0 : rank_in_pair());
    next_ += gridDim.x >> paired_;
    return true;
  }

 private:
  const GroupedParams& params_;
  const GroupedCut& cut_;
  const RowTable& rows_;
  const std::uint32_t& paired_;
  std::uint32_t next_;
};

// Rows of the input, from any row on. (Rows past the tile's end are another expert's, or none's.
// They are multiplied and not stored.)
struct InputRows {
  const TokenMaps& maps;
  const float* all_scales;
  std::int64_t scale_stride;
  std::uint32_t row;

  template <typename C>
  static constexpr std::uint32_t kRowsOfPlace = 1;
  __device__ std::uint32_t place() const { return row; }

  template <typename C>
  struct Scales {
    const float* at[4];
    __device__ float4 next() {
      return {__ldg(at[0]++), __ldg(at[1]++), __ldg(at[2]++), __ldg(at[3]++)};
    }
  };
  // Tokens that the tile does not have take the last one's: behind it there may be nothing.
  template <typename C>
  __device__ Scales<C> scales_of(const TileTask& task, std::uint32_t token) const {
    Scales<C> scales;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      scales.at[i] =
          all_scales + (row + min(token + i, task.rows - 1)) * scale_stride + task.first_k_block;
    }
    return scales;
  }
};

template <typename C, bool kGated, bool kActivates>
struct RowsSink {
  const GroupedParams& params;
  const GroupedCall& call;
  const Epilogue<C>& epilogue;
  const RowTable& rows;
  const std::uint32_t& log2_splits;
  std::uint32_t* last_part;
  const TileTask& task;

  __device__ void started() {}
  __device__ std::uint32_t code_tables() const { return shared_address(epilogue.tables); }
  __device__ void multiplied() {}
  template <int kVariant, typename Sums>
  __device__ __forceinline__ void finish(Sums& acc) {
    finish_grouped<kVariant, kGated, kActivates>(params, epilogue,
                                                 TileOutput(call, rows, task, log2_splits),
                                                 math_group(), last_part + math_group(), acc);
    // After this barrier all of the warpgroup has stored, so the next tile may use its places in
    // shared memory. (A token-major warp has places of its own.)
    if constexpr (!kTokenMajor<C>) named_barrier<kWarpgroup>(group_barrier(math_group()));
  }
};

template <typename C, bool kGated, bool kActivates>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_kernel(const __grid_constant__ GroupedParams params,
                   const __grid_constant__ GroupedCall call) {
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<GroupedStorage<C>*>(shared_memory);
  static_assert(sizeof(GroupedStorage<C>) <= std::size_t{227} * 1024,
                "the block's shared memory is full");
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 0) {
    if (elect()) {
      make_ring_barriers<C::kTokens, C::kTile.stages>(block.barriers, call.paired,
                                                      call.gathers != 0 ? kIndexArrivals : 0);
      fence_new_barriers();
      block.life.epoch = 0;
      block.life.going = Going::kOn;
    }
  } else if (warp == 1) {
    if (call.num_candidates != 0) {
      choose_cut(call, params.rule, params.num_experts, block.cut);
    } else {
      if (elect()) {
        block.cut = params.cut;
        if (blockIdx.x == 0 && call.chosen != nullptr) *call.chosen = -1;
      }
      __syncwarp();
      if (kTokenMajor<C> && params.may_halve && call.paired == 0) {
        halve_tiles(call, static_cast<std::uint32_t>(params.num_experts), params.row_blocks,
                    block.cut);
      }
    }
    const std::uint32_t height = protocol::round_up(
        place_rows(call, params.num_experts, block.cut.tile, block.rows), kUnitRows);
    if constexpr (!StageLayout<C>::kFixed) {
      if (elect()) {
        block.shape = {min(StageLayout<C>::count(height), block.cut.most_stages),
                       StageLayout<C>::bytes(height)};
      }
    }
  }
  const std::uint64_t* tables = nullptr;
  if constexpr (kMakesCodes<C>) {
    make_code_tables(block.scales.notes);
    tables = block.scales.notes.tables;
  }
  __syncthreads();
  // From here on the blocks of a pair write into each other's memory.
  if (call.paired != 0) pair_sync();
  const TilePipeline<C> pipeline{{params, block.life}, block.shape,          block.memory.ring,
                                 block.barriers.full,  block.barriers.empty, block.ring_scales(),
                                 call.paired,          call.gathers};
  constexpr bool kMeets = kActivates && kGated;
  GroupedTasks<C, kActivates> tasks(params, block.cut, block.rows, call.paired);
  TileTask task;
  RingPlace place;
  if (warp < kWarpgroup / 32) {
    cutlass::arch::warpgroup_reg_dealloc<C::kRegisters.loading>();
    if (warp == kWeightsWarp && elect()) {
      const FfnParams& ffn = params.routed;
      const WeightMaps& maps = kActivates ? ffn.gemm1_maps : ffn.gemm2_maps;
      constexpr int kGroups = kTileRows / kRowGroup / (kMeets ? 2 : 1);
      while (tasks.next(task)) {
        WeightSource source{task.one_tile != 0 ? maps.once : maps.again, kMeets && kBoxes<C> != 1,
                            kGroups, task.one_tile != 0 ? kEvictFirst : kEvictLast, nullptr};
        if constexpr (kFourBit<C>) source.boxes = weight_boxes<C>(params, params.hidden, task);
        if (!load_weights(pipeline, pipeline.ring(), source, task, place, false,
                          [](std::uint32_t) {})) {
          break;
        }
      }
    } else if (call.gathers != 0) {
      const bool scales = kJoinedScales<C> && warp == kTokensWarp;
      const bool gathers = warp == kSchedulerWarp || warp == kPackWarp;
      const std::uint32_t of_index = warp == kSchedulerWarp ? 0 : 1;
      while ((scales || gathers) && tasks.next(task)) {
        const IndexedRows rows{
            call,
            first_row(call.in, block.rows, block.rows.in_begin, task.expert) + task.first_row};
        if constexpr (kJoinedScales<C>) {
          if (scales) {
            if (!load_scaled_tile(pipeline, rows, weight_scales<C>(params, params.hidden, task),
                                  task, place, false)) {
              break;
            }
            continue;
          }
        }
        if (!gather_rows(pipeline, rows, params.in_columns, task, place, of_index,
                         block.index.rows[of_index])) {
          break;
        }
      }
    } else if (warp == kTokensWarp && (kJoinedScales<C> || elect())) {
      while (tasks.next(task)) {
        const InputRows rows{
            call.x_maps, call.x_scales, call.scale_stride,
            first_row(call.in, block.rows, block.rows.in_begin, task.expert) + task.first_row};
        if constexpr (kJoinedScales<C>) {
          if (!load_scaled_tile(pipeline, rows, weight_scales<C>(params, params.hidden, task), task,
                                place, false)) {
            break;
          }
        } else {
          if (!load_tile(pipeline, rows, task, place, 0)) break;
        }
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters.math>();
    const Epilogue<C> epilogue{params,  params,  params, block.staging.bytes,
                               nullptr, nullptr, tables};
    while (tasks.next(task)) {
      OperandRegisters<kHoldsOperands<C>> weights;
      RowsSink<C, kGated, kActivates> sink{
          params, call, epilogue, block.rows, block.cut.log2_splits, block.last_part, task};
      gemm_tile_of(__shfl_sync(~0u, task.units, 0), pipeline, task,
                   __shfl_sync(~0u, task.k_blocks, 0), kMeets, place, weights, sink);
      if (!pipeline.goes_on()) {
        params.failures->given_up = 1;
        break;
      }
    }
  }
  // A block must not leave while the other may still write into its memory.
  if (call.paired != 0) pair_sync();
}

}  // namespace switchyard::gpu
