// A tile's multiplication, from the full stages of the ring to a sink. The loading roles fill the
// stages: tile/load.cuh.
#pragma once

#include <algorithm>

#include "gpu/tile/finish.cuh"

namespace switchyard::gpu {

// True if the height of a tile counts in eights of tokens, the least that an instruction takes, and
// not in units. Two blocks on a multiprocessor are short of energy, of which products with columns
// of no token take a part.
template <typename C>
inline constexpr bool kCountsEights = kMakesCodes<C>&& kFewRegisters<C>;
// The height of a task's tile, in eights or in units.
template <typename C>
__device__ __forceinline__ std::uint32_t height_of(const TileTask& task) {
  if constexpr (!kCountsEights<C>) return task.units;
  return 2 * task.units - (task.rows + 8 <= task.units * kUnitRows ? 1 : 0);
}

// Multiplies a tile by a math warpgroup and hands its products to the sink. In token-major tiles a
// warpgroup multiplies kTaskBoxes of the task's boxes of weights. In weight-major tiles kTaskBoxes
// is 0, and a tile has at most N tokens, or N - 8 if it has `fewer`. `meets`: each box has rows of
// gate and then as many of up, which meet in the epilogue. The sink stores the products:
//   started()       the tile's first tokens have arrived; the products are under way
//   multiplied()    the products are complete
//   finish<...>(acc)  stores them; it may call finish_hidden() or finish_rows()
template <int kTaskBoxes, int N, typename C, typename Sink>
__device__ __forceinline__ void gemm_tile(const TilePipeline<C>& pipeline, const TileTask& task,
                                          std::uint32_t k_blocks, bool meets, bool fewer,
                                          RingPlace& place,
                                          OperandRegisters<kHoldsOperands<C>>& weights,
                                          Sink& sink) {
  const auto started = [&] { sink.started(); };
  if constexpr (kTaskBoxes != 0) {
    TokenMajorSums<kTaskBoxes> acc;
    multiply_token_major<kTaskBoxes>(pipeline, k_blocks, place, math_group(), meets, started, acc);
    sink.multiplied();
    sink.template finish<kTaskBoxes>(acc);
  } else {
    float acc[N / 2];
    if constexpr (kMakesCodes<C>) {
      const auto multiply = [&]<int kColumns>() {
        multiply_as_codes<kColumns>(pipeline, task, k_blocks, place, math_group(),
                                    sink.code_tables(), started, weights,
                                    reinterpret_cast<float(&)[kColumns / 2]>(acc));
      };
      // (For 72 tokens the compiler finds too few registers.)
      if constexpr (kCountsEights<C> && N <= 64) {
        if (fewer) {
          multiply.template operator()<N - 8>();
#pragma unroll
          for (int i = N / 2 - 4; i < N / 2; ++i) acc[i] = 0;
        } else {
          multiply.template operator()<N>();
        }
      } else {
        multiply.template operator()<N>();
      }
    } else if constexpr (kStageParts<C> != 1 || (kFourBit<C> && N == 16)) {
      const auto multiply_eights = [&]<int kEights>() {
        if constexpr (kStageParts<C> != 1) {
          multiply_parts<kEights, N>(pipeline, task, place, math_group(), started, acc);
        } else {
          multiply_low<kEights, N>(pipeline, k_blocks, place, math_group(), started, acc);
        }
      };
      // The tile has as many eights of tokens as N has, or one less.
      constexpr int kMostEights = N / 8;
      if (task.rows <= 8 * (kMostEights - 1)) {
        multiply_eights.template operator()<kMostEights - 1>();
      } else {
        multiply_eights.template operator()<kMostEights>();
      }
    } else {
      multiply_weight_major<N>(pipeline, k_blocks, place, math_group(), task.block % 2, started,
                               weights, acc);
    }
    sink.multiplied();
    sink.template finish<N>(acc);
  }
}

// Multiplies a tile, whose height is height_of() its task: chooses the variant of gemm_tile().
template <typename C, typename Sink>
__device__ __forceinline__ void gemm_tile_of(std::uint32_t height, const TilePipeline<C>& pipeline,
                                             const TileTask& task, std::uint32_t k_blocks,
                                             bool meets, RingPlace& place,
                                             OperandRegisters<kHoldsOperands<C>>& weights,
                                             Sink& sink) {
  if constexpr (kTokenMajor<C>) {
    if (height > kInstructionRows / kUnitRows) {
      gemm_tile<2, 0>(pipeline, task, k_blocks, meets, false, place, weights, sink);
    } else {
      gemm_tile<1, 0>(pipeline, task, k_blocks, meets, false, place, weights, sink);
    }
  } else {
    // Tiles have one of these heights, or the highest if that is less.
    constexpr int kHighest = C::kTile.max_height();
    static_assert(kHighest <= 256);
    const bool fewer = kCountsEights<C> && height % 2 != 0;
    switch (kCountsEights<C> ? (height + 1) / 2 : height) {
#define SWITCHYARD_HEIGHT(height, lower)                                                      \
  case (height) / kUnitRows:                                                                  \
    if constexpr ((lower) < kHighest) {                                                       \
      gemm_tile<0, std::min(height, kHighest)>(pipeline, task, k_blocks, meets, fewer, place, \
                                               weights, sink);                                \
    }                                                                                         \
    break;
      SWITCHYARD_HEIGHT(16, 0)
      SWITCHYARD_HEIGHT(32, 16)
      case 3:
        if constexpr (kCountsEights<C> && 32 < kHighest) {
          gemm_tile<0, 48>(pipeline, task, k_blocks, meets, fewer, place, weights, sink);
          break;
        }
        SWITCHYARD_HEIGHT(64, 32)
      case 5: SWITCHYARD_HEIGHT(96, 64)
      case 7: SWITCHYARD_HEIGHT(128, 96)
      case 9: SWITCHYARD_HEIGHT(160, 128)
      case 11: SWITCHYARD_HEIGHT(192, 160)
      case 13: SWITCHYARD_HEIGHT(224, 192)
      case 15: SWITCHYARD_HEIGHT(256, 224)
#undef SWITCHYARD_HEIGHT
      default: break;
    }
  }
}

}  // namespace switchyard::gpu
