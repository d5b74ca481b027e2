// gemm_tile() on its own: a grouped GEMM of nothing but the rooms ptx, pipeline and tile, with
// dense rows for a sink, against fp64. That the kernel compiles shows that the tile needs no other
// room.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/convert.h"
#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/tensor_map.h"
#include "gpu/tile/gemm.cuh"
#include "gpu/tile/load.cuh"
#include "support/on_gpu.h"

namespace switchyard::testing {
namespace {

using namespace gpu;  // NOLINT: the test stands in for a caller in that namespace

// A weight-major configuration in bf16.
struct Config {
  static constexpr Numerics kNumerics = Numerics::stored_as(DType::kBF16);
  static constexpr TileConfig kTile{.weight_rows = kTileRows,
                                    .token_rows = {256, 32, 16},
                                    .stages = 3,
                                    .orientation = Orientation::kWeightMajor,
                                    .cluster = 1,
                                    .most_log2_split = 0};
  static constexpr TokenSource kTokens = TokenSource::kPacked;
  static constexpr std::uint32_t kStagesTogether = 1;
  static constexpr int kSlotRows = kTile.max_height();
  static constexpr int kStagedTokens = 16;
};

struct GemmParams {
  ExpertParams experts;
  CUtensorMap weights;  // over [E, M, K]
  TokenMaps tokens;     // over slots of kSlotRows rows of K
  WaitParams wait;
  ModelShape shape;  // hidden is M
  ActivationParams activation;
  const TileTask* tasks;  // one for each block
  std::uint16_t* y;       // [rows, M]: the tiles' rows, one tile after the other
  std::uint32_t* failed;  // raised by blocks that gave up
};

struct Storage {
  RingMemory memory;
  StagingMemory<Config> staging;
  RingBarriers barriers;
  RowNotes<Config> notes;
  LifeState life;
  StageShape<StageLayout<Config>> shape;
  std::uint32_t paired;
};

// Rows of a dense matrix, from the tile's first_row on.
struct DenseRows {
  const GemmParams& params;
  const Epilogue<Config>& epilogue;
  const TileTask& task;

