// Tiles of large passes in FP8: tokens take the 64 rows of the matrix instruction, and
// weights its columns.
//
// Such tiles are limited by what goes through shared memory: operands, and scales for the sums that
// every thread makes of the stages' products. With weights on the rows a thread needs the scales of
// all the tile's tokens it has, a quarter; with tokens there, of two.
//
// A math warpgroup holds D[64 tokens, 128 weight rows]: of tall tiles, of more than 64 tokens,
// twice, for its half of the tokens and both boxes of the task; of others for its box. A warp has
// 16 tokens; its lane 4 g + t holds tokens g and g + 8 of them, of weight rows 8 n + 2 t and the
// next, in acc[box][4 n .. 4 n + 3]. So a warp has all columns of its tokens, or half of them, and
// finishes them by itself.
#pragma once

#include "gpu/epilogue.cuh"
#include "gpu/multiply.cuh"

namespace switchyard::gpu {

inline constexpr int kTallColumns = kTileRows;  // of an instruction
template <int kBoxes>
using TallSums = float[kBoxes][kTallColumns / 2];

// The tile's first token of this warp.
template <int kBoxes>
__device__ __forceinline__ std::uint32_t tall_warp_row() {
  const std::uint32_t warp = fresh_thread_index<kThreads>() / 32 - kWarpgroup / 32;
  return (kBoxes == 2 ? warp : warp % 4) * 16;
}
// The task's box that acc[i] is of.
template <int kBoxes>
__device__ __forceinline__ std::uint32_t tall_box(int i, std::uint32_t group) {
  return kBoxes == 2 ? static_cast<std::uint32_t>(i) : group;
}

// `meet`: each box has rows of gate and then as many of up, with the scales of the first and the
// second set; else all of a box has those of its own set. started() is called when the tile's
// tokens have come.
template <int kBoxes, typename P, typename Started>
__device__ __forceinline__ void multiply_tall(const Pass<P>& pass, std::uint32_t k_blocks,
                                              RingPlace& place, std::uint32_t group, bool meet,
                                              Started&& started, TallSums<kBoxes>& acc) {
  constexpr int N = kTallColumns;
  constexpr std::uint32_t kSetBytes = kMaxHeight<P> * sizeof(float);
  Multiplier<N, kBoxes == 2 ? Share::kTokens : Share::kBox, P> stage(pass, place, group);
  const Ring<StageLayout<P>> ring = pass.ring();
  float part[N / 2];
#pragma unroll
  for (auto& box : acc) {
#pragma unroll
    for (float& sum : box) sum = 0;
  }
  // The sets of a box's first and second 64 rows, where each box has its own and where not.
  const std::uint32_t gate_step = meet ? 0 : kSetBytes, up = meet ? kSetBytes : 0;
  const std::uint32_t scales0 =
      ring.joined_scales(0, 0) + 4 * (tall_warp_row<kBoxes>() + fresh_thread_index<32>() / 4);
  float of[2][2];  // of a box, while its products are under way
  const auto load_scales = [&](int box) {
    const std::uint32_t gate = scales0 + place.stage * StageLayout<P>::kScaleBytes +
                               tall_box<kBoxes>(box, group) * gate_step;
    const std::uint32_t sets[2] = {gate, gate + up};
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i / 2][i % 2] = load_shared_float(sets[i / 2] + i % 2 * 32);
  };
  const auto sum = [&](int box) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[box][i] += part[i] * of[i / (N / 4)][i / 2 % 2];
  };
  // Multiplies the stage at `place`, up to the products with its last box, which stay under way.
  const auto begin = [&](const auto& operands) {
    stage.issue(operands, 0, part, false);
    if constexpr (kBoxes == 2) {
      load_scales(0);
      stage.await_products(part);
      sum(0);
      stage.issue(operands, 1, part, false);
    }
  };
  // A warpgroup's own chain of products and sums is what takes the time, so nothing else is in it:
  // what the next stage needs is found while the last products of this one are under way, and the
  // loop turns there, where nobody waits for it. All warps of the warpgroup come to the same
  // instructions, whether they find a stage there or wait for it.
  stage.await_stage(stage.ready());
  begin(stage.operands());
  SWITCHYARD_ROLLED
  for (StageCount count(k_blocks);;) {
    load_scales(kBoxes - 1);
    const std::uint32_t current = place.stage;
    count.next();
    stage.advance();
    const auto next = stage.operands();
    stage.await_products(part);
    stage.release_read(current, of);
    const bool ready = count.left() == 0 || stage.ready();
    sum(kBoxes - 1);
    if (__builtin_expect(!ready || count.pauses(), 0)) {
      if (count.ends(started)) break;
      count.go_on();
      if (!ready) stage.await_stage(false);
    }
    begin(next);
  }
}

// What the model has for each of its weight rows, of which this thread has acc's: `op` of each sum
// and its row's number.
template <typename Op>
__device__ __forceinline__ void apply_columns(const float* vector, std::uint32_t column0,
                                              std::uint32_t columns, float* acc, int num_octets,
                                              Op&& op) {
#pragma unroll
  for (int n = 0; n < num_octets; ++n) {
    const std::uint32_t column = column0 + 8 * n;
    const float2 of =
        column < columns ? __ldg(reinterpret_cast<const float2*>(vector + column)) : float2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * n + i] = op(acc[4 * n + i], i % 2 == 0 ? of.x : of.y);
  }
}

// Products of a first GEMM, before the activation.
template <int kBoxes, bool kGated, typename P>
__device__ __forceinline__ void finish_tall_products(const Pass<P>& pass, const TileTask& task,
                                                     std::uint32_t group, TallSums<kBoxes>& acc) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  if (!ffn.more_of_first) return;
  if (layer.weight_on_input && task.shared == 0) {
    fetch_weights(pass, task, group);
    float weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Of rows past the end, something; they are not stored.
      weights[r] = __uint_as_float(
          row_word(pass, group, tall_warp_row<kBoxes>() + fresh_thread_index<32>() / 4 + 8 * r));
    }
#pragma unroll
    for (int i = 0; i < kBoxes * kTallColumns / 2; ++i) {
      acc[i / (kTallColumns / 2)][i % (kTallColumns / 2)] *= weights[i / 2 % 2];
    }
  }
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_columns = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      constexpr std::uint32_t kOfBox = kGated ? kInstructionRows : kTileRows;  // columns of h
      const std::uint32_t column =
          (task.block * 2 + tall_box<kBoxes>(box, group)) * kOfBox + 2 * fresh_thread_index<4>();
      if constexpr (kGated) {
        apply_columns(gate + row0, column, intermediate, acc[box], 8, op);
        apply_columns(up + row0, column, intermediate, acc[box] + 32, 8, op);
      } else {
        apply_columns(up + row0, column, intermediate, acc[box], 16, op);
      }
    }
  };
  for_columns(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  for_columns(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  if (kGated && layer.clamps) {
#pragma unroll
    for (auto& box : acc) {
#pragma unroll
      for (int i = 0; i < kTallColumns / 2; ++i) {
        box[i] = at_most(box[i], layer.limit);
        if (i >= kTallColumns / 4) box[i] = at_least(box[i], -layer.limit) + layer.up_bias;
      }
    }
  }
}

// Where a warp stages half of its 16 tokens, the lanes' first or second, 128 bytes of each at a
// time.
inline constexpr std::uint32_t kTallStagedTokens = 8;
struct TallStaging {
  std::uint32_t base;
  template <typename P>
  __device__ TallStaging(const Pass<P>& pass, std::uint32_t group)
      : base(shared_address(pass.block.staging[group]) +
             fresh_thread_index<kWarpgroup>() / 32 * kTallStagedTokens * kSwizzleRowBytes) {
    static_assert(kTallStagedTokens * kSwizzleRowBytes * 4 <= kStagingBytes<P>);
  }
  __device__ std::uint32_t place(std::uint32_t token, std::uint32_t vector) const {
    return base + token * kSwizzleRowBytes + ((vector ^ (token & 7)) << 4);
  }
  // Stores what is staged: vectors of 16 bytes for which keep(token, vector) holds, to
  // to(token, vector).
  template <typename Keep, typename To>
  __device__ void drain(Keep&& keep, To&& to) const {
    __syncwarp();
#pragma unroll
    for (std::uint32_t i = 0; i < kTallStagedTokens / 4; ++i) {
      const std::uint32_t token = 4 * i + fresh_thread_index<32>() / 8;
      const std::uint32_t vector = fresh_thread_index<8>();
      if (keep(token, vector))
        store_vector(to(token, vector), load_shared_vector(place(token, vector)));
    }
    __syncwarp();
  }
};

// A group of 128 columns of h, or the warpgroup's half of it, from bf16 to codes and scales.
// values[n][r]: columns 8 n + 2 t and the next of the lane's first and second token, from column0;
// overwritten.
template <int kBoxes, int kOctets, typename P>
__device__ __forceinline__ void store_tall_group(const Pass<P>& pass, const TileTask& task,
                                                 std::uint32_t group, std::uint32_t column0,
                                                 std::uint32_t (&values)[kOctets][2]) {
  constexpr bool kHalf = kOctets * 8 != kQuantGroup;
  constexpr std::uint32_t kVectors = kOctets / 2;  // of a token's codes
  const LayerParams& layer = pass.layer;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  const std::uint32_t row0 = tall_warp_row<kBoxes>(), slot = task.tile % layer.h_slots;
  const std::uint32_t t = fresh_thread_index<4>();
  const TallStaging staging(pass, group);
  float most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // In two rows, of which neither waits for the other.
    std::uint32_t pairs[2] = {values[0][r], values[1][r]};
#pragma unroll
    for (int n = 2; n < kOctets; ++n) {
      pairs[n % 2] = larger_magnitudes(pairs[n % 2], values[n][r]);
    }
    std::uint32_t pair = larger_magnitudes(pairs[0], pairs[1]);
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 1));
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 2));
    most[r] = largest_magnitude(pair);
  }
  if constexpr (kHalf) {
    // The other half is the other warpgroup's.
    auto& shared = pass.block.quantized.most;
    const std::uint32_t row = row0 + fresh_thread_index<32>() / 4;
    if (t < 2) shared[group][row + 8 * t] = t == 0 ? most[0] : most[1];
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = at_least(most[r], shared[group ^ 1][row + 8 * r]);
    // Only then may the next tile's be written.
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
  }
  const std::uint32_t staged = fresh_thread_index<32>() / 4;
  const std::size_t to = std::size_t{slot} * kMaxHeight<P> * layer.h_stride + column0;
  // The second token's values take the place of the first's: half of the code.