  __device__ void started() {}
  __device__ void multiplied() {}
  template <int kVariant, typename Sums>
  __device__ void finish(Sums& acc) {
    finish_rows<kVariant>(
        epilogue, task, math_group(),
        [&](std::uint32_t row) {
          return params.y + std::size_t{task.first_row + row} * params.shape.hidden;
        },
        acc);
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) std::byte shared_memory[];
  auto& block = *reinterpret_cast<Storage*>(shared_memory);
  if (threadIdx.x == 0) {
    make_ring_barriers<Config::kTokens, Config::kTile.stages>(block.barriers, 0);
    fence_new_barriers();
    block.life.epoch = 0;
    block.life.going = Going::kOn;
    constexpr auto kHeight = static_cast<std::uint32_t>(Config::kTile.max_height());
    block.shape = {StageLayout<Config>::count(kHeight), StageLayout<Config>::bytes(kHeight)};
    block.paired = 0;
  }
  __syncthreads();
  const TilePipeline<Config> pipeline{
      {params.wait, block.life}, block.shape, block.memory.ring, block.barriers.full,
      block.barriers.empty,      nullptr,     block.paired};
  const TileTask task = params.tasks[blockIdx.x];
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  RingPlace place;
  if (warp < kWarpgroup / 32) {
    cutlass::arch::warpgroup_reg_dealloc<88>();
    if (warp == kWeightsWarp && elect()) {
      const WeightSource source{params.weights, false, kTileRows / kRowGroup, kEvictFirst, nullptr};
      load_weights(pipeline, pipeline.ring(), source, task, place, false, [](std::uint32_t) {});
    } else if (warp == kTokensWarp && elect()) {
      const SlottedTokens tokens{params.tokens, task.tile, nullptr, 0};
      load_tile(pipeline, tokens, task, place, 0);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<208>();
    const Epilogue<Config> epilogue{params.shape,        params.experts,   params.activation,
                                    block.staging.bytes, block.notes.rows, nullptr};
    DenseRows sink{params, epilogue, task};
    OperandRegisters<false> weights;
    gemm_tile_of(__shfl_sync(~0u, task.units, 0), pipeline, task,
                 __shfl_sync(~0u, task.k_blocks, 0), false, place, weights, sink);
    if (!pipeline.goes_on()) atomicAdd(params.failed, 1u);
  }
}

using TileTest = OnGpu<::testing::Test>;

std::vector<std::uint16_t> random_bf16(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& v : values) v = f32_to_bf16(normal(random));
  return values;
}

template <typename T>
DeviceBuffer upload_all(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

// Tiles of every height that is compiled, of several experts; more stages of K than the ring has,
// and neither K nor M a multiple of what is taken at a time.
TEST_F(TileTest, AGroupedGemmWithDenseRows) {
  constexpr std::uint32_t kColumns = 64 * 7 + 24, kOutputs = kTileRows + 72, kExperts = 3;
  const std::vector<std::uint32_t> tile_rows = {1,  16,  17,  40,  64,  70,  96,
                                                99, 128, 130, 161, 200, 224, 256};
  std::uint32_t rows = 0;
  std::vector<TileTask> tasks;
  for (std::uint32_t t = 0; t < tile_rows.size(); ++t) {
    for (std::uint32_t block = 0; block * kTileRows < kOutputs; ++block) {
      TileTask task{};
      task.kind = TaskKind::kGemm2;
      task.tile = t;
      task.rows = tile_rows[t];
      task.units = protocol::ceil_div(task.rows, kUnitRows);
      task.k_blocks = protocol::ceil_div(kColumns, kStageColumns<Config>);
      task.block = block;
      task.first_row = rows;
      task.expert = t % kExperts;
      tasks.push_back(task);
    }
    rows += tile_rows[t];
  }
  const auto weights = random_bf16(std::size_t{kExperts} * kOutputs * kColumns, 1);
  const auto x = random_bf16(tile_rows.size() * Config::kSlotRows * kColumns, 2);
  const DeviceBuffer weights_there = upload_all(weights), x_there = upload_all(x),
                     tasks_there = upload_all(tasks);
  const std::vector<std::uint16_t> poison(std::size_t{rows} * kOutputs, 0xffff);
  const DeviceBuffer y_there = upload_all(poison),
                     failed_there = upload_all(std::vector<std::uint32_t>{0});

  GemmParams params{};
  WeightArray array;
  array.data = weights_there.data();
  array.num_experts = kExperts;
  array.rows = kOutputs;
  array.columns = kColumns;
  array.row_stride = 2 * kColumns;
  array.half_stride = array.expert_stride = std::int64_t{kOutputs} * array.row_stride;
  params.weights = weight_maps(array, BoxOrder::kGroupsInTurn).once;
  params.tokens =
      token_maps(x_there.data(), 2, static_cast<std::int64_t>(tile_rows.size()) * Config::kSlotRows,
                 kColumns, kColumns);
  params.wait.deadline_ns = 1'000'000'000;
  params.wait.block_deadline_ns = block_deadline(params.wait.deadline_ns);
  params.shape.hidden = kOutputs;
  params.tasks = reinterpret_cast<const TileTask*>(tasks_there.data());
  params.y = reinterpret_cast<std::uint16_t*>(y_there.data());
  params.failed = reinterpret_cast<std::uint32_t*>(failed_there.data());
  SWITCHYARD_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(grouped_gemm),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(sizeof(Storage))));
  grouped_gemm<<<static_cast<unsigned>(tasks.size()), kThreads, sizeof(Storage)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
  synchronize_device();

  std::uint32_t failed = 0;
  failed_there.download(&failed, sizeof failed);
  ASSERT_EQ(failed, 0u) << "math warps gave up waiting for a stage";
  std::vector<std::uint16_t> y(poison.size());
  y_there.download(y.data(), y_there.bytes());
  std::uint32_t row = 0;
  for (std::uint32_t t = 0; t < tile_rows.size(); ++t) {
    for (std::uint32_t i = 0; i < tile_rows[t]; ++i, ++row) {
      const std::uint16_t* const token = &x[(std::size_t{t} * Config::kSlotRows + i) * kColumns];
      for (std::uint32_t m = 0; m < kOutputs; ++m) {
        const std::uint16_t* const weight =
            &weights[(std::size_t{t % kExperts} * kOutputs + m) * kColumns];
        double sum = 0, magnitude = 0;
        for (std::uint32_t k = 0; k < kColumns; ++k) {
          const double product = double{bf16_to_f32(token[k])} * bf16_to_f32(weight[k]);
          sum += product;
          magnitude += std::abs(product);
        }
        // Rounding to bf16, and fp32 sums of kColumns products.
        const double bound = std::abs(sum) * 0x1p-8 + magnitude * kColumns * 0x1p-24;
        const double result = bf16_to_f32(y[std::size_t{row} * kOutputs + m]);
        ASSERT_LE(std::abs(result - sum), bound)
            << "row " << i << " of tile " << t << " with " << tile_rows[t] << " rows, output " << m;
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