#pragma unroll 1
  for (std::uint32_t left = untold<2>(), row = row0;;) {
    const GroupScale scale = group_scale(most[0]);
    if (t == 0 && row + staged < task.rows && column0 < intermediate && (!kHalf || group == 0)) {
      layer.h_scales[(std::size_t{slot} * layer.h_groups + column0 / kQuantGroup) * kMaxHeight<P> +
                     row + staged] = scale.scale;
    }
#pragma unroll
    for (int p = 0; p < static_cast<int>(kVectors); ++p) {
      // Columns 2 t and 2 t + 1, and the same plus 8, of 16. Four lanes exchange them: four
      // neighbouring columns for each.
      const std::uint32_t codes = quantize(values[2 * p][0], values[2 * p + 1][0], scale.inverse);
      const std::uint32_t from = fresh_thread_index<32>() / 4 * 4 + t % 2 * 2;
      const std::uint32_t low = __shfl_sync(~0u, codes, from);
      const std::uint32_t high = __shfl_sync(~0u, codes, from + 1);
      store_shared_word(staging.place(staged, p) + 4 * t,
                        __byte_perm(low, high, t < 2 ? 0x5410 : 0x7632));
    }
    staging.drain(
        [&](std::uint32_t token, std::uint32_t vector) {
          return vector < kVectors && row + token < task.rows &&
                 column0 + 16 * vector < intermediate;
        },
        [&](std::uint32_t token, std::uint32_t vector) {
          return layer.h + to + std::size_t{row + token} * layer.h_stride + 16 * vector;
        });
    if (--left == 0) break;
    row += kTallStagedTokens;
    most[0] = most[1];
#pragma unroll
    for (auto& of_both : values) of_both[0] = of_both[1];
  }
}

template <int kBoxes, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_tall_gemm1(const Pass<P>& pass, const TileTask& task,
                                                  std::uint32_t group, TallSums<kBoxes>& acc) {
  finish_tall_products<kBoxes, kGated>(pass, task, group, acc);
  const float slope = 0.5f * pass.layer.alpha;
  const auto value = [slope](float v) { return activate<kKind>(v, slope); };
  if constexpr (kGated) {
    // Each box has 64 columns.
    std::uint32_t values[8 * kBoxes][2];
#pragma unroll
    for (int n = 0; n < 8 * kBoxes; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float *gate = acc[n / 8] + 4 * (n % 8) + 2 * r, *up = gate + kTallColumns / 4;
        values[n][r] = pack_bf16(value(gate[0]) * up[0], value(gate[1]) * up[1]);
      }
    }
    store_tall_group<kBoxes>(pass, task, group,
                             task.block * kQuantGroup + (kBoxes == 1 ? group * 64 : 0), values);
  } else {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      std::uint32_t values[16][2];
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const up = acc[i] + 4 * n + 2 * r;
          values[n][r] = pack_bf16(value(up[0]), value(up[1]));
        }
      }
      store_tall_group<kBoxes>(pass, task, group,
                               (task.block * 2 + tall_box<kBoxes>(i, group)) * kQuantGroup, values);
    }
  }
}

template <int kBoxes, typename P>
__device__ __forceinline__ void finish_tall_gemm2(const Pass<P>& pass, const TileTask& task,
                                                  std::uint32_t group, TallSums<kBoxes>& acc) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t column0 = (task.block * 2 + tall_box<kBoxes>(0, group)) * kTallColumns;
  const std::uint32_t row0 = tall_warp_row<kBoxes>();
  const auto for_columns = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      apply_columns(vector + static_cast<std::size_t>(task.expert) * hidden,
                    column0 + box * kTallColumns + 2 * fresh_thread_index<4>(), hidden, acc[box],
                    16, op);
    }
  };
  if (ffn.more_of_second) {
    for_columns(ffn.down_scale, [](float v, float scale) { return v * scale; });
    for_columns(ffn.down_bias, [](float v, float bias) { return v + bias; });
  }
  const TallStaging staging(pass, group);
  // 64 columns at a time; the second box's sums take the place of the first's, which costs less
  // than to fetch the same code again.
  std::uint32_t column = column0;
#pragma unroll 1
  for (std::uint32_t left = untold<kBoxes>();;) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const std::uint32_t row = row0 + part % 2 * kTallStagedTokens;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto octet = [&](int n) {
          const float* const sums = acc[0] + 4 * (part / 2 * 8 + 4 * j + n) + part % 2 * 2;
          return pack_bf16(sums[0], sums[1]);
        };
        const std::uint32_t lane = fresh_thread_index<32>();
        store_matrices<false>(staging.place(lane % 8, 4 * j + lane / 8), octet(0), octet(1),
                              octet(2), octet(3));
      }
      staging.drain(
          [&](std::uint32_t token, std::uint32_t vector) {
            return row + token < task.rows && column + 8 * vector < hidden;
          },
          [&](std::uint32_t token, std::uint32_t vector) {
            return placed_cell(pass, group, row + token) + column + 8 * vector;
          });
      if (part % 2 == 1) column += 64;
    }
    if (--left == 0) break;
#pragma unroll
    for (int i = 0; i < kTallColumns / 2; ++i) acc[0][i] = acc[kBoxes - 1][i];
  }
}

}  // namespace switchyard::gpu
